"""Ray's launcher as a command of this environment: `ray up`, `ray exec` and the like on one file."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tandem.core.errors import ConfigError, InternalError

_NEEDS = ("ssh", "rsync")
_FOR_PEOPLE = ("--log-style", "pretty", "--log-color", "false")  # without a terminal it would be a log for programs


class Launcher:
    """What it prints goes to standard output as it comes."""

    def __init__(self, file: Path) -> None:
        """Raises `ConfigError`: what it runs is not installed here."""
        self._file = file
        self._ray = str(Path(sys.executable).parent / "ray")
        missing = [name for name in _NEEDS if shutil.which(name) is None]
        if missing:
            raise ConfigError(f"{' and '.join(missing)} cannot be found, which Ray's launcher runs; install it here")

    def up(self) -> None:
        """Raises `InternalError`: the head could not be set up."""
        if self._run("up", "--yes", "--no-config-cache"):
            raise InternalError("`ray up` failed, as said above; mend what it names and run this command again")

    def down(self) -> None:
        """Raises `InternalError`: it failed."""
        if self._run("down", "--yes"):
            raise InternalError("`ray down` failed, as said above")

    def copy_to_head(self, source: Path, target: str) -> None:
        """Raises `InternalError`: it could not be copied."""
        if self._run("rsync-up", after=(str(source), target)):
            raise InternalError(f"{source} could not be copied to the head, as said above")

    def on_head(self, command: str, hear: Callable[[str], None] | None = None) -> bool:
        """Whether a command succeeded on the head, run in a login shell; `hear` gets each line as it is printed."""
        return self._run("exec", after=(command,), hear=hear) == 0

    def asks_head(self, command: str) -> bool:
        """As `on_head`, and nothing is printed."""
        line = [self._ray, "exec", str(self._file), command]
        return subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode == 0

    def _run(
        self, command: str, *options: str, after: tuple[str, ...] = (), hear: Callable[[str], None] | None = None
    ) -> int:
        line = [self._ray, command, *_FOR_PEOPLE, *options, str(self._file), *after]
        with subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout is not None
            for text in process.stdout:
                sys.stdout.write(text)
                sys.stdout.flush()
                if hear is not None:
                    hear(text.rstrip())
        return process.returncode
