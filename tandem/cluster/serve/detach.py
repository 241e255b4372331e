"""`tandem serve --detach`: the same in a session of its own, which outlives the terminal or SSH session it began in.

    this process ──fork──> the same program, in a new session, with its output in a file
         │  follows that file until the other is ready (a byte comes by a pipe) or has ended (its pidfd says so)
         └─> ends
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tandem.core.errors import ConfigError

_LOOK_S = 0.2  # at what the other has said meanwhile: a file that grows is no event


def default_log(port: int) -> Path:
    """`$XDG_STATE_HOME/tandem/serve-PORT.log`, as a rule in `~/.local/state`."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "tandem" / f"serve-{port}.log"


def serve_detached(serve: Callable[[Callable[[], None]], int], log: Path) -> int:
    """Run `serve` elsewhere and return when it is ready, or has failed: its exit code.

    To be called while this process has one thread and has not set up anything.

    Args:
        serve: gets what it calls when it is ready.

    Raises:
        ConfigError: `log` cannot be written.
    """
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise ConfigError(f"cannot write {log}: {error.strerror}; name another file with --log", key="--log") from error
    begin = os.lseek(output, 0, os.SEEK_END)
    news, tell = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(news)
        os.setsid()
        _become_background(output)
        return serve(lambda: _tell_ready(tell))
    os.close(output)
    os.close(tell)
    try:
        is_ready = _follow(log, begin, news, os.pidfd_open(pid))
    except KeyboardInterrupt:
        print(f"\nIt goes on starting without this terminal; `tandem stop` ends it. Its log is {log}.")
        raise
    if not is_ready:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) or 1
    print(f"It runs on without this terminal. Its log is {log}.")
    return 0


def _become_background(output: int) -> None:
    """Nothing of the terminal stays open here."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(output)


def _tell_ready(tell: int) -> None:
    with suppress(BrokenPipeError):  # nobody follows any more: that SSH session has ended
        os.write(tell, b"!")
    os.close(tell)


def _follow(log: Path, begin: int, news: int, process: int) -> bool:
    """Print what is said from `begin` on until it is ready; `False`: it has ended before."""
    with log.open(errors="replace") as said:
        said.seek(begin)
        while True:
            heard, _, _ = select.select([news, process], [], [], _LOOK_S)
            sys.stdout.write(said.read())
            sys.stdout.flush()
            if heard:
                return news in heard and os.read(news, 1) == b"!"
