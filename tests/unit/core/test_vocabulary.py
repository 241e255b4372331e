"""Vocabularies for grammars: byte for byte those of the tokenizer, of whatever kind and size."""

from __future__ import annotations

import itertools
import json
import statistics
import time

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from router.openai.grammar import of_regex, of_schema
from tandem.core.config import LimitsConfig
from tandem.core.errors import InvalidRequestError
from tandem.core.grammar import CompiledGrammar
from tandem.core.model_path import resolve_model
from tandem.core.tokenizer import Tokenizer, _byte_of_char
from tandem.core.vocabulary import Vocabulary
from tests.unit.core.code_tokenizers import byte_fallback, byte_level, word_piece

LIMITS = LimitsConfig()


def allowed(vocabulary: Vocabulary, regex: str) -> list[int]:
    """What an output by this expression may begin with."""
    mask = CompiledGrammar(of_regex(regex, "f", LIMITS).text, vocabulary.tokens).first_mask
    assert len(mask) >= 4 * vocabulary.mask_words
    return [token_id for token_id in range(8 * len(mask)) if mask[token_id >> 3] >> (token_id & 7) & 1]


KINDS = {
    "embedded": (Tokenizer.from_dir(resolve_model("embedded")), 2),
    "byte-level": (Tokenizer(byte_level(("h+e", "he+l"))), 0),
    "byte fallback": (Tokenizer(byte_fallback()), 2),
    "byte fallback that strips nothing": (Tokenizer(byte_fallback(strips=False)), 2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_token_is_the_bytes_that_it_is_in_texts(kind: str) -> None:
    tokenizer, eos = KINDS[kind]
    vocabulary = Vocabulary(tokenizer, (eos,), tokenizer.vocab_size + 9)
    assert vocabulary.size == tokenizer.vocab_size + 9, "a model's vocabulary may be padded"
    compared = 0
    for token_id in range(tokenizer.vocab_size):
        content = tokenizer.token_bytes(token_id)
        if content and token_id != eos and not tokenizer.is_special(token_id) and b"\xff" not in content:
            assert vocabulary.tokens.decode_bytes([token_id]) == content
            compared += 1
    assert compared > 250


@pytest.mark.parametrize("kind", KINDS)
def test_all_tokens_that_may_come_are_allowed_those_with_equal_bytes_too(kind: str) -> None:
    tokenizer, eos = KINDS[kind]
    vocabulary = Vocabulary(tokenizer, (eos,), tokenizer.vocab_size)
    letters = {n for n in range(tokenizer.vocab_size) if n != eos and tokenizer.token_bytes(n).strip(b"helo") == b""}
    wanted = {n for n in letters if tokenizer.token_bytes(n) and not tokenizer.is_special(n)}
    assert set(allowed(vocabulary, "[helo]+")) == wanted


def test_an_end_of_text_that_is_no_special_token_is_not_part_of_a_text() -> None:
    vocab = {"</s>": 0, **{char: 1 + n for n, char in enumerate("abc</s>")}}
    backend = tokenizers.Tokenizer(models.BPE(vocab={piece: n for n, piece in enumerate(vocab)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    assert 0 not in allowed(Vocabulary(Tokenizer(backend), (0,), 9), "[a-c<>/s]+")


def test_a_tokenizer_whose_texts_are_not_the_sum_of_its_tokens_follows_no_grammar() -> None:
    with pytest.raises(InvalidRequestError, match="does not tell its tokens' bytes"):
        Vocabulary(Tokenizer(word_piece()), (0,), 7)
    with pytest.raises(InvalidRequestError, match="no token that ends a text"):
        Vocabulary(KINDS["embedded"][0], (), 7)


def large(size: int = 128_000) -> tokenizers.Tokenizer:
    """Byte-level, with this many tokens."""
    pieces = dict.fromkeys(_byte_of_char())
    symbols = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZĠ_-.0123"
    for length in (2, 3):
        for letters in itertools.islice(itertools.product(symbols, repeat=length), size - 1 - len(pieces)):
            pieces.setdefault("".join(letters))
    vocab = {piece: number for number, piece in enumerate([*list(pieces)[: size - 1], "<eos>"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return backend


@pytest.mark.long
def test_128_000_tokens_take_seconds_once_and_a_mask_takes_microseconds() -> None:
    """Bounds have much slack. Alone on a core it was 0.7 s for llguidance's part, and 20 microseconds a mask."""
    tokenizer = Tokenizer(large())
    assert tokenizer.vocab_size == 128_000
    began_s = time.monotonic()
    vocabulary = Vocabulary(tokenizer, (127_999,), 128_256)
    assert time.monotonic() - began_s < 60
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "tags": {"type": "array", "items": {"type": "string"}}},
        "required": ["name", "tags"],
    }
    grammar = CompiledGrammar(of_schema(schema, "f", LIMITS).text, vocabulary.tokens)
    matcher, times = grammar.new_matcher(), []
    for token_id in tokenizer.encode(json.dumps({"name": "a name", "tags": ["one", "two", "three"]})):
        began_s = time.perf_counter()
        mask = matcher.inner.compute_bitmask()
        times.append(time.perf_counter() - began_s)
        assert mask[token_id >> 3] >> (token_id & 7) & 1
        matcher.take([token_id])
    assert matcher.inner.is_accepting()
    assert len(times) > 20
    assert statistics.median(times) < 0.02
