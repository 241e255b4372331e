"""What workers and routers are told of others. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tandem.cluster.supervisor import events as ev
from tandem.cluster.supervisor.slots import Phase, Slot
from tandem.core.machine import HostBoot

MAX_ENDED = 256
"""Proven ends that routers are told of, the newest: a request waits for one no longer than for lease and grace."""


@dataclass
class Ends:
    """Proven ends of workers. `newest`: their incarnations, oldest first."""

    newest: tuple[str, ...] = ()

    def note(self, workers: Mapping[str, Slot], ended: Iterable[str]) -> list[ev.Instruction]:
        """Every other worker may have exchanged pages with those that have ended; each is told of all in one call."""
        ended = tuple(ended)
        fresh = [life for life in ended if life not in self.newest]
        self.newest = (*self.newest, *fresh)[-MAX_ENDED:]
        out: list[ev.Instruction] = []
        for slot in workers.values() if ended else ():
            others = tuple(life for life in ended if life != slot.incarnation)
            if slot.phase is Phase.WAITING or not others:
                continue
            for life in others:
                slot.owe(life)
            if slot.listens:
                out.append(ev.NoteEnded(slot.name, slot.incarnation, others))
        return out


def remind(slot: Slot) -> list[ev.Instruction]:
    """Of the ends that it has not taken yet."""
    return [ev.NoteEnded(slot.name, slot.incarnation, tuple(slot.untold))] if slot.untold else []


class RouterSeat(NamedTuple):
    """A router that listens. `host`: equal for two on one host, which may have several of Ray's nodes."""

    name: str
    address: str
    host: HostBoot | str


def seat_of(router: Slot) -> RouterSeat:
    """Of one that listens."""
    placement = router.placement
    return RouterSeat(router.name, router.address, (placement.boot or placement.node_id) if placement else "")


def membership_for(
    routers: Iterable[Slot],
    version: int,
    members: tuple[ev.Member, ...],
    seats: tuple[RouterSeat, ...],
    serving: Sequence[str],
    ended: tuple[str, ...],
    colocated: bool,
    pools: tuple[ev.PoolSize, ...],
) -> list[ev.Instruction]:
    """The membership for each of these routers, with its number among those that serve.

    Args:
        seats: of all routers that listen.
        serving: names of those that serve.
    """
    num = max(1, len(serving))
    numbers = {name: number for number, name in enumerate(serving)}
    return [
        ev.PublishMembership(
            router.name,
            router.incarnation,
            version,
            members,
            num,
            numbers.get(router.name, router.index % num),
            ended,
            colocated,
            pools,
            tuple(
                ev.OtherRouter(seat.name, seat.address, seat.host == seat_of(router).host)
                for seat in seats
                if seat.name != router.name
            ),
        )
        for router in routers
    ]
