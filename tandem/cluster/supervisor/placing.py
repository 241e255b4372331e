"""Where the lives of slots are started, and which that no node has begun yet are started elsewhere. Pure."""

from __future__ import annotations

from collections import Counter

from tandem.cluster.supervisor.nodes import Aim, Node, NodeBook
from tandem.cluster.supervisor.slot_table import SlotTable
from tandem.cluster.supervisor.slots import Slot
from tandem.core.identity import WORKER_ROLES


def best_aim(slot: Slot, slots: SlotTable, book: NodeBook) -> Aim:
    """Where the life of this slot is best started now; what runs or starts in others takes its places."""
    taken = Counter(slots.num_on(slot.role))
    taken[slot.node_id] -= 1  # itself
    return book.aim(slot.role, taken, slot.tried)


def to_move(slots: SlotTable, book: NodeBook) -> list[Slot]:
    """Those that wait for a node which does not answer, or for any while one that was avoided answers again."""
    return [slot for slot in slots.unbegun if slot.asked and book.is_better(_now(slot, slots, book), slot.aim)]


def _now(slot: Slot, slots: SlotTable, book: NodeBook) -> Aim:
    """Where it would be aimed. Of one that has a node only that one counts, and where none is avoided no other does."""
    return slot.aim if slot.aim.node_id or not slot.aim.avoid else best_aim(slot, slots, book)


def to_knock(slots: SlotTable, book: NodeBook) -> list[Node]:
    """Nodes that may have fallen silent."""
    return book.to_knock({slot.aim.node_id for slot in slots.unbegun if slot.asked})


def looks_for_nodes(slots: SlotTable, book: NodeBook) -> bool:
    """Whether it matters now which nodes Ray takes for alive."""
    return bool(book.suspects or book.missed) or any(slot.role in WORKER_ROLES for slot in slots.unbegun)
