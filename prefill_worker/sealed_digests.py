"""Digests of the pages that this worker computed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtransfer.extents import ArenaShape, TakeDigests


class SealedDigests:
    """Digests of an arena's extents, taken once, when they were sealed.

    When bytes change, their digest is taken again as they are sealed again; it is not asked for in between.

    Args:
        take: takes digests of the arena's extents.
    """

    def __init__(self, take: TakeDigests, shape: ArenaShape) -> None:
        self._take = take
        self._digests = np.zeros((shape.num_layers, shape.num_pages), np.uint64)
        self._known = np.zeros((shape.num_layers, shape.num_pages), np.bool_)

    def take(self, layer: int, pages: Sequence[int]) -> None:
        """These pages of one layer are sealed now."""
        self._digests[layer, pages] = np.array(self._take([(layer, pages)])[0], np.uint64)
        self._known[layer, pages] = True

    def of(self, layers: range, pages: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """`[layer][index into pages]`.

        Raises:
            ValueError: one of them was never sealed.
        """
        rows = slice(layers.start, layers.stop)
        if not self._known[rows, pages].all():
            raise ValueError(f"not all of pages {pages} are sealed in {layers}")
        return tuple(tuple(row) for row in self._digests[rows, pages].tolist())
