"""What a client is shown of one choice: stop tokens, stop strings, ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from router.request.choice_text import ChoiceText
from router.request.request import Delta, Request, TokenGiven
from tandem.core.sampling import SamplingParams
from tandem.core.tokenizer import Tokenizer
from tests.support.router_site import EOS, write_checkpoint


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = write_checkpoint(tmp_path_factory.mktemp("m") / "toy")
    return Tokenizer.from_dir(directory)


def texts(
    tokenizer: Tokenizer, ids: list[int], *, end: str | None = None, stop: tuple[str, ...] = (), min_tokens: int = 0
) -> tuple[list[Delta], ChoiceText]:
    """The deltas of `ids`, the last of which has finish reason `end`."""
    sampling: Any = SamplingParams(max_tokens=100, min_tokens=min_tokens)
    request = Request("r", (1,), sampling, 0.0, stop=stop)
    choice = ChoiceText(tokenizer, request, 0)
    tokens = [TokenGiven(1, 0, n, i, end if n + 1 == len(ids) else None) for n, i in enumerate(ids)]
    return choice.push(tokens), choice


@pytest.mark.parametrize("last", [EOS, ord("c")])
def test_the_token_that_stops_is_counted_and_not_shown(tokenizer: Tokenizer, last: int) -> None:
    deltas, choice = texts(tokenizer, [*b"ab", last], end="stop")
    assert "".join(d.text for d in deltas) == "ab"
    assert choice.num_tokens == 3
    assert [d.finish_reason for d in deltas] == [None, None, "stop"]


def test_the_last_token_by_length_is_shown(tokenizer: Tokenizer) -> None:
    deltas, _ = texts(tokenizer, [*b"abc"], end="length")
    assert [(d.text, d.finish_reason) for d in deltas] == [("a", None), ("b", None), ("c", "length")]


def test_held_back_tokens_come_with_the_delta_that_shows_them(tokenizer: Tokenizer) -> None:
    deltas, _ = texts(tokenizer, [*b"xSTy"], stop=("STOP",))
    assert [(d.text, len(d.tokens)) for d in deltas] == [("x", 1), ("STy", 3)]
    deltas, _ = texts(tokenizer, [*"é".encode()])
    assert [(d.text, len(d.tokens)) for d in deltas] == [("é", 2)]


def test_what_is_held_back_at_the_end_is_shown(tokenizer: Tokenizer) -> None:
    deltas, _ = texts(tokenizer, [*b"xST"], end="length", stop=("STOP",))
    assert "".join(d.text for d in deltas) == "xST"
    deltas, _ = texts(tokenizer, [*b"x", 0xC3], end="length")
    assert "".join(d.text for d in deltas) == "x\N{REPLACEMENT CHARACTER}"


def test_nothing_follows_a_stop_string(tokenizer: Tokenizer) -> None:
    deltas, choice = texts(tokenizer, [*b"abcdef"], stop=("cd",), end="length")
    assert "".join(d.text for d in deltas) == "ab"
    assert deltas[-1].finish_reason == "stop"
    assert choice.num_tokens == 4
    assert choice.is_finished


def test_a_stop_string_within_the_first_min_tokens_ends_nothing(tokenizer: Tokenizer) -> None:
    deltas, _ = texts(tokenizer, [*b"a.b.c"], stop=(".",), min_tokens=2)
    assert "".join(d.text for d in deltas) == "a.b"
    assert deltas[-1].finish_reason == "stop"
