"""The workers of a simulation as they come and go: started, ready, drained, gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from tandem.cluster.supervisor.autoscale import PoolSize
from tandem.core.identity import Role, WorkerKey
from tandem.sim.kernel import Kernel
from tandem.sim.machine import Machine


@dataclass(slots=True, eq=False)
class Life:
    """Of one worker; seconds of the simulation.

    Attributes:
        seat: the role that its process was started in.
        type: the name of its type, which it keeps in another role.
        is_heir: its process was in the other role before.
        machine: once it is ready.
        heir: the life in the other role that its process begins when nothing is left of this one.
        left_s: since when it takes no new requests.
        gone_s: since when nothing of it is left.
    """

    key: WorkerKey
    role: Role
    asked_s: float
    seat: Role
    type: str = ""
    is_heir: bool = False
    machine: Machine | None = None
    heir: Life | None = None
    ready_s: float | None = None
    left_s: float | None = None
    gone_s: float | None = None

    def is_ready(self, at_s: float) -> bool:
        """Whether it took requests then."""
        return self.ready_s is not None and self.ready_s <= at_s and (self.left_s is None or at_s < self.left_s)

    def worked_s(self, now_s: float) -> float:
        """For so long somebody had to pay for it: from when it was asked for until it was gone."""
        return max(0.0, (now_s if self.gone_s is None else min(now_s, self.gone_s)) - self.asked_s)


class Fleet:
    """Args:
    make: makes a machine that is ready, of a type by its name.
    on_ready, on_leave: called with a machine that takes requests from now on, or no more.
    flexible: lives that may be in another role than their process was started in.
    change_s: from the end of one life to the next of the same process.
    """

    def __init__(
        self,
        kernel: Kernel,
        make: Callable[[WorkerKey, Role, str], Machine],
        on_ready: Callable[[Machine], object],
        on_leave: Callable[[Machine], object],
        flexible: int = 0,
        change_s: float = 0.0,
    ) -> None:
        self.lives: list[Life] = []
        self._kernel, self._make, self._on_ready, self._on_leave = kernel, make, on_ready, on_leave
        self._flexible, self._change_s = flexible, change_s
        self._num_made = {Role.PREFILL: 0, Role.DECODE: 0}
        self._present: dict[Role, list[Life]] = {Role.PREFILL: [], Role.DECODE: []}  # that have not left

    def start(self, role: Role, start_s: float, type_name: str) -> None:
        """One worker more, in `start_s`."""
        life = self._begin(role, role, type_name, is_heir=False)
        self.lives.append(life)
        if start_s:
            self._kernel.after(start_s, lambda: self._ready(life))
        else:
            self._ready(life)

    def _begin(self, role: Role, seat: Role, type_name: str, *, is_heir: bool) -> Life:
        key = WorkerKey(f"{role.value}-{self._num_made[role]}", "1")
        life = Life(key, role, self._kernel.now_s, seat, type_name, is_heir)
        self._num_made[role] += 1
        self._present[role].append(life)
        return life

    def _ready(self, life: Life) -> None:
        if life.left_s is not None:  # it was given up while it started
            return
        life.machine, life.ready_s = self._make(life.key, life.role, life.type), self._kernel.now_s
        self._on_ready(life.machine)

    def give_up(self, role: Role) -> None:
        """One worker less: the last that starts, or else one that is the other pool's, or the one that holds least; it
        ends what it has."""
        starting = [life for life in self._present[role] if life.machine is None]
        self._let_go(starting[-1] if starting else self._first_to_go(role))

    def give(self, giver: Role, taker: Role, *, instead: bool) -> None:
        """One worker that is ready changes its role, once it has ended what it has; `instead` of one that starts."""
        if instead:
            self.give_up(taker)
        life = self._first_to_go(giver)
        life.heir = self._begin(taker, life.seat, life.type, is_heir=True)
        self._let_go(life)

    def _first_to_go(self, role: Role) -> Life:
        ready = [life for life in self._present[role] if life.machine is not None]
        return min(reversed(ready), key=lambda life: (life.seat is role, _num_held(life)))

    def _let_go(self, life: Life) -> None:
        self._present[life.role].remove(life)
        life.left_s = self._kernel.now_s
        if life.machine is None:
            life.gone_s = life.left_s
        else:
            self._on_leave(life.machine)

    def die(self, worker: str, start_s: float) -> Machine | None:
        """A worker is gone at once, and another one is started for it, unless it was to leave. `None`: none is there of
        this name."""
        there = (each for each in self.lives if each.key.worker_id == worker and each.gone_s is None)
        life = next((each for each in there if each.machine is not None), None)
        if life is None or life.machine is None:
            return None
        life.gone_s = self._kernel.now_s
        if life.left_s is None:
            self._let_go(life)
            self.start(life.role, start_s, life.type)
        elif life.heir is not None and life.heir.left_s is None:
            self._present[life.heir.role].remove(life.heir)
            self.start(life.heir.role, start_s, life.type)
        return life.machine

    def look(self) -> None:
        """Those that have left and hold nothing any more are gone, or go on in the other role."""
        now_s = self._kernel.now_s
        for life in list(self.lives):
            if life.left_s is None or life.gone_s is not None or life.machine is None or not life.machine.is_empty:
                continue
            life.gone_s = now_s
            if (heir := life.heir) is not None and heir.left_s is None:
                heir.asked_s = now_s  # before, its process was paid for as `life`
                self.lives.append(heir)
                self._kernel.after(self._change_s, partial(self._ready, heir))

    @property
    def is_changing_role(self) -> bool:
        """A worker is on its way from one pool to the other: until it serves there."""
        return any(life.is_heir and life.machine is None for lives in self._present.values() for life in lives)

    def may_go(self, giver: Role, taker: Role) -> bool:
        """Whether a worker of the one pool may change its role to the other's now."""
        ready = [life for life in self._present[giver] if life.machine is not None]
        num_away = sum(life.seat is not life.role for lives in self._present.values() for life in lives)
        return bool(ready) and (num_away < self._flexible or any(life.seat is taker for life in ready))

    def machines(self, role: Role) -> Iterator[Machine]:
        """That take requests."""
        return (life.machine for life in self._present[role] if life.machine is not None)

    def num_paid(self, role: Role) -> int:
        """Workers that start, serve or drain now."""
        return sum(life.role is role and life.gone_s is None for life in self.lives)

    def size(self, role: Role) -> PoolSize:
        present = self._present[role]
        starting = [life for life in present if life.machine is None]
        leaving = sum(life.role is role and life.left_s is not None and life.gone_s is None for life in self.lives)
        return PoolSize(
            wanted=len(present),
            ready=frozenset(life.key.worker_id for life in present if life.machine is not None),
            starting=frozenset(life.key.worker_id for life in starting),
            changing=frozenset(life.key.worker_id for life in starting if life.is_heir),
            num_leaving=leaving,
        )


def _num_held(life: Life) -> int:
    assert life.machine is not None
    return len(life.machine.choices) + life.machine.num_waiting
