"""A sequence's own arithmetic."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tandem.core.pages import page_keys
from tandem.core.sampling import SamplingParams
from tandem.core.token_ids import TokenIds, token_ids
from tandem.worker.sequence import Sequence


def sequence(num_prompt: int, num_output: int = 0, **fields: int) -> Sequence:
    ids = token_ids(range(num_prompt + num_output))
    return Sequence("r", 2, 1, 5, 3, ids, num_prompt, SamplingParams(), **fields)  # type: ignore[arg-type]


def test_a_decode_computes_the_newest_token_only() -> None:
    assert sequence(4, 1, num_computed=4).is_decode
    assert not sequence(4, 2, num_computed=4).is_decode, "a replay"
    assert not sequence(4, 0, num_computed=3).is_decode, "the last token of a prompt"
    assert not sequence(4, 1, num_computed=5).is_decode, "nothing to compute"


def test_what_is_left_and_what_is_output() -> None:
    one = sequence(4, 3, num_computed=5)
    assert (one.num_to_compute, one.num_output, one.output_ids) == (2, 3, [4, 5, 6])
    assert repr(one) == "<r#2/1 5/7>"


def test_the_turn_then_arrival_then_choice() -> None:
    assert sequence(1).order == (True, 5, 3, 1)


def test_keys_grow_with_full_pages_and_depend_on_the_salt() -> None:
    one = sequence(4, 9)
    one.extend_keys(4, b"m", 7)
    assert list(one.keys) == page_keys(one.token_ids[:4], 4, b"m")
    one.extend_keys(4, b"m", 12)
    assert list(one.keys) == page_keys(one.token_ids[:12], 4, b"m")
    kept = one.keys
    one.extend_keys(4, b"m", 5)
    assert one.keys is kept, "never shorter"
    other = sequence(4, 9)
    other.extend_keys(4, b"other weights", 12)
    assert not set(other.keys) & set(one.keys)


class Noting(TokenIds):  # type: ignore[type-arg] # not at run time
    """Notes which slices are read."""

    def __init__(self, _typecode: str, _items: Iterable[int]) -> None:
        self.read: list[slice] = []

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            self.read.append(index)
        return super().__getitem__(index)


def test_a_page_that_fills_costs_one_hash_however_long_the_context_is() -> None:
    one = sequence(4, 1000)
    one.extend_keys(4, b"m", 1000)
    one.token_ids = tokens = Noting("I", [*one.token_ids, *range(8)])
    one.extend_keys(4, b"m", 1003)
    assert tokens.read == [], "none is full"
    one.extend_keys(4, b"m", 1004)
    assert tokens.read == [slice(1000, 1004)]
    assert list(one.keys) == page_keys(one.token_ids[:1004], 4, b"m")
