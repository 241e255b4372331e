"""The workers of a simulation as they come and go: started, ready, drained, gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tandem.cluster.supervisor.autoscale import PoolSize
from tandem.core.identity import Role, WorkerKey
from tandem.sim.kernel import Kernel
from tandem.sim.machine import Machine


@dataclass(slots=True, eq=False)
class Life:
    """Of one worker; seconds of the simulation.

    Attributes:
        machine: once it is ready.
        left_s: since when it takes no new requests.
        gone_s: since when nothing of it is left.
    """

    key: WorkerKey
    role: Role
    asked_s: float
    machine: Machine | None = None
    ready_s: float | None = None
    left_s: float | None = None
    gone_s: float | None = None

    def is_ready(self, at_s: float) -> bool:
        """Whether it took requests then."""
        return self.ready_s is not None and self.ready_s <= at_s and (self.left_s is None or at_s < self.left_s)

    def worked_s(self, now_s: float) -> float:
        """For so long somebody had to pay for it: from when it was asked for until it was gone."""
        return (now_s if self.gone_s is None else self.gone_s) - self.asked_s


class Fleet:
    """Args:
    make: makes a machine that is ready.
    on_ready, on_leave: called with a machine that takes requests from now on, or no more.
    """

    def __init__(
        self,
        kernel: Kernel,
        make: Callable[[WorkerKey, Role], Machine],
        on_ready: Callable[[Machine], object],
        on_leave: Callable[[Machine], object],
    ) -> None:
        self.lives: list[Life] = []
        self._kernel, self._make, self._on_ready, self._on_leave = kernel, make, on_ready, on_leave
        self._num_made = {Role.PREFILL: 0, Role.DECODE: 0}
        self._present: dict[Role, list[Life]] = {Role.PREFILL: [], Role.DECODE: []}  # that have not left

    def start(self, role: Role, start_s: float) -> None:
        """One worker more, in `start_s`."""
        name = f"{role.value}-{self._num_made[role]}"
        self._num_made[role] += 1
        life = Life(WorkerKey(name, "1"), role, self._kernel.now_s)
        self.lives.append(life)
        self._present[role].append(life)
        if start_s:
            self._kernel.after(start_s, lambda: self._ready(life))
        else:
            self._ready(life)

    def _ready(self, life: Life) -> None:
        if life.left_s is not None:  # it was given up while it started
            return
        life.machine, life.ready_s = self._make(life.key, life.role), self._kernel.now_s
        self._on_ready(life.machine)

    def give_up(self, role: Role) -> None:
        """One worker less: the last that starts, or else the one that holds least; it ends what it has."""
        present = self._present[role]
        starting = [life for life in present if life.machine is None]
        life = starting[-1] if starting else min(reversed(present), key=_num_held)
        present.remove(life)
        life.left_s = self._kernel.now_s
        if life.machine is None:
            life.gone_s = life.left_s
        else:
            self._on_leave(life.machine)

    def look(self) -> None:
        """Those that have left and hold nothing any more are gone."""
        for life in self.lives:
            if life.left_s is not None and life.gone_s is None and life.machine is not None and life.machine.is_empty:
                life.gone_s = self._kernel.now_s

    def machines(self, role: Role) -> Iterator[Machine]:
        """That take requests."""
        return (life.machine for life in self._present[role] if life.machine is not None)

    def num_paid(self, role: Role) -> int:
        """Workers that start, serve or drain now."""
        return sum(life.role is role and life.gone_s is None for life in self.lives)

    def size(self, role: Role) -> PoolSize:
        present = self._present[role]
        leaving = sum(life.role is role and life.left_s is not None and life.gone_s is None for life in self.lives)
        return PoolSize(
            wanted=len(present),
            ready=frozenset(life.key.worker_id for life in present if life.machine is not None),
            starting=frozenset(life.key.worker_id for life in present if life.machine is None),
            num_leaving=leaving,
        )


def _num_held(life: Life) -> int:
    assert life.machine is not None
    return len(life.machine.choices) + life.machine.num_waiting
