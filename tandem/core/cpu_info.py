"""What Linux says of this machine's CPUs."""

from __future__ import annotations

import re
from pathlib import Path


def of_cpu(what: str) -> str:
    """A line of /proc/cpuinfo by its name, of the first one; empty where there is none."""
    found = re.search(rf"^{what}\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else ""
