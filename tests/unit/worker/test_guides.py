"""Guides with their real threads: a grammar is compiled once for all who ask alike, and few are kept."""

from __future__ import annotations

import queue
import random
from collections.abc import Iterator
from typing import Any

import pytest
from llguidance import LLMatcher

from tandem.core.errors import InvalidRequestError
from tandem.core.grammar import CompiledGrammar
from tandem.worker import guides as module
from tandem.worker.counters import WorkerCounters
from tandem.worker.guides import Guides
from tests.support.scripted_model import TEXTS, vocabulary


@pytest.fixture
def inbox() -> queue.Queue[Any]:
    return queue.Queue()


@pytest.fixture
def guides(inbox: queue.Queue[Any]) -> Iterator[Guides]:
    found = Guides(vocabulary(), inbox.put, WorkerCounters())
    yield found
    found.close()


def prepared(guides: Guides, inbox: queue.Queue[Any], grammar: str, *outputs: list[int]) -> Any:
    made: list[Any] = []
    guides.prepare(grammar, outputs, made.append)
    inbox.get(timeout=20)()  # as the runner does
    return made[0]


def regex(text: str) -> str:
    return LLMatcher.grammar_from_regex(text)


def test_equal_grammars_are_compiled_once_and_few_are_kept(
    guides: Guides, inbox: queue.Queue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []

    def counted(text: str, tokens: Any) -> CompiledGrammar:
        compiled.append(text)
        return CompiledGrammar(text, tokens)

    monkeypatch.setattr(module, "compile_grammar", counted)
    monkeypatch.setattr(module, "_MAX_KEPT", 2)
    monkeypatch.setattr(guides, "_kept", module._kept())
    for text in ("a", "a", "b", "a", "c", "a", "b"):
        assert len(prepared(guides, inbox, regex(text), [])) == 1
    assert compiled == [regex(text) for text in ("a", "b", "c", "b")], "the least recently used goes first"


def test_what_took_long_to_compile_is_not_pushed_out_by_what_did_not(
    guides: Guides, inbox: queue.Queue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []

    def counted(text: str, tokens: Any) -> CompiledGrammar:
        compiled.append(text)
        return CompiledGrammar(text, tokens)

    monkeypatch.setattr(module, "compile_grammar", counted)
    monkeypatch.setattr(module, "_MAX_KEPT", 2)
    monkeypatch.setattr(guides, "_kept", module._kept())
    for costly_s, text in ((0.0, "a"), (1e9, "b"), (1e9, "c"), (1e9, "ab"), (1e9, "a")):
        monkeypatch.setattr(module, "_COSTLY_S", costly_s)
        prepared(guides, inbox, regex(text), [])
    assert compiled == [regex(text) for text in ("a", "b", "c", "ab")]


def test_masks_of_a_step_are_made_beside_it_and_each_guide_has_its_own(guides: Guides, inbox: queue.Queue[Any]) -> None:
    a, b, c = (TEXTS.index(letter) for letter in "abc")
    begun, behind_a, behind_ab = prepared(guides, inbox, regex("abc|ac"), [], [a], [a, b])
    guides.begin([begun, behind_a, behind_ab])
    assert [bits(guide.allowed()) for guide in (begun, behind_a, behind_ab)] == [{a}, {b, c}, {c}]
    begun.push(a)
    guides.begin([begun])
    assert bits(begun.allowed()) == {b, c}


@pytest.mark.parametrize("num_tokens", [1, 700, 2000])
def test_a_long_output_is_replayed_as_it_was_written(inbox: queue.Queue[Any], num_tokens: int) -> None:
    """Its lexer has to make thousands of states, far more than one step may."""
    draw, grammar = random.Random(1), regex("(?s:.*a.{12})")
    output = [TEXTS.index(draw.choice("ab")) for _ in range(num_tokens)]
    first, other = (Guides(vocabulary(), inbox.put, WorkerCounters()) for _ in range(2))
    (live,) = prepared(first, inbox, grammar, [])
    for token_id in output:
        live.push(token_id)
        first.begin([live])
        live.allowed()
    (replayed,) = prepared(other, inbox, grammar, output)
    other.begin([replayed])
    assert replayed.allowed() == live.allowed()
    for guides in (first, other):
        guides.close()


def test_what_outputs_have_used_up_of_a_grammar_is_there_again_for_those_behind_them(
    guides: Guides, inbox: queue.Queue[Any]
) -> None:
    """The states of a grammar's lexer are shared by all that follow it."""
    draw, grammar = random.Random(1), regex("(?s:.*a.{16})")
    letters = [TEXTS.index(letter) for letter in "ab"]
    output = draw.choices(letters, k=100_000)

    def follow(guide: Any, token_ids: list[int]) -> int:
        for number, token_id in enumerate(token_ids):
            guide.push(token_id)
            guides.begin([guide])
            try:
                guide.allowed()
            except InvalidRequestError:
                return number
        return len(token_ids)

    (first,) = prepared(guides, inbox, grammar, [])
    num_tokens = follow(first, output)
    assert 100 < num_tokens < len(output), "it becomes too complex"
    (second,) = prepared(guides, inbox, grammar, [])
    most = num_tokens * 3 // 4
    assert follow(second, output[:most]) == most
    (third,) = prepared(guides, inbox, grammar, draw.choices(letters, k=most))
    assert follow(third, letters) == 2


def bits(mask: bytes) -> set[int]:
    return {token_id for token_id in range(8 * len(mask)) if mask[token_id >> 3] >> (token_id & 7) & 1}


def test_a_model_that_follows_no_grammar_says_why(inbox: queue.Queue[Any]) -> None:
    guides = Guides(InvalidRequestError("no grammar holds"), inbox.put, WorkerCounters())
    assert prepared(guides, inbox, regex("a")).message == "no grammar holds"
    guides.close()
