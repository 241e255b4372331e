"""What is left of a rack on this machine: nothing, once it has been stopped or its owner has ended."""

from __future__ import annotations

import re
from pathlib import Path

import psutil

_LINKS = re.compile(r"(port\d+b?|lan[01])")  # of the switch


def left_of(directory: Path) -> list[str]:
    """Processes, mounts, network links and files of the rack in `directory`, in words."""
    named = str(directory)
    processes = [
        f"process {process.pid}: {' '.join(process.info['cmdline'])}"
        for process in psutil.process_iter(["cmdline"])
        if any(named in word for word in process.info["cmdline"] or ())
    ]
    mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if named in line]
    links = [f"link {name}" for name in psutil.net_if_addrs() if _LINKS.fullmatch(name)]
    files = [str(path) for path in (directory / "rack").iterdir()]
    return [*processes, *mounts, *links, *files]
