"""A script that becomes another program, which the kernel tells to stop when the process that started it has ended.

    python with_parent.py PID PROGRAM ARGUMENTS…

PID is of who starts it. So a measurement that is killed, which ends nothing any more, leaves no servers behind: they
get SIGTERM, as they do at its end. It leads a group of its own, by which all that it starts can be ended. Small on
purpose: it imports nothing of Tandem.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, argv: list[str]) -> None:
    """Does not return."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it has ended before
        sys.exit(128 + signal.SIGTERM)
    if os.getsid(0) != os.getpid():  # who leads a session leads a group
        os.setpgid(0, 0)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.exit(f"{argv[0]} cannot be started: {error.strerror}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
