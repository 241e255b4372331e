"""What is run beside this process: Ray's launcher on one file, and commands on the head that it makes."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from tandem.cluster.launch.launch_file import LaunchFile
from tandem.core.errors import ConfigError, InternalError

_NEEDS = ("ssh", "rsync")
_FOR_PEOPLE = ("--log-style", "pretty", "--log-color", "false")  # without a terminal it would be a log for programs
_ENVIRONMENT = 'export PATH="$HOME/tandem/venv/bin:$PATH" RAY_AUTH_MODE=token; '

_ENDED = re.compile(r"tandem-ended-with=(\d+)")
"""What a question ends with: the launcher does not tell the code of a command, and SSH has codes of its own."""

_NO_HEAD = re.compile(r"Head node of cluster .* not found")

SSH_OPTIONS = (
    "-o", "StrictHostKeyChecking=no",
    "-o", "UserKnownHostsFile=/dev/null",
    "-o", "LogLevel=ERROR",
    "-o", "BatchMode=yes",
    "-o", "ConnectTimeout=10",
    "-o", "ServerAliveInterval=5",
)  # fmt: skip
"""As Ray's launcher has them: hosts are known by their addresses."""


@dataclass(frozen=True)
class Answer:
    """Of the head to a question.

    Attributes:
        code: with which the command ended; `None`: it was not run, or nobody knows how it ended.
        has_head: the launcher knows of one.
    """

    code: int | None
    text: str = ""
    has_head: bool = True

    @property
    def last_line(self) -> str:
        return (self.text.strip().splitlines() or ["it said nothing"])[-1].strip()


class Launcher:
    """What it prints goes to standard output as it comes."""

    def __init__(self, file: LaunchFile) -> None:
        """Raises `ConfigError`: what it runs is not installed here."""
        self._file = file
        self._ray = str(sys.executable).rpartition("/")[0] + "/ray"
        missing = [name for name in _NEEDS if shutil.which(name) is None]
        if missing:
            raise ConfigError(f"{' and '.join(missing)} cannot be found, which Ray's launcher runs; install it here")

    def up(self) -> None:
        """Raises `InternalError`: the head could not be set up."""
        if _run(self._line("up", "--yes", "--no-config-cache")):
            raise InternalError("`ray up` failed, as said above; mend what it names and run this command again")

    def down(self) -> None:
        """Raises `InternalError`: it failed."""
        if _run(self._line("down", "--yes")):
            raise InternalError("`ray down` failed, as said above")

    def copy_to_head(self, source: str, target: str) -> None:
        """Raises `InternalError`: it could not be copied."""
        if _run(self._line("rsync-up", after=(source, target))):
            raise InternalError(f"{source} could not be copied to the head, as said above")

    def on_head(self, command: str, hear: Callable[[str], None] | None = None) -> bool:
        """Whether a command succeeded on the head, with Tandem's environment; `hear` gets each line that it prints."""
        return _run(self._line_on_head(command), hear) == 0

    def ask_head(self, question: str) -> Answer:
        """What a command says on the head; nothing is printed."""
        line = self._line_on_head(f"{question}; echo tandem-ended-with=$?")
        run = subprocess.run(
            line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if ended := _ENDED.search(run.stdout):
            return Answer(int(ended[1]), run.stdout[: ended.start()])
        return Answer(None, run.stdout, has_head=not _NO_HEAD.search(run.stdout))

    def _line_on_head(self, command: str) -> list[str]:
        """Where Ray's launcher makes the head, it alone knows its address. Of machines that stay it forgets what it has
        started, with the temporary directory where it writes that down."""
        if not self._file.is_local:
            return self._line("exec", after=(command,))
        return ["ssh", *self._file.ssh_options, *SSH_OPTIONS, self._file.head, f"{_ENVIRONMENT}({command})"]

    def _line(self, command: str, *options: str, after: tuple[str, ...] = ()) -> list[str]:
        return [self._ray, command, *_FOR_PEOPLE, *options, str(self._file.path), *after]


def _run(line: list[str], hear: Callable[[str], None] | None = None) -> int:
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
