"""Processes that a measurement starts: each in a group of its own, with a log, and ended whatever happens: also when
the measurement is killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tandem.bench import with_parent

_STOP_S = 20.0
#: The keys of the user's own server: one that we start asks for none, as we send none.
_NO_API_KEYS = {"TANDEM_API_KEYS": ""}
_SHOWN_LINES = 15


async def start_child(
    argv: Sequence[str], log: Path, env: Mapping[str, str], *, own_session: bool = True
) -> asyncio.subprocess.Process:
    """In a group of its own: Ctrl-C at the terminal is ours alone, and what it leaves behind can be ended. It gets
    SIGTERM when the thread that has started it ends, as it does with this process.

    Args:
        env: over the environment of this process, from which it has all but API keys.
        own_session: as a server has that runs beside its clients. Linux shares the cores among sessions ("autogroup",
            sched(7)), so processes of one cluster are to be in one.
    """
    with log.open("wb") as output:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", with_parent.__file__, str(os.getpid()), *argv),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **_NO_API_KEYS, **env},
            start_new_session=own_session,
        )


async def stop_child(process: asyncio.subprocess.Process) -> None:
    """In order, by SIGTERM; by SIGKILL what is left of its group after that."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_S):
                await process.wait()
    finally:
        # Also where a second signal ends the wait.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def log_tail(log: Path) -> str:
    """The last lines, and where there are more."""
    lines = log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:]
    return f"the end of {log}:\n" + "\n".join(lines)
