"""Pages in host memory: for workers whose pool lies in a GPU's. Its copies are lost with the process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from tandem.core.tiers import TierIndex
from tandem.worker.tier_store import TierCounters


class HostTier:
    """Slots of one page each, in one buffer. From any thread.

    Args:
        memory: of all slots, pinned where a GPU copies from it.
        page_bytes: of a slot.
    """

    name = "host"
    guessed_bytes_per_s = 10e9

    def __init__(self, memory: memoryview, page_bytes: int) -> None:
        self.counters = TierCounters()
        self.on_change: Callable[[Iterable[bytes]], None] = lambda _: None
        self._memory = memory
        self._page_bytes = page_bytes
        num_slots = len(memory) // page_bytes
        # Guards all below, and the bytes of the slots: no copy under way sees its slot change.
        self._lock = threading.Lock()
        self._index = TierIndex[bytes](num_slots * page_bytes)
        self._slot_of: dict[bytes, int] = {}
        self._free = list(range(num_slots))

    def has(self, key: bytes) -> bool:
        return key in self._slot_of

    def use(self, keys: Sequence[bytes]) -> None:
        """A prompt has these pages, in this order."""
        with self._lock:
            self._index.use(keys)

    def held(self) -> tuple[int, int]:
        """Pages and bytes."""
        num_pages = len(self._slot_of)
        return num_pages, num_pages * self._page_bytes

    def find(self) -> None:
        """Nothing outlives a process here."""

    def get(self, key: bytes, into: memoryview) -> bool:
        """Copy one page; `False`: it is not there."""
        began_s = time.monotonic()
        with self._lock:
            slot = self._slot_of.get(key)
            if slot is None:
                return False
            into[:] = self._bytes_of(slot)
        self.counters.num_read += 1
        self.counters.read_s += time.monotonic() - began_s
        return True

    def put(self, key: bytes, parent: bytes, data: memoryview) -> None:
        """Keep a copy of one page, behind its parent."""
        began_s = time.monotonic()
        with self._lock:
            gone = self._index.add(key, self._page_bytes, parent or None)
            for other in gone:
                if (slot := self._slot_of.pop(other, None)) is not None:
                    self._free.append(slot)
            self.counters.num_evicted += len(gone)
            is_lost = key in gone
            if not is_lost:
                if key not in self._slot_of:
                    self._slot_of[key] = self._free.pop()
                self._bytes_of(self._slot_of[key])[:] = data
        self.on_change([key, *gone])
        if is_lost:
            self.counters.num_lost += 1
            return
        self.counters.num_written += 1
        self.counters.write_s += time.monotonic() - began_s

    def discard(self, key: bytes) -> None:
        """Remove one page, if it is there."""
        with self._lock:
            if self._index.drop(key):
                self._free.append(self._slot_of.pop(key))
        self.on_change([key])

    def close(self) -> None:
        """Give the memory back at once: the next life of this process takes as much, and what others hold of this one
        is not freed before that. What is put here from now on is lost."""
        with self._lock:
            self._index = TierIndex[bytes](0)
            self._slot_of.clear()
            self._free.clear()
            self._memory = memoryview(b"")

    def _bytes_of(self, slot: int) -> memoryview:
        return self._memory[slot * self._page_bytes : (slot + 1) * self._page_bytes]
