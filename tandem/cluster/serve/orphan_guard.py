"""A script beside `tandem serve`: when that process ends, in whatever way, it kills what is left of the cluster.

    python orphan_guard.py PID MARK

The kernel ends Ray's raylet and our actors with their parents. Ray's two agents go on: as long as Ray waits for a lost
control store, they try to tell it that their raylet has died. Everything of one cluster carries the
environment variable `TANDEM_CLUSTER=MARK`. Small on purpose: it imports neither Ray nor Tandem.
"""

import os
import select
import signal
import sys
import time
from pathlib import Path

VARIABLE = "TANDEM_CLUSTER"
_ROUND_S = 0.05
_KILLING_S = 10.0


def main(parent: int, mark: str) -> None:
    """Wait until `parent` has ended, then kill what carries `mark` until nothing does."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a Ctrl-C reaches the whole group: not meant for us
        signal.signal(number, signal.SIG_IGN)
    _wait_for_end(parent)
    needle = f"{VARIABLE}={mark}".encode()
    deadline = time.monotonic() + _KILLING_S
    while (left := _marked(needle)) and time.monotonic() < deadline:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(_ROUND_S)  # for the kernel to end them; some may just have been started by others


def _wait_for_end(parent: int) -> None:
    try:
        fd = os.pidfd_open(parent)
    except ProcessLookupError:
        return
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    if os.getppid() == parent:  # else it had ended before the pidfd was opened, which may be another process's
        poller.poll()


def _marked(needle: bytes) -> list[int]:
    """Processes of this user that carry the mark and are not zombies."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if needle in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:  # ended meanwhile, or another user's
            continue
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
