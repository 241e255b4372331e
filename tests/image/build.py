"""Carries out a Dockerfile in fresh roots, step by step, without an engine."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from tests.image.dockerfile import Context, Instruction, stages_of
from tests.image.fresh_root import Container, PipSettings, make_python_base

STEP_TIMEOUT_S = 1500


@dataclass
class Image:
    """A root, and how its program is started there."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    user: str = "root"
    workdir: str = "/"
    ports: list[int] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    healthcheck: list[str] = field(default_factory=list)


class Build:
    """One run of a Dockerfile.

    Args:
        context: the folder with the Dockerfile and its .dockerignore.
        scratch: where the roots are made.
        arguments: what `--build-arg` would say.
    """

    def __init__(self, context: Path, scratch: Path, arguments: dict[str, str]) -> None:
        self._context, self._scratch, self._arguments = Context(context), scratch, arguments
        self._text = (context / "Dockerfile").read_text()
        self._pip = PipSettings.here()
        self._images: dict[str, Image] = {}  # of stages by name, and of bases
        self.executed: list[Instruction] = []

    def run(self) -> Image:
        """The image of the last stage.

        Raises:
            RuntimeError: a command failed; says what it said.
            ValueError: an instruction that is not known here.
        """
        for stage in stages_of(self._text):
            if stage.base not in self._images:
                self._images[stage.base] = Image(self._scratch / "base")
                make_python_base(self._images[stage.base].root, stage.base)
            image = Image(self._scratch / (stage.name or "last"))
            base = self._images[stage.base].root
            subprocess.run(["cp", "-a", "--reflink=auto", str(base), str(image.root)], check=True)
            for instruction in stage.instructions:
                self._carry_out(instruction, image)
                self.executed.append(instruction)
            self._images[stage.name] = image
        return image

    def _carry_out(self, instruction: Instruction, image: Image) -> None:
        value = instruction.value
        match instruction.name:
            case "RUN":
                self._execute(value, image)
            case "COPY":
                self._copy(value.split(), image)
            case "ARG":
                name, _, default = value.partition("=")
                image.environment[name] = self._arguments.get(name, default.strip('"'))
            case "WORKDIR":
                image.workdir = value
                (image.root / value.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "USER":
                image.user = value
            case "EXPOSE":
                image.ports += map(int, value.split())
            case "ENTRYPOINT":
                image.entrypoint = json.loads(value)
            case "CMD":
                image.command = json.loads(value)
            case "HEALTHCHECK":
                image.healthcheck = json.loads(value.partition(" CMD ")[2])
            case other:
                raise ValueError(f"this test cannot carry out {other}")

    def _execute(self, command: str, image: Image) -> None:
        with Container(image.root) as container:
            container.run(
                ["/bin/sh", "-c", command],
                timeout_s=STEP_TIMEOUT_S,
                user=image.user,
                workdir=image.workdir,
                environment=image.environment | self._pip.variables,
                shared=self._pip.files,
            )

    def _copy(self, words: list[str], image: Image) -> None:
        options = [word for word in words if word.startswith("--")]
        *sources, target = (word for word in words if not word.startswith("--"))
        into = image.root / (Path("/") / image.workdir / target).relative_to("/")
        origin = next((option.removeprefix("--from=") for option in options), "")
        to_folder = target.endswith("/") or len(sources) > 1
        for source in sources:
            if origin:
                found = [(path, Path(path.name)) for path in self._images[origin].root.glob(source.lstrip("/"))]
            else:
                found = list(self._context.files_of(source))
            if not found:
                raise RuntimeError(f"COPY finds no {source}")
            of_a_folder = not origin and (self._context.folder / source).is_dir()
            for path, name in found:
                to = into / name if to_folder or of_a_folder else into
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, to)
