"""Text token by token: never half a character, and together what decoding the whole gives."""

from __future__ import annotations

from pathlib import Path

import code_tokenizers
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.detokenizer import ByteDetokenizer, WindowDetokenizer, detokenizer_for
from tandem.core.tokenizer import Tokenizer

TINY = Path(__file__).parents[3] / "tandem" / "models" / "tiny"
STORIES = Path(__file__).parents[4] / "shared" / "data" / "stories260K"

LEVEL = Tokenizer(code_tokenizers.byte_level(("h+e", "Ġ+t", "Ã+©")))
FALLBACK = Tokenizer(code_tokenizers.byte_fallback())
GEMMA = Tokenizer(code_tokenizers.byte_fallback(strips=False))
WORDS = Tokenizer(code_tokenizers.word_piece())
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def pieces(tokenizer: Tokenizer, prompt: list[int], output: list[int]) -> list[str]:
    detokenizer = detokenizer_for(tokenizer, prompt)
    return [*(detokenizer.push(token_id) for token_id in output), detokenizer.flush()]


def test_the_kinds_are_told_apart() -> None:
    assert [t.is_byte_exact for t in (LEVEL, FALLBACK, GEMMA, WORDS)] == [True, True, True, False]
    assert [t.strips_first_space for t in (LEVEL, FALLBACK, GEMMA, WORDS)] == [False, True, False, False]
    assert isinstance(detokenizer_for(LEVEL, []), ByteDetokenizer)
    assert isinstance(detokenizer_for(WORDS, []), WindowDetokenizer)


@pytest.mark.parametrize("tokenizer", [LEVEL, FALLBACK], ids=["byte-level", "byte-fallback"])
def test_a_character_comes_out_when_its_last_byte_is_there(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a😀b", add_special_tokens=False)
    assert [text for text in pieces(tokenizer, [], ids) if text.strip()] == ["a", "😀", "b"]


def test_a_character_that_is_never_complete_is_shown_as_replaced() -> None:
    smile = LEVEL.encode("😀")
    assert pieces(LEVEL, [], smile[:3]) == ["", "", "", REPLACEMENT]
    assert pieces(LEVEL, [], [*smile[:3], *LEVEL.encode("x")]) == ["", "", "", f"{REPLACEMENT}x", ""]


def test_a_word_keeps_its_space_after_a_prompt_and_loses_it_at_the_beginning() -> None:
    ids = FALLBACK.encode("the the", add_special_tokens=False)
    assert "".join(pieces(FALLBACK, [1], ids)) == "the the"
    assert "".join(pieces(FALLBACK, FALLBACK.encode("a"), ids)) == " the the"
    assert "".join(pieces(GEMMA, [1], ids)) == " the the"


def test_an_output_completes_the_prompts_last_character() -> None:
    smile = LEVEL.encode("😀")
    assert pieces(LEVEL, smile[:2], smile[2:]) == ["", "😀", ""]


def test_special_tokens_and_unknown_ids_show_nothing() -> None:
    assert pieces(FALLBACK, [1], [2, 0, 9999]) == ["", "", "", ""]


def test_other_kinds_are_decoded_in_windows() -> None:
    ids = WORDS.encode("hellos world a b worldly")
    assert "".join(pieces(WORDS, [], ids)) == WORDS.decode(ids) == "hellos world a b worldly"
    assert "".join(pieces(WORDS, ids[:2], ids[2:])) == WORDS.decode(ids)[len(WORDS.decode(ids[:2])) :]


@given(st.text(max_size=40))
def test_text_comes_back_as_it_was(text: str) -> None:
    for tokenizer in (LEVEL, FALLBACK, GEMMA):
        ids = tokenizer.encode(text)
        assert "".join(pieces(tokenizer, [], ids)) == tokenizer.decode(ids)


@given(st.text(max_size=20), st.text(max_size=20))
def test_prompt_and_output_together_are_the_whole(prompt: str, output: str) -> None:
    for tokenizer in (LEVEL, FALLBACK):
        before, after = tokenizer.encode(prompt), tokenizer.encode(output, add_special_tokens=False)
        whole = tokenizer.decode(before + after)
        assert tokenizer.decode(before) + "".join(pieces(tokenizer, before, after)) == whole


@given(st.lists(st.integers(0, 520), max_size=40))
def test_any_byte_level_ids_decode_as_the_whole_does(ids: list[int]) -> None:
    assert "".join(pieces(LEVEL, [], ids)) == LEVEL.decode(ids)


@given(st.lists(st.integers(0, 300), max_size=40))
def test_any_byte_fallback_ids_decode_as_their_bytes_do(ids: list[int]) -> None:
    """The library replaces a whole run of bytes when one is wrong; we, like UTF-8 decoders, the wrong ones alone."""
    raw = b"".join(GEMMA.token_bytes(i) for i in ids if not GEMMA.is_special(i))
    assert "".join(pieces(GEMMA, [], ids)) == raw.decode("utf-8", "replace")


@given(st.lists(st.integers(0, 511), max_size=60))
def test_no_piece_holds_a_replacement_for_a_character_that_is_completed(ids: list[int]) -> None:
    raw = b"".join(LEVEL.token_bytes(i) for i in ids)
    assert "".join(pieces(LEVEL, [], ids)).count(REPLACEMENT) == raw.decode("utf-8", "replace").count(REPLACEMENT)


@pytest.mark.long
@pytest.mark.parametrize("directory", [TINY, STORIES], ids=["tiny", "stories260K"])
@given(st.text(max_size=60))
def test_real_tokenizers(directory: Path, text: str) -> None:
    if not (directory / "tokenizer.json").is_file():
        pytest.skip(f"{directory.name} is not here")
    tokenizer = Tokenizer.from_dir(directory)
    assert tokenizer.is_byte_exact
    ids = tokenizer.encode(f"Once upon a time {text}")
    whole = tokenizer.decode(ids)
    assert "".join(pieces(tokenizer, [], ids)) == whole
    assert tokenizer.decode(ids[:3]) + "".join(pieces(tokenizer, ids[:3], ids[3:])) == whole
