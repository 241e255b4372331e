"""Digests that stay with the pages: taken anew when a page is filled anew, and never made up."""

from __future__ import annotations

import numpy as np
import pytest

from kvtransfer.digest import digest_bytes, digests_of, read_from
from kvtransfer.extents import ArenaShape
from prefill_worker.sealed_digests import SealedDigests

SHAPE = ArenaShape(num_layers=3, num_pages=4, extent_bytes=16)


def test_a_digest_is_of_the_bytes_that_were_sealed_until_they_are_sealed_again() -> None:
    arena = np.random.default_rng(5).integers(0, 255, SHAPE.num_bytes, dtype=np.uint8)
    read = read_from(memoryview(arena), SHAPE)
    digests = SealedDigests(digests_of(read), SHAPE)
    for layer in range(3):
        digests.take(layer, (3, 1))
    before = tuple(tuple(digest_bytes(read(layer, page)) for page in (1, 3)) for layer in (1, 2))
    assert digests.of(range(1, 3), (1, 3)) == before
    arena[SHAPE.offset(2, 3)] ^= 1  # the page is another prompt's now
    assert digests.of(range(1, 3), (1, 3)) == before
    digests.take(2, (3,))
    assert digests.of(range(2, 3), (1, 3)) == ((before[1][0], digest_bytes(read(2, 3))),)
    assert max(max(row) for row in before) > 2**63, "all 64 bits come back"


def test_what_was_never_sealed_has_none() -> None:
    digests = SealedDigests(digests_of(read_from(memoryview(bytes(SHAPE.num_bytes)), SHAPE)), SHAPE)
    digests.take(0, (1, 2))
    digests.take(0, ())
    assert len(digests.of(range(1), (2, 1))[0]) == 2
    for layers, pages in ((range(1), (1, 3)), (range(2), (1,))):
        with pytest.raises(ValueError, match="not all of pages"):
            digests.of(layers, pages)
