"""The pages of one worker as bytes, and a write from one arena to another."""

from __future__ import annotations

from kvtransfer.extents import ArenaShape, Descriptor


class Arena:
    """Args:
    data: writable bytes, as many as `shape` says.
    """

    def __init__(self, shape: ArenaShape, data: memoryview) -> None:
        self.shape = shape
        self.data = data

    def read_extent(self, layer: int, page: int) -> memoryview:
        at = self.shape.offset(layer, page)
        return self.data[at : at + self.shape.extent_bytes]

    def check_source(self, offset: int, num_bytes: int) -> None:
        """Whether a write may still read this; fails where it may not. Here nobody accounts for pages."""

    def check_target(self, offset: int, num_bytes: int) -> None:
        """Whether a write may still land here."""

    def land(self, descriptor: Descriptor, source: Arena, flip: int) -> None:
        """Bytes of a write arrive, the first one changed by `flip`."""
        here, there, num_bytes = descriptor
        self.data[there : there + num_bytes] = source.data[here : here + num_bytes]
        self.data[there] ^= flip


def move(descriptor: Descriptor, source: Arena, target: Arena, *, flip: int = 0) -> None:
    """Bytes of a write land, the first one changed by `flip`; both sides must still hold their pages for it."""
    here, there, num_bytes = descriptor
    source.check_source(here, num_bytes)
    target.check_target(there, num_bytes)
    target.land(descriptor, source, flip)
