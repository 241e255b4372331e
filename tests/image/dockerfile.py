"""The instructions of a Dockerfile, and what of a checkout it may copy: as much of both as ours use."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Instruction:
    """One instruction, with its continuation lines joined."""

    name: str
    value: str


@dataclass
class Stage:
    """What follows a FROM, up to the next one."""

    base: str
    name: str
    instructions: list[Instruction] = field(default_factory=list)


def stages_of(text: str) -> list[Stage]:
    """The stages in their order.

    Raises:
        ValueError: an instruction stands before the first FROM.
    """
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    stages: list[Stage] = []
    for line in re.sub(r"\\\n\s*", "", lines).splitlines():
        if not line.strip():
            continue
        name, _, value = line.strip().partition(" ")
        if name == "FROM":
            base, _, alias = value.partition(" AS ")
            stages.append(Stage(base.strip(), alias.strip()))
        elif not stages:
            raise ValueError(f"{name} stands before the first FROM")
        else:
            stages[-1].instructions.append(Instruction(name, value.strip()))
    return stages


class Context:
    """The files that go to the engine: those of a folder that its .dockerignore lets through."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        lines = (line.strip() for line in (folder / ".dockerignore").read_text().splitlines())
        self._rules = [
            (_pattern(line.removeprefix("!")), line.startswith("!"))
            for line in lines
            if line and not line.startswith("#")
        ]

    def files_of(self, source: str) -> Iterator[tuple[Path, Path]]:
        """Each file that `COPY source DIR/` would copy, and its path below DIR."""
        origin = self.folder / source
        below = [path for path in origin.rglob("*") if path.is_file()] if origin.is_dir() else [origin]
        for path in below:
            if path.is_file() and self._lets_through(path.relative_to(self.folder).as_posix()):
                yield path, path.relative_to(origin) if origin.is_dir() else Path(path.name)

    def _lets_through(self, name: str) -> bool:
        """The last rule that matches decides, as Docker has it."""
        let_through = True
        for pattern, keeps in self._rules:
            if pattern.match(name):
                let_through = keeps
        return let_through


def _pattern(line: str) -> re.Pattern[str]:
    """A rule matches a path, and with it all that lies below."""
    parts = re.split(r"(\*\*/|\*)", line.strip("/"))
    inside = "".join({"**/": "(?:.*/)?", "*": "[^/]*"}.get(part, re.escape(part)) for part in parts)
    return re.compile(rf"{inside}(?:/.*)?$")
