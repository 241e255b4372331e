"""Where Splitwise's schedulers send a request: the machine of its prompt, and that of its tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.splitwise_oracle.machine import ROOM, Machine
from benchmarks.splitwise_oracle.request import Request
from benchmarks.splitwise_oracle.runs import RoleChange

#: Tokens that may be pending where something waits.
MAX_PENDING = 8192

Choice = tuple[Machine, Machine]


class Baseline:
    """Each machine does both phases: the one with the fewest pending tokens."""

    def __init__(self, machines: list[Machine]) -> None:
        self._machines = machines
        self.role_changes: list[RoleChange] = []

    def choose(self, _request: Request) -> Choice:
        machine = min(self._machines, key=_pending)
        return machine, machine

    def emptied(self, machine: Machine) -> None:
        pass


@dataclass
class _Place:
    """A machine, where it belongs, and the pool where it is."""

    home: str
    pool: str


class MixedPool:
    """Pools of prompts and tokens, and between them the mixed pool, to which a machine goes when its phase is short.

    It goes home when it is empty. Of several that are as good, the first in the order of its pool; who comes is last.
    """

    def __init__(self, machines: list[Machine], homes: list[str], now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._places = {machine.number: _Place(home, home) for machine, home in zip(machines, homes, strict=True)}
        self._pools: dict[str, list[Machine]] = {"prompt": [], "token": [], "mixed": []}
        for machine, home in zip(machines, homes, strict=True):
            self._pools[home].append(machine)
        self.role_changes: list[RoleChange] = []

    def choose(self, request: Request) -> Choice:
        """Where both are found, these; where one is not, a machine of the other pool; where none is left, any."""
        for_prompt = self._first("prompt", _pending, lambda machine: _may_prompt(machine, request))
        for_token = self._first("token", _reserved, lambda machine: _may_token(machine, request))
        if for_token is None and self._pools["prompt"]:
            for_token = min(self._pools["prompt"], key=_reserved)
            self._move(for_token, "mixed")
        if for_prompt is None and self._pools["token"]:
            for_prompt = min(self._pools["token"], key=_pending)
            self._move(for_prompt, "mixed")
        if for_prompt is None or for_token is None:
            everywhere = [machine for pool in ("prompt", "mixed", "token") for machine in self._pools[pool]]
            for_prompt = for_token = min(everywhere, key=_pending)
        return for_prompt, for_token

    def emptied(self, machine: Machine) -> None:
        """Whatever is still to come, transfers from here too, it goes home where no task is here."""
        place = self._places[machine.number]
        if place.pool == "mixed" and not machine.present:
            self._move(machine, place.home)

    def _first(self, pool: str, key: Callable[[Machine], int], may: Callable[[Machine], bool]) -> Machine | None:
        """The best of its pool, or else of the mixed one. No second best is asked."""
        for machines in (self._pools[pool], self._pools["mixed"]):
            best = min(machines, key=key, default=None)
            if best is not None and may(best):
                return best
        return None

    def _move(self, machine: Machine, pool: str) -> None:
        place = self._places[machine.number]
        self.role_changes.append(RoleChange(self._now_s(), machine.number, place.pool, pool))
        self._pools[place.pool].remove(machine)
        self._pools[pool].append(machine)
        place.pool = pool


def _pending(machine: Machine) -> int:
    return machine.num_pending


def _reserved(machine: Machine) -> int:
    return machine.num_reserved


def _may_prompt(machine: Machine, request: Request) -> bool:
    return not machine.has_queue or machine.num_pending + request.num_prompt <= MAX_PENDING


def _may_token(machine: Machine, request: Request) -> bool:
    return machine.num_reserved + request.memory < ROOM
