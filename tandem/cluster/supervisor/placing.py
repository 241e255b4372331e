"""Where the lives of slots are started, and which that no node has begun yet are started elsewhere. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from tandem.cluster.supervisor.nodes import Aim, Node, NodeBook
from tandem.cluster.supervisor.slots import Phase, Slot
from tandem.core.identity import WORKER_ROLES


def best_aim(slot: Slot, slots: Mapping[str, Slot], book: NodeBook) -> Aim:
    """Where the life of this slot is best started now; what runs or starts in others takes its places."""
    taken = Counter(other.node_id for other in slots.values() if other.role is slot.role and other is not slot)
    return book.aim(slot.role, taken, slot.tried)


def to_move(slots: Mapping[str, Slot], book: NodeBook) -> list[Slot]:
    """Those that wait for a node which does not answer, or for any while one that was avoided answers again."""
    asked = [slot for slot in slots.values() if slot.is_unplaced]
    return [slot for slot in asked if book.is_better(best_aim(slot, slots, book), slot.aim)]


def to_knock(slots: Mapping[str, Slot], book: NodeBook) -> list[Node]:
    """Nodes that may have fallen silent."""
    return book.to_knock([slot.aim.node_id for slot in slots.values() if slot.is_unplaced])


def looks_for_nodes(slots: Mapping[str, Slot], book: NodeBook) -> bool:
    """Whether it matters now which nodes Ray takes for alive."""
    return bool(book.suspects or book.missed) or any(
        slot.phase is Phase.STARTING and slot.placement is None for slot in slots.values() if slot.role in WORKER_ROLES
    )
