"""Which build the processes of a cluster shall run, and who is replaced next to get there. Pure.

One process after the other is replaced as by `tandem drain`: its successor, of the wanted build, is ready before it
leaves, but where there is no room for both. Where a successor cannot start, the change is taken back, in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tandem.cluster.supervisor.events import INSTALLED, Build
from tandem.cluster.supervisor.slots import Phase, Slot
from tandem.core.identity import Role

# Routers last: they are the ones that clients are connected to.
_ORDER = {Role.PREFILL: 0, Role.DECODE: 1, Role.ROUTER: 2}


@dataclass
class Upgrade:
    """The build that is wanted, and what became of the last change."""

    wanted: Build = INSTALLED
    before: Build = INSTALLED  # to go back to
    note: str = ""  # for people: why the last change was taken back
    # Incarnations that stay as they are, since no successor of the wanted build could start.
    _declined: set[str] = field(default_factory=set)

    def change(self, build: Build) -> None:
        """From now on all processes shall run this build."""
        self.before, self.wanted, self.note = self.wanted, build, ""
        self._declined.clear()

    def give_up(self, slot: Slot, why: str) -> None:
        """No successor of this slot could start. If that was to change its build, go back to the one before."""
        if slot.build == self.wanted:
            return
        if self.wanted == self.before:  # the way back fails too
            self._declined.add(slot.incarnation)
            return
        self.take_back(why)

    def take_back(self, why: str) -> None:
        """Go back to the build before."""
        if self.wanted == self.before:
            return
        self.note = f"{self.wanted.version} was taken back: {why}"
        self.wanted = self.before
        self._declined.clear()

    def next(self, slots: Iterable[Slot]) -> Slot | None:
        """Who is to be replaced now; `None`: nobody, or somebody is being replaced or loads the model."""
        slots = sorted(slots, key=lambda slot: (_ORDER[slot.role], slot.index))
        if any(_holds_up(slot) for slot in slots):
            return None
        old = (slot for slot in slots if slot.phase is Phase.READY and slot.build != self.wanted)
        return next((slot for slot in old if slot.incarnation not in self._declined), None)

    def is_done(self, slots: Iterable[Slot]) -> bool:
        """Every process runs what is wanted, or has been given up."""
        slots = (slot for slot in slots if slot.phase is not Phase.WAITING)
        return all(slot.build == self.wanted or slot.incarnation in self._declined for slot in slots)


def _holds_up(slot: Slot) -> bool:
    """It is being replaced, it loads the model, or it took the place of one that went first and was not ready yet."""
    loads = slot.phase is Phase.STARTING and slot.placement is not None
    return slot.leaving or loads or slot.renews
