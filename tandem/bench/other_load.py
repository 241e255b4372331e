"""How much of the machine others use during a measurement."""

from __future__ import annotations

import os
import time

import psutil

#: More cores than this, used by others just before a measurement, are a disturbance.
QUIET_CORES = 0.2
#: Fields of /proc/stat up to `steal`; those behind, of guests, are in the first two already.
_NUM_TIMES = 8


class OtherLoad:
    """How many of this process's cores others have used since this was made: a measurement's disturbance."""

    def __init__(self) -> None:
        self._start_s, self._start_others_s = time.monotonic(), self._others_s()

    def cores(self) -> float:
        """On average; what a hypervisor took away counts too."""
        return max(0.0, self._others_s() - self._start_others_s) / (time.monotonic() - self._start_s)

    @staticmethod
    def _others_s() -> float:
        """CPU seconds of these cores that neither this process nor its ended children used."""
        all_cores, own = psutil.cpu_times(percpu=True), os.times()
        used = [all_cores[core] for core in os.sched_getaffinity(0)]
        busy_s = sum(sum(core[:_NUM_TIMES]) - core.idle - getattr(core, "iowait", 0.0) for core in used)
        return busy_s - (own.user + own.system + own.children_user + own.children_system)
