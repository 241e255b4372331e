"""Whether memory stays flat: the resident size of every process that lives long enough, over time."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field

import psutil

from tests.scenarios.faults.ray_site import RaySite, kind_of

_MIB = 1 << 20


@dataclass(frozen=True)
class Trend:
    """Of one process: how long it was watched, its size at the end, and a line through the second half of its time.

    The first half is left out: caches fill, code is loaded.

    Attributes:
        role: prefill, decode, router or supervisor; another process is called by its kind.
        grown_mib: by that line, from the middle to the end.
    """

    role: str
    pid: int
    seconds: float
    end_mib: float
    mib_per_minute: float
    grown_mib: float


@dataclass
class MemoryWatch:
    """A thread that samples all processes of a site while its block runs."""

    site: RaySite
    period_s: float = 5.0
    _samples: dict[int, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    _roles: dict[int, str] = field(default_factory=dict)  # by pid, of those that the cluster has named
    _kinds: dict[int, str] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> MemoryWatch:
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def trends(self, at_least_s: float) -> list[Trend]:
        """Of the processes that were watched for so long; the largest first."""
        found = []
        for pid, samples in self._samples.items():
            seconds = samples[-1][0] - samples[0][0]
            half = samples[len(samples) // 2 :]
            if seconds >= at_least_s and len(half) > 2:
                slope = statistics.linear_regression([at for at, _ in half], [size for _, size in half]).slope
                grown = slope * (half[-1][0] - half[0][0])
                end = round(half[-1][1], 1)
                role = self._roles.get(pid, self._kinds[pid])
                found.append(Trend(role, pid, round(seconds), end, round(slope * 60, 2), round(grown, 1)))
        return sorted(found, key=lambda trend: -trend.end_mib)

    def _run(self) -> None:
        while not self._stop.wait(self.period_s):
            now = time.monotonic()
            self._roles |= {process.pid: name.partition("-")[0] for name, process in self.site.running().items()}
            for process in self.site.serve.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._kinds[process.pid] = kind_of(process.cmdline())
                    self._samples[process.pid].append((now, process.memory_info().rss / _MIB))
