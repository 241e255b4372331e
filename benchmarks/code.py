"""Which code of Tandem was measured: its commit where git knows one, and a digest of its sources anywhere."""

from __future__ import annotations

import hashlib
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tandem.core.version import TOP_LEVEL_NAMES

#: Where the packages lie that this process, and the servers that it starts, import.
PACKAGES = Path(__file__).resolve().parents[1]
_NUM_DIGITS = 16


@dataclass(frozen=True)
class Code:
    """Two of equal `digest` are the same code, whatever was committed between them."""

    digest: str  # of all sources
    commit: str | None = None  # `None`: git knows nothing of these sources
    is_dirty: bool | None = None  # the sources are not those of `commit`

    @classmethod
    def of(cls, directory: Path = PACKAGES) -> Code:
        """The packages in `directory`, as they are now."""
        # A checkout may lie around an installation that it does not know: then its commit says nothing of this.
        if not _git(directory, "ls-files", "--", *TOP_LEVEL_NAMES):
            return cls(_digest(directory))
        changed = _git(directory, "status", "--porcelain", "--untracked-files=all", "--",
                       *(f":(glob){name}/**/*.py" for name in TOP_LEVEL_NAMES))  # fmt: skip
        return cls(_digest(directory), _git(directory, "rev-parse", "HEAD") or None, bool(changed))

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def _digest(directory: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(path for name in TOP_LEVEL_NAMES for path in (directory / name).rglob("*.py")):
        source = path.read_bytes()
        # With its length, so that no text can move from one file to the next.
        found.update(f"{path.relative_to(directory).as_posix()} {len(source)}\n".encode() + source)
    return found.hexdigest()[:_NUM_DIGITS]


def _git(directory: Path, *arguments: str) -> str:
    """What git says; nothing where it is not installed, or knows no such repository."""
    command = ("git", "--no-optional-locks", "-C", str(directory), *arguments)
    try:
        answer = subprocess.run(command, check=False, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""
