"""Guides with their real threads: a grammar is compiled once for all who ask alike, and few are kept."""

from __future__ import annotations

import queue
import random
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from llguidance import LLMatcher

from tandem.core.errors import CancelledError, InvalidRequestError, SlowGrammarError
from tandem.core.grammar import CompiledGrammar
from tandem.core.slices import take_short_slices
from tandem.worker import guides as module
from tandem.worker import mask_budget
from tandem.worker.counters import WorkerCounters
from tandem.worker.guides import Guides
from tests.support.inline import InlineExecutor
from tests.support.scripted_model import TEXTS, vocabulary
from tests.support.slices import in_a_thread, needs_slices, slice_ns


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


@pytest.mark.long
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


class Held(Executor):
    """Runs what it is given when it is told to."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.calls.append(partial(fn, *args, **kwargs))
        return Future()

    def run(self) -> None:
        while self.calls:
            self.calls.pop(0)()


def test_a_step_goes_on_without_masks_that_are_late_and_they_are_there_in_a_later_one(inbox: queue.Queue[Any]) -> None:
    held, counters = Held(), WorkerCounters()
    guides = Guides(vocabulary(), inbox.put, counters, compiler=InlineExecutor(), masker=held)
    a, b, c = (TEXTS.index(letter) for letter in "abc")
    begun, first, second = prepared(guides, inbox, regex("abc|ac"), [], [a], [a, b])
    guides.begin([begun, first, second])
    assert guides.late([first, None, begun, second], awaits_one=True) == {0, 3}
    guides.begin([first, second])  # they are being made
    held.run()
    assert guides.late([first, None, second], awaits_one=True) == set()
    assert [bits(guide.allowed()) for guide in (first, second)] == [{b, c}, {c}]
    guides.begin([first, second])
    assert not held.calls, "what is there is not made again"
    assert (counters.num_masks, counters.num_slow_grammars) == (2, 0)


def test_where_all_masks_are_late_the_first_is_waited_for(inbox: queue.Queue[Any]) -> None:
    held = Held()
    guides = Guides(vocabulary(), inbox.put, WorkerCounters(), compiler=InlineExecutor(), masker=held)
    a, b, c = (TEXTS.index(letter) for letter in "abc")
    (guide,) = prepared(guides, inbox, regex("abc|ac"), [a])
    guides.begin([guide])
    assert guides.late([guide], awaits_one=False) == {0}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(guides.late, [guide], awaits_one=True)
        held.run()
        assert waiting.result(timeout=20) == set()
    assert bits(guide.allowed()) == {b, c}


def test_a_slow_grammar_has_threads_of_its_own_and_ends_its_request_by_name(
    guides: Guides, inbox: queue.Queue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, counters = TEXTS.index("a"), guides._counters
    (slow, quick) = prepared(guides, inbox, regex("a*"), [a, a], [a])
    slow.budget.expected_s = 1.0
    held = Held()
    monkeypatch.setattr(guides, "_slow_masker", held)
    guides.begin([slow, quick])
    assert bits(quick.allowed()) == {a, TEXTS.index("\0")}
    assert guides.late([slow, quick], awaits_one=True) == {0}
    monkeypatch.setattr(mask_budget, "BASE_S", 0.0)
    monkeypatch.setattr(mask_budget, "TOKEN_S", 0.0)
    held.run()
    with pytest.raises(SlowGrammarError, match="the grammar takes too much computation"):
        slow.allowed()
    assert counters.num_slow_grammars == 1
    found = prepared(guides, inbox, regex("a*"), [a, a])
    assert isinstance(found, SlowGrammarError), "a replay has the same bound"
    assert counters.num_slow_grammars == 2


def test_a_long_replay_lets_others_have_their_turn(inbox: queue.Queue[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REPLAY_S", 0.0)
    held, come = Held(), list[str]()
    guides = Guides(vocabulary(), lambda call: call(), WorkerCounters(), compiler=held, masker=held)
    guides.prepare(regex("a*"), [[TEXTS.index("a")] * 50], lambda _: come.append("long"))
    guides.prepare(regex("b*"), [[]], lambda _: come.append("short"))
    held.run()
    assert come == ["short", "long"]


def test_what_nobody_waits_for_any_more_is_replayed_no_further(
    inbox: queue.Queue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_REPLAY_S", 0.0)
    held, made, left = Held(), list[Any](), iter([True, True, False])
    guides = Guides(vocabulary(), lambda call: call(), WorkerCounters(), compiler=held, masker=held)
    guides.prepare(regex("a*"), [[TEXTS.index("a")] * 50], made.append, lambda: next(left))
    held.run()
    (error,) = made
    assert isinstance(error, CancelledError)


def bits(mask: bytes) -> set[int]:
    return {token_id for token_id in range(8 * len(mask)) if mask[token_id >> 3] >> (token_id & 7) & 1}


def test_a_model_that_follows_no_grammar_says_why(inbox: queue.Queue[Any]) -> None:
    guides = Guides(InvalidRequestError("no grammar holds"), inbox.put, WorkerCounters())
    assert prepared(guides, inbox, regex("a")).message == "no grammar holds"
    guides.close()


@needs_slices
def test_what_it_computes_takes_the_usual_slices_where_a_loop_with_short_ones_asks(guides: Guides) -> None:
    def told() -> list[int]:
        take_short_slices()
        executors = guides._compiler, guides._masker, guides._slow_masker
        return [executor.submit(slice_ns).result() for executor in executors]

    assert in_a_thread(told) == [in_a_thread(slice_ns)] * 3
