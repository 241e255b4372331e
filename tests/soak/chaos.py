"""What is done to the cluster during the soak: every few seconds one process is killed or stopped, by a seed."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import psutil

from tests.scenarios.faults.ray_site import RaySite
from tests.scenarios.faults.site import LEASE_S

_TARGETS = {"prefill": 8, "decode": 8, "router": 1, "supervisor": 2}
"""Which kind of process is struck, and how often."""
_STOP_SHARE = 0.25
_ROUTER_AFTERMATH_S = 25.0
"""So long after a fault of the router its clients may find a broken connection or none."""


@dataclass
class Chaos:
    """A thread that strikes one process each `period_s` while its block runs."""

    site: RaySite
    seed: int
    period_s: float = 5.0
    strikes: Counter[str] = field(default_factory=Counter)
    router_struck_at: list[float] = field(default_factory=list)  # wall clock
    _stop: threading.Event = field(default_factory=threading.Event)
    _failure: BaseException | None = None

    def __enter__(self) -> Chaos:
        self._thread = threading.Thread(target=self._run, name="chaos")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)
        if self._failure is not None:
            raise self._failure

    def router_struck_since(self, since: float) -> bool:
        """Whether a connection begun at `since` may have met a router that was struck."""
        return any(at + _ROUTER_AFTERMATH_S > since for at in self.router_struck_at)

    def _run(self) -> None:
        rng = random.Random(self.seed)
        try:
            while not self._stop.wait(self.period_s):
                (role,) = rng.choices(tuple(_TARGETS), tuple(_TARGETS.values()))
                self._strike(rng, role)
        except BaseException as error:  # noqa: BLE001 - raised again where the test waits
            self._failure = error

    def _strike(self, rng: random.Random, role: str) -> None:
        process = self._find(rng, role)
        if process is None:
            self.strikes[f"{role}: none there"] += 1
            return
        signal = "stop" if rng.random() < _STOP_SHARE else "kill"
        if role == "router":
            self.router_struck_at.append(time.time())
        try:
            if signal == "kill":
                process.kill()
            else:
                process.suspend()
                threading.Timer(rng.uniform(1.2, 3.0) * LEASE_S, _resume, [process]).start()
        except psutil.NoSuchProcess:
            signal = "gone already"
        self.strikes[f"{role}: {signal}"] += 1

    def _find(self, rng: random.Random, role: str) -> psutil.Process | None:
        """One of this role that runs now."""
        found = [process for name, process in self.site.running().items() if name.startswith(role)]
        return rng.choice(found) if found else None


def _resume(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):  # killed meanwhile
        process.resume()
