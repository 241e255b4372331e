"""The core of a decode worker in one thread on a virtual clock: real accounting, real protocol, scripted tokens."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest
from llguidance import LLMatcher

from decode_worker.events import Admitted, ComputesHere, Event, GrantMade, PromptComputed
from decode_worker.receiver_driver import ReceiverDriver
from decode_worker.role import DecodeRole
from kvtransfer.digest import digests_of
from kvtransfer.extents import ArenaShape
from kvtransfer.layout import LayoutId
from kvtransfer.protocol.grants import ReceiverLimits
from kvtransfer.protocol.messages import AttemptKey, Commit, CommitPart, FirstToken, Grant, RefusalReason
from kvtransfer.transports.loopback import LoopbackNetwork, LoopbackTransport
from tandem.core.clock import VirtualClock
from tandem.core.errors import (
    DrainingError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    SlowGrammarError,
    TandemError,
)
from tandem.core.pages import PagePool, page_keys
from tandem.core.sampling import SampledToken, SampleRow, SamplingParams
from tandem.core.step_times import PromptSteps
from tandem.core.tiers import Fetched
from tandem.worker.batch import SchedulerLimits
from tandem.worker.counters import WorkerCounters
from tandem.worker.drafts import DraftInput, Drafts
from tandem.worker.guesses import Guesses
from tandem.worker.guide import Guide
from tandem.worker.guides import Guides
from tandem.worker.load import LoadReport
from tandem.worker.next_step import NextStep
from tandem.worker.pacing import Pacing
from tandem.worker.request import AttemptFailed, AttemptSpec, ChoiceJournal, RequestLimits, TokenSampled
from tandem.worker.runner import Runner, inputs_of
from tandem.worker.scheduler import BatchScheduler
from tandem.worker.sequence import FinishReason
from tandem.worker.spans import Span
from tests.support.imports import HEAVY, loaded_by
from tests.support.inline import inline_guides
from tests.support.scripted_model import TEXTS, score

PAGE = 4
EOS = 1
LAYOUT = LayoutId("ab" * 32, "float32", num_layers=1, num_kv_heads=1, head_dim=2, page_size=PAGE)
SESSION, SENDER = 3, "prefill-0#1"


class World:
    """A decode worker of which a test takes the steps; `next_tokens` are what each row gives."""

    def __init__(self, num_pages: int = 40, guesses: Guesses | None = None) -> None:
        self.clock = VirtualClock()
        self.events: list[Event] = []
        self.next_tokens: list[int] = [7]
        self.step_s = 0.0
        self.counters = WorkerCounters()
        self.draining = False
        self.num_seen = 0  # attempts that were held when it was last looked whether there are any
        self.pool = PagePool(num_pages, PAGE)
        self.scheduler = BatchScheduler(self.pool, SchedulerLimits(8, 64, 16, 10), salt=b"m")
        shape = ArenaShape(1, num_pages, LAYOUT.extent_bytes)
        self.driver = ReceiverDriver(
            "decode-0#1", LAYOUT, shape, digests_of(lambda layer, page: memoryview(b"%d" % page)), ReceiverLimits(),
            self, b"a secret of decode", self.clock,
        )  # fmt: skip
        self.role = DecodeRole(
            worker_id="decode-0",
            scheduler=self.scheduler,
            driver=self.driver,
            emit=lambda events: self.events.extend(events.get(SESSION, [])),
            limits=RequestLimits(100, 64, frozenset([EOS]), 4),
            queue_bound=2,
            sample=self.sample,
            guides=inline_guides(lambda call: call(), WorkerCounters()),
            score=score,
            counters=self.counters,
            load=LoadReport(self.scheduler, lambda: None, self._count),
            clock=self.clock,
            is_draining=lambda: self.draining,
            guesses=guesses,
            to_runner=lambda call: call(),
            to_driver=lambda call: call(),
        )
        self.driver.bind(LoopbackTransport("decode-0#1", network=LoopbackNetwork()), self.role, lambda event: None)

    def _count(self) -> None:
        self.num_seen = len(self.role.ledger.attempts)

    def sample(self, _: Any, rows: Sequence[Sequence[SampleRow]]) -> list[list[SampledToken | TandemError]]:
        return [[SampledToken(token) for _ in of_one for token in self.next_tokens] for of_one in rows]

    def reserve(
        self,
        name: str = "r",
        *,
        attempt: int = 1,
        local: int = 0,
        num_tokens: int = 6,
        choices: int = 1,
        unpaced: bool = False,
        slack_s: float = 0.0,
        journal: tuple[ChoiceJournal, ...] = (),
    ) -> AttemptKey:
        params = SamplingParams(temperature=0, max_tokens=8 if num_tokens == 6 else 3)
        key = AttemptKey(name, attempt)
        prompt = tuple(2 + (len(name) + index) % 90 for index in range(num_tokens))
        spec = AttemptSpec(key, 0, prompt, params, choices, journal, slack_s=slack_s)
        self.role.reserve(SESSION, spec, local, unpaced=unpaced)
        return key

    def hand_off(self, grant: Grant, *, digests: tuple[int, ...] = (), first: int = 5) -> RefusalReason | None:
        """Attach and commit; `digests` in place of the right ones. Returns why it was refused."""
        assert self.driver.attach(grant.grant_id, SENDER, grant.capability, renew=False).refusal is None
        digests = digests or self.driver._take_digests([(0, grant.pages)])[0]
        commit = Commit(
            grant.grant_id, grant.key, grant.epoch, grant.receiver, SENDER, LAYOUT, grant.pages, (digests,),
            (FirstToken(0, first),), grant.capability,
        )  # fmt: skip
        return self.driver.commit(commit, self.clock.now()).refusal

    def step(self) -> None:
        self.role.before_schedule()
        batch = self.scheduler.schedule()
        assert batch.items, "nothing to compute"
        self.role.before_forward(batch)
        self.clock.advance(self.step_s)
        self.scheduler.apply(batch, self.role.sample(batch, None))
        self.role.after_step(batch)

    def tokens(self) -> list[tuple[int, int, FinishReason | None]]:
        return [(e.index, e.token.token_id, e.ended) for e in self.events if isinstance(e, TokenSampled)]

    def take(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def assert_empty(self) -> None:
        self.pool.check()
        counts = self.pool.counts()
        assert counts.used == counts.reserved == counts.quarantined == 0
        assert not self.role.ledger.attempts
        assert not self.scheduler.running

    # -- what the driver tells the process

    def ask_to_stop(self, sender: str, grant: Grant, reason: RefusalReason) -> None:
        raise AssertionError(sender)

    kill_writer = replace_self = ask_to_stop  # type: ignore[assignment]

    def deadline(self, deadline_s: float | None) -> None: ...


class BrokenEngine:
    """Fails each step."""

    @property
    def arena(self) -> BrokenEngine:
        return self

    def copy_page(self, source: int, target: int) -> None: ...

    def finish(self) -> None: ...

    def forward(self, *_: object) -> None:
        raise RuntimeError("no step")


def test_a_handoff_goes_through_without_a_thread_or_a_wire() -> None:
    world = World()
    key = world.reserve()
    (made,) = world.take()
    assert isinstance(made, GrantMade)
    assert world.hand_off(made.grant) is None
    assert world.take() == [Admitted(key, 0.0)]
    for _ in range(7):
        world.step()
    assert world.tokens() == [(n, 7, FinishReason.LENGTH if n == 7 else None) for n in range(1, 8)]
    world.assert_empty()


def test_a_step_may_give_several_tokens_and_what_follows_the_end_is_nobodys() -> None:
    world = World()
    world.reserve(local=99)
    world.step()
    assert isinstance(world.events[0], ComputesHere)
    world.next_tokens = [8, 9]
    world.step()
    world.next_tokens = [10, EOS, 11]
    world.step()
    assert world.tokens() == [(0, 7, None), (1, 8, None), (2, 9, None), (3, 10, None), (4, EOS, FinishReason.STOP)]
    world.assert_empty()


def choices_of(world: World) -> list[int]:
    return [event.choice for event in world.take() if isinstance(event, TokenSampled)]


def test_a_choice_of_which_nobody_wants_more_leaves_the_batch_and_the_others_go_on() -> None:
    world = World()
    key = world.reserve(local=99, choices=3)
    world.step()
    assert choices_of(world) == [0, 1, 2]
    world.role.end_choice(key, 1)
    world.role.end_choice(key, 1)
    world.role.end_choice(AttemptKey("nobody", 1), 0)
    world.step()
    assert choices_of(world) == [0, 2]
    world.role.end_choice(key, 9)
    while world.scheduler.running:
        world.step()
    assert choices_of(world).count(1) == 0
    world.assert_empty()


def test_a_choice_that_has_ended_before_it_could_enter_stays_out() -> None:
    """Its first token was prefill's, or it had ended while its prompt was computed."""
    world = World()
    key = world.reserve(local=99, choices=2, num_tokens=40)
    world.step()
    world.role.end_choice(key, 0)
    while not (given := choices_of(world)):
        world.step()
    assert given == [0, 1], "the first tokens are sampled together"
    world.step()
    assert choices_of(world) == [1]
    world.step()
    world.assert_empty()
    world.take()
    handed = world.reserve("handed")
    (made,) = world.take()
    assert isinstance(made, GrantMade)
    world.role.end_choice(handed, 0)
    assert world.hand_off(made.grant) is None
    world.assert_empty()


def test_where_nobody_wants_more_of_any_choice_the_attempt_has_ended() -> None:
    world = World()
    key = world.reserve(local=99, choices=2)
    world.step()
    for choice in (0, 1):
        world.role.end_choice(key, choice)
    world.assert_empty()


def test_chunks_of_a_prompt_that_is_computed_here_are_told_before_its_first_token() -> None:
    world = World()
    world.step_s = 0.25
    key = world.reserve(local=40, num_tokens=40, unpaced=True)
    for _ in range(3):
        world.step()
    begun, computed, token = world.take()
    assert isinstance(begun, ComputesHere)
    chunks = (Span("chunk", 0.75, 0.5, 16), Span("chunk", 0.5, 0.25, 16), Span("chunk", 0.25, 0.0, 8))
    assert computed == PromptComputed(key, chunks)
    assert isinstance(token, TokenSampled)


def test_steps_with_prompts_beside_the_batch_are_counted_and_timed() -> None:
    world = World()
    world.step_s = 0.25
    made = world.reserve("handed")
    (event,) = world.take()
    assert isinstance(event, GrantMade)
    assert world.hand_off(event.grant) is None
    world.step()
    assert (world.counters.num_mixed_steps, world.counters.mixed_s) == (0, 0.0), str(made)
    world.reserve("here", local=99)
    world.step()  # all of its six tokens
    world.step()
    assert (world.counters.num_mixed_steps, world.counters.mixed_s) == (1, 0.25)


def test_pages_that_an_end_frees_are_given_on_at_once_and_its_own_answer_stays() -> None:
    """Without a step in between; who computes its prompt here ends for the protocol just then."""
    world = World(num_pages=4)
    world.reserve("large", num_tokens=13)
    handed = world.reserve("other")
    here = world.reserve("here", local=99)
    (made,) = world.take()
    assert isinstance(made, GrantMade)
    assert world.hand_off(made.grant, digests=(1, 2, 3, 4)) is RefusalReason.DIGEST_MISMATCH
    failed, next_made, computes = world.take()
    assert isinstance(failed, AttemptFailed)
    assert isinstance(computes, ComputesHere)
    assert computes.key == here
    assert isinstance(next_made, GrantMade)
    assert next_made.grant.key == handed


def test_the_keys_of_a_prompt_whose_handoff_failed_are_listed_while_steps_may_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, lock, seen = World(), threading.Lock(), []
    monkeypatch.setattr(world.role, "_lock", lock)
    listed, end = world.role.ledger.keys_to_keep, world.role.ledger.end

    def listed_now(*attempt: Any) -> list[bytes]:
        seen.append(("keys", lock.locked()))
        return listed(*attempt)

    def end_now(*attempt: Any, **how: Any) -> None:
        seen.append(("end", lock.locked()))
        end(*attempt, **how)

    monkeypatch.setattr(world.role.ledger, "keys_to_keep", listed_now)
    monkeypatch.setattr(world.role.ledger, "end", end_now)
    world.reserve(num_tokens=13)
    (made,) = world.take()
    assert isinstance(made, GrantMade)
    assert world.hand_off(made.grant, digests=(1, 2, 3, 4)) is RefusalReason.DIGEST_MISMATCH
    assert seen == [("keys", False), ("end", True)]


@pytest.mark.long
def test_many_that_waited_get_their_pages_in_one_go() -> None:
    world = World(num_pages=4000)
    world.role.ledger._bound = 2000
    world.scheduler.limits = SchedulerLimits(5000, 64, 16, 10)
    large = world.reserve("large", num_tokens=63)
    hog = world.pool.allocate(world.pool.num_available)
    assert hog is not None
    for n in range(900):
        world.reserve(f"small-{n}", num_tokens=4)
    world.take()
    world.pool.release(hog)
    world.role.cancel(large)
    assert len([e for e in world.take() if isinstance(e, GrantMade)]) == 900


def test_a_draining_worker_takes_nobody_in_and_lets_go_of_who_waits() -> None:
    world = World(num_pages=4)
    granted = world.reserve("large", num_tokens=13)
    world.reserve("waits")
    world.take()
    world.draining = True
    world.role.before_schedule()
    world.reserve("late")
    assert [type(event.error) for event in world.events if isinstance(event, AttemptFailed)] == [DrainingError] * 2
    assert list(world.role.ledger.attempts) == [granted]
    world.role.cancel(granted)
    world.assert_empty()


def test_whoever_waits_for_a_worker_to_be_empty_hears_of_a_reservation_that_was_refused() -> None:
    """A drain may have looked while the attempt was held, just before the protocol would not have it."""
    world = World()
    world.role.cancel(AttemptKey("r", 1))  # it overtook its Reserve
    queued = world.driver.reserve
    world.driver.reserve = lambda key: (world.role.snapshot(), queued(key))  # type: ignore[assignment,func-returns-value]
    world.reserve("r")
    (failed,) = world.take()
    assert isinstance(failed, AttemptFailed)
    assert world.num_seen == 0


def test_pages_that_a_failed_step_was_to_copy_are_given_on_with_its_others() -> None:
    """Nothing runs behind it, so no later step would look for them."""
    world = World(num_pages=4)
    engine = cast(Any, BrokenEngine())
    runner = Runner(engine, world.scheduler, name="", on_fatal=lambda error: None, pacing=Pacing())
    world.reserve(local=99, choices=2)
    world.step()
    waits = world.reserve("waits", num_tokens=13)
    batch = world.scheduler.schedule()
    assert batch.copies
    runner._step(world.role, NextStep(world.scheduler, world.role, ahead=None), batch)
    world.take()
    world.role.before_schedule()
    (made,) = world.take()
    assert isinstance(made, GrantMade)
    assert made.grant.key == waits


def test_a_full_queue_refuses_and_a_repeated_reserve_is_answered_again() -> None:
    world = World(num_pages=4)
    for name in ("large", "a", "bb"):
        world.reserve(name, num_tokens=13)
    world.take()
    world.reserve("ccc", num_tokens=13)
    (failed,) = world.take()
    assert isinstance(failed, AttemptFailed)
    assert isinstance(failed.error, OverloadedError)
    world.reserve("large", num_tokens=13)
    (again,) = world.take()
    assert isinstance(again, GrantMade)
    world.reserve("a", num_tokens=13)
    assert world.take() == []
    for name in ("large", "a", "bb"):
        world.role.cancel(AttemptKey(name, 1))
    assert all(isinstance(event, GrantMade) for event in world.take()), "a cancel needs no word"
    world.assert_empty()
    world.reserve("a", num_tokens=13)
    (ended,) = world.take()
    assert isinstance(ended, AttemptFailed)
    world.assert_empty()


def test_a_newer_attempt_ends_the_older_one() -> None:
    world = World()
    world.reserve("r")
    (first,) = world.take()
    assert isinstance(first, GrantMade)
    world.reserve("r", attempt=2)
    (second,) = world.take()
    assert isinstance(second, GrantMade)
    assert second.grant.key.attempt == 2
    assert [key.attempt for key in world.role.ledger.attempts] == [2]
    world.role.session_ended(SESSION)
    world.assert_empty()


@pytest.mark.parametrize("may_be_wrong", [False, True])
def test_verified_pages_of_a_cancelled_attempt_are_kept_unless_they_may_be_wrong(may_be_wrong: bool) -> None:
    """Prefill may find only at a prompt's end that what it has computed, and sealed, is of no use. It tells the router,
    whose cancel comes while the writes are under way."""

    class Stopping(World):
        def ask_to_stop(self, sender: str, grant: Grant, reason: RefusalReason) -> None:
            assert (sender, reason) == (SENDER, RefusalReason.CANCELLED)

    world = Stopping()
    key = world.reserve(num_tokens=11)
    (made,) = world.take()
    assert isinstance(made, GrantMade)
    grant = made.grant
    assert world.driver.attach(grant.grant_id, SENDER, grant.capability, renew=False).refusal is None
    digests = world.driver._take_digests([(0, grant.pages[:2])])[0]
    part = CommitPart(grant.grant_id, key, grant.epoch, grant.receiver, SENDER, 0, (tuple(digests),), grant.capability)
    assert world.driver.commit_part(part).refusal is None
    world.role.cancel(key, discards=may_be_wrong)
    world.driver.confirm_idle(grant.grant_id, SENDER, grant.capability)
    prompt = [2 + (1 + index) % 90 for index in range(11)]
    assert world.pool.match(page_keys(prompt, PAGE, b"m")) == (0 if may_be_wrong else 2)
    assert world.take() == []
    world.assert_empty()


def test_the_end_of_one_routers_session_ends_its_own_requests_only() -> None:
    world = World()
    world.reserve("ours")
    other = AttemptSpec(AttemptKey("theirs", 1), 0, (2, 3, 4), SamplingParams(temperature=0, max_tokens=3), 1)
    world.role.reserve(SESSION + 1, other, 0)
    assert {key.request_id for key in world.role.ledger.attempts} == {"ours", "theirs"}
    world.role.session_ended(SESSION + 1)
    assert {key.request_id for key in world.role.ledger.attempts} == {"ours"}
    world.role.session_ended(SESSION)
    world.assert_empty()


@pytest.mark.processes
def test_the_core_needs_no_tensors_no_wire_and_no_process() -> None:
    assert loaded_by("import decode_worker.role, decode_worker.receiver_driver", *HEAVY) == []


# --- guesses ------------------------------------------------------------------------------------------------------


class Told(World):
    """Its model says what follows: by position of the output, whatever came before."""

    def __init__(self, text: list[int], *, most: int = 5, drafts: bool = False, num_pages: int = 40) -> None:
        self.drafts = Drafts(
            self.propose, PagePool(20, PAGE), most=4, num_rows=6, max_context=100, vocab_size=100,
            ends=frozenset([EOS]), clock=VirtualClock(),
        )  # fmt: skip
        proposer = self.drafts if drafts else None
        super().__init__(num_pages, Guesses(most, 6, PAGE, 100, frozenset([EOS]), proposer))
        self.text = text
        self.wrong: set[int] = set()  # where the draft proposes another token
        self.num_steps = 0
        self.positions: list[list[int]] = []

    def propose(self, inputs: Sequence[DraftInput]) -> list[int | None]:
        rows = [each.row for each in inputs]
        return [self.text[row.position] + (row.position in self.wrong) if row is not None else None for row in rows]

    def sample(self, logits: Any, rows: Sequence[Sequence[SampleRow]]) -> list[list[SampledToken | TandemError]]:
        assert logits is None or len(logits) == len(rows)
        for (row,) in rows:
            assert row.state.output_ids == self.text[: row.position], "what came before is noted, and nothing else"
        self.positions.append([row.position for (row,) in rows])
        return [[SampledToken(self.text[row.position])] for (row,) in rows]

    def step(self) -> None:
        self.num_steps += 1
        self.role.before_schedule()
        batch = self.scheduler.schedule()
        assert batch.items
        self.role.before_forward(batch)
        inputs = inputs_of(batch)
        for item, computed in zip(batch.items, inputs, strict=True):
            newest = item.sequence.token_ids[item.start : item.start + item.num_tokens - len(item.guesses)]
            assert list(computed.token_ids) == [*newest, *item.guesses]
            assert computed.num_logits == item.num_to_sample
        logits = np.zeros((sum(item.num_to_sample for item in batch.items), 1))
        self.scheduler.apply(batch, self.role.sample(batch, logits))
        self.role.after_step(batch)


class Failing(Told):
    """What comes at this position of the output cannot be sampled."""

    fails_at = 0

    def sample(self, logits: Any, rows: Sequence[Sequence[SampleRow]]) -> list[list[SampledToken | TandemError]]:
        sampled = super().sample(logits, rows)
        for at, (row,) in enumerate(rows):
            if row.position == self.fails_at:
                sampled[at] = [SlowGrammarError("too slow")]
        return sampled


@pytest.mark.parametrize("fails_at", range(1, 20))
def test_what_comes_before_an_error_is_given_out_whatever_was_guessed(fails_at: int) -> None:
    world = Failing([11, 12, 13, 14] * 5)
    world.fails_at = fails_at
    params = SamplingParams(temperature=0, max_tokens=20)
    world.role.reserve(SESSION, AttemptSpec(AttemptKey("r", 1), 0, (2, 3, 4), params, 1), 99)
    while world.role.ledger.attempts:
        world.step()
    assert [token for _, token, _ in world.tokens()] == world.text[:fails_at]
    assert isinstance(world.events[-1], AttemptFailed)
    assert isinstance(world.events[-1].error, SlowGrammarError)
    world.assert_empty()


def test_right_guesses_are_taken_and_the_first_wrong_one_ends_them() -> None:
    """The text of the output repeats itself, breaks off, and repeats itself again."""
    text = [11, 12, 13, 14, 11, 12, 13, 14, 11, 12, 20, 21, 11, 12, 13, 14, 11, 12, 20, 21, 22, 23, 24, 25]
    world = Told(text)
    params = SamplingParams(temperature=0, max_tokens=len(text))
    key = AttemptKey("r", 1)
    world.role.reserve(SESSION, AttemptSpec(key, 0, (2, 3, 4), params, 1), 99)
    while world.role.ledger.attempts:
        world.step()
    assert [token for _, token, _ in world.tokens()] == text
    assert [index for index, _, _ in world.tokens()] == list(range(len(text)))
    assert world.num_steps < len(text) - 4
    counters = world.counters
    assert 0 < counters.num_right_guesses < counters.num_guesses
    assert world.num_steps == len(text) - counters.num_right_guesses
    world.assert_empty()


def test_kv_counts_only_up_to_the_first_wrong_guess() -> None:
    num_guesses = num_right = 0
    for prompt in ((2, 3, 4), (2, 3, 4, 5), (2, 3, 4, 5, 6), (2, 3, 4, 5, 6, 7)):  # pages end at other places
        world = Told([11, 12, 13, 14, 20, 11, 12, 13, 14, 15, 30, 31])
        params = SamplingParams(temperature=0, max_tokens=12)
        world.role.reserve(SESSION, AttemptSpec(AttemptKey("r", 1), 0, prompt, params, 1), 99)
        while world.role.ledger.attempts:
            world.step()
            for sequence in world.scheduler.running:
                assert sequence.num_to_compute == 1, "the newest token alone"
                assert sequence.output_ids == world.text[: sequence.num_output]
        num_guesses += world.counters.num_guesses
        num_right += world.counters.num_right_guesses
    assert num_guesses > num_right > 0


@pytest.mark.parametrize("seed", range(3))
def test_masks_that_are_late_behind_right_guesses_cost_no_token(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng, text = random.Random(seed), [11, 12, 13, 14] * 6
    grammar = LLMatcher.grammar_from_regex("(" + "".join(TEXTS[token] for token in text[:4]) + ")*")

    num_left_out = 0

    def late(_: Guides, guides: Sequence[Guide | None], *, awaits_one: bool) -> set[int]:
        nonlocal num_left_out
        is_calm = awaits_one and rng.random() < 0.5
        found = set() if is_calm else {at for at in range(len(guides)) if rng.random() < 0.4}
        num_left_out += len(found) if awaits_one else 0  # else the step has given a token before
        return found

    monkeypatch.setattr(Guides, "late", late)
    world = Told(text)
    params = SamplingParams(temperature=0, max_tokens=len(text), grammar=grammar)
    world.role.reserve(SESSION, AttemptSpec(AttemptKey("r", 1), 0, (2, 3, 4), params, 1), 99)
    while world.role.ledger.attempts:
        world.step()
    assert [(index, token) for index, token, _ in world.tokens()] == list(enumerate(text))
    assert 0 < world.counters.num_right_guesses <= world.counters.num_guesses
    assert world.counters.num_late_masks == num_left_out > 0
    world.assert_empty()


def test_choices_beside_each_other_have_guesses_of_their_own() -> None:
    text = [11, 12, 13, 14] * 6
    world = Told(text)
    params = SamplingParams(temperature=0, max_tokens=len(text))
    for name in ("one", "other"):
        world.role.reserve(SESSION, AttemptSpec(AttemptKey(name, 1), 0, (2, 3, 4), params, 1), 99)
    while world.role.ledger.attempts:
        world.step()
    assert sorted(token for _, token, _ in world.tokens()) == sorted(text * 2)
    assert world.num_steps < len(text)
    world.assert_empty()


def test_an_error_behind_a_right_guess_ends_the_attempt_and_leaves_nothing() -> None:
    class Breaks(Told):
        def sample(self, logits: Any, rows: Sequence[Sequence[SampleRow]]) -> list[list[SampledToken | TandemError]]:
            sampled = super().sample(logits, rows)
            is_behind_guess = len(self.positions[-1]) == 1 and self.positions[-1][0] > 6 and len(self.positions) > 1
            if is_behind_guess and self.positions[-1][0] == self.positions[-2][0] + 1 and self.num_rounds:
                return [[OverloadedError("no more")]]
            self.num_rounds += 1
            return sampled

        num_rounds = 0

        def step(self) -> None:
            self.num_rounds = 0
            super().step()

    world = Breaks([11, 12, 13, 14] * 6)
    params = SamplingParams(temperature=0, max_tokens=24)
    world.role.reserve(SESSION, AttemptSpec(AttemptKey("r", 1), 0, (2, 3, 4), params, 1), 99)
    while world.role.ledger.attempts:
        world.step()
    assert any(isinstance(event, AttemptFailed) for event in world.events)
    assert len(world.tokens()) < 24
    world.assert_empty()


@pytest.mark.parametrize(
    ("error", "num_kept"), [(InternalError("not finite"), 0), (InvalidRequestError("no token is left"), 3)]
)
def test_what_may_be_wrong_of_an_attempt_that_fails_is_found_by_nobody(error: TandemError, num_kept: int) -> None:
    """Also of its other choices: they began from the same prompt. What only the request is to blame for costs others
    nothing of what is cached."""

    class Fails(World):
        def sample(self, _: Any, rows: Sequence[Sequence[SampleRow]]) -> list[list[SampledToken | TandemError]]:
            def token(row: SampleRow) -> SampledToken | TandemError:
                is_last = row.choice == 1 and row.position == 4
                return error if is_last else SampledToken(50 + row.choice)

            return [[token(row) for row in of_one] for of_one in rows]

    world = Fails()
    world.reserve(choices=2, local=99)
    while world.role.ledger.attempts:
        kept = [world.pool.match(page_keys([*range(3, 9), *[50 + choice] * 4], PAGE, b"m")) for choice in (0, 1)]
        world.step()
    assert kept == [2, 2]
    assert any(isinstance(event, AttemptFailed) for event in world.events)
    assert world.pool.counts().cached == num_kept
    world.assert_empty()


def test_a_draft_proposes_where_lookup_finds_nothing() -> None:
    text = [*[11, 12, 13, 14] * 5, *range(20, 50)]
    alone, world = Told(text), Told(text, drafts=True)
    world.wrong = {30, 38, 39}
    for each in (alone, world):
        params = SamplingParams(temperature=0, max_tokens=len(text))
        each.role.reserve(SESSION, AttemptSpec(AttemptKey("r", 1), 0, (2, 3, 4), params, 1), 99)
        while each.role.ledger.attempts:
            each.step()
        assert [token for _, token, _ in each.tokens()] == text
    counters = world.counters
    assert counters.num_right_guesses > 0, "what came before is looked up"
    assert 0 < counters.num_right_drafts < counters.num_drafts
    assert world.num_steps == len(text) - counters.num_right_guesses - counters.num_right_drafts < alone.num_steps
    world.assert_empty()
    assert world.drafts.pool.counts().used > 0
    world.role.before_schedule()
    assert world.drafts.pool.counts().used == 0
    assert alone.counters.num_drafts == 0


def test_pages_of_the_draft_go_with_the_attempt_however_it_ends() -> None:
    params = SamplingParams(temperature=0, max_tokens=40)
    world = Told(list(range(11, 60)), most=0, drafts=True)
    key = AttemptKey("r", 1)
    world.role.reserve(SESSION, AttemptSpec(key, 0, (2, 3, 4), params, 1), 99)
    for _ in range(6):
        world.step()
    assert world.counters.num_right_drafts
    assert world.drafts.pool.counts().used
    world.role.cancel(key)
    world.role.before_schedule()
    assert world.drafts.pool.counts().used == 0
    # Another attempt, elsewhere or here, goes on behind what the client has.
    retry = AttemptSpec(AttemptKey("r", 2), 0, (2, 3, 4), params, 1, (ChoiceJournal(0, tuple(range(11, 18))),))
    world.take()
    world.role.reserve(SESSION, retry, 99)
    while world.role.ledger.attempts:
        world.step()
    assert [(index, token) for index, token, _ in world.tokens()] == [(n, 11 + n) for n in range(7, 40)]
    world.role.before_schedule()
    assert world.drafts.pool.counts().used == 0
    world.assert_empty()


@pytest.mark.long
def test_a_preempted_sequence_loses_its_pages_of_the_draft() -> None:
    """Two fill all pages: the second gives up its own, and is replayed when the first has ended."""
    world = Told(list(range(11, 60)), most=0, drafts=True, num_pages=12)
    params = SamplingParams(temperature=0, max_tokens=36)
    for name in ("one", "other"):
        world.role.reserve(SESSION, AttemptSpec(AttemptKey(name, 1), 0, (2, 3, 4), params, 1), 99)
    while world.role.ledger.attempts:
        world.step()
        held = {sequence for sequence, follower in world.drafts._followers.items() if follower.pages}
        before = set(world.scheduler.running)
        world.role.before_schedule()
        assert held & before >= {s for s, f in world.drafts._followers.items() if f.pages} & held
        assert all(sequence in before for sequence in world.drafts._followers)
    assert world.counters.num_preemptions
    assert world.counters.num_right_drafts
    assert sorted(token for _, token, _ in world.tokens()) == sorted([*range(11, 47)] * 2)
    world.assert_empty()


def test_the_grammar_of_who_has_gone_is_not_compiled() -> None:
    world, wanted = World(), list[Callable[[], bool]]()

    class Noted:
        def prepare(self, grammar: str, outputs: Any, then: Any, is_wanted: Callable[[], bool]) -> None:
            wanted.append(is_wanted)

    world.role._guides = cast(Any, Noted())
    grammar = LLMatcher.grammar_from_regex("[a-z]+")
    spec = AttemptSpec(AttemptKey("r", 1), 0, (2, 3, 4), SamplingParams(max_tokens=5, grammar=grammar), 1)
    world.role.reserve(SESSION, spec, 0)
    (is_wanted,) = wanted
    assert is_wanted()
    world.role.cancel(spec.key)
    assert not is_wanted()


class Rates:
    """Tiers that hold nothing, and note what they are told of computing."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def computed(self, num_tokens: int, _: float) -> None:
        self.told.append(num_tokens)

    def fetch(self, *_: Any, **__: Any) -> bool:
        return False

    def entered(self, *_: Any) -> None: ...

    discarded = used = entered


def test_the_pages_that_a_prompt_begins_with_are_in_use_also_where_prefill_computes_it() -> None:
    """What it adds to the tiers lies behind them."""

    class Noted(Rates):
        def used(self, keys: Sequence[bytes]) -> None:
            noted.append(list(keys))

    world, noted = World(), list[list[bytes]]()
    world.scheduler.tiers = cast(Any, Noted())
    key = world.reserve("handed off", num_tokens=3 * PAGE + 1)
    job = world.role.ledger.attempts[key]
    assert noted == [list(job.page_keys[:3])]
    assert len(noted[0]) == 3


def test_guesses_say_nothing_of_how_fast_prompts_are_computed() -> None:
    world = Told([11, 12, 13, 14] * 4)
    world.scheduler.tiers = rates = cast(Any, Rates())
    params = SamplingParams(temperature=0, max_tokens=16)
    world.role.reserve(SESSION, AttemptSpec(AttemptKey("r", 1), 0, (2, 3, 4), params, 1), 99)
    while world.role.ledger.attempts:
        world.step()
    assert world.counters.num_guesses
    assert [num for num in rates.told if num] == [3], "the prompt alone"


class SlowTiers(Rates):
    """Tiers that read for each prompt, into pages of the pool, until a test ends that."""

    def __init__(self, pool: PagePool, num_pages: int) -> None:
        super().__init__()
        self.pool = pool
        self.num_pages = num_pages
        self.ends: list[Callable[[], None]] = []

    def fetch(self, _: Any, then: Fetched, **__: Any) -> bool:
        pages = self.pool.allocate(self.num_pages)
        assert pages is not None

        def end() -> None:
            self.pool.release(pages)
            then(())

        self.ends.append(end)
        return True


def test_what_rests_for_want_of_pages_goes_on_when_a_read_gives_them_back() -> None:
    """The runner rests until it is told of something: also where who had them read for it is gone."""
    world = World(num_pages=4)
    world.reserve("generates", local=99)
    world.step()
    world.scheduler.tiers = tiers = cast(Any, SlowTiers(world.pool, num_pages=2))
    fetching = world.reserve("fetches", local=99)
    for _ in range(2):
        world.step()
    world.role.cancel(fetching)
    assert world.scheduler.schedule().stalled, "its two pages are full"
    calls: list[Callable[[], None]] = []
    world.role._to_runner = calls.append
    tiers.ends.pop()()
    assert calls, "nothing wakes the runner"
    while world.role.ledger.attempts:
        world.step()
    world.assert_empty()


# -- colocated


def test_a_prompt_of_a_colocated_cluster_is_computed_in_chunks_of_full_size_and_counted() -> None:
    world = World()
    world.step_s = 0.5
    world.reserve(local=40, num_tokens=40, unpaced=True)
    sizes = []
    for _ in range(3):
        world.step()
        sizes.append(world.counters.num_chunk_tokens)
    assert sizes == [16, 32, 40]
    assert (world.counters.chunk_s, world.counters.num_mixed_steps) == (1.5, 0)
    assert world.tokens() == [(0, 7, None)]


def test_one_whose_choices_have_all_ended_is_refused_as_nobody_would_fill_its_pages() -> None:
    world = World()
    world.reserve(local=6, attempt=2, unpaced=True, journal=(ChoiceJournal(0, (5,), finished=True),))
    (failed,) = world.events
    assert isinstance(failed, AttemptFailed)
    assert "every choice has ended already" in str(failed.error)
    world.assert_empty()


def test_slack_is_of_the_prompt_and_not_of_what_is_generated() -> None:
    """A long context is not the first to lose its pages."""
    world = World()
    world.reserve(local=20, num_tokens=20, unpaced=True, slack_s=9.0)
    turns = []
    for _ in range(3):
        turns.append([sequence.turn for sequence in world.scheduler.running])
        world.step()
    assert turns == [[9.0], [9.0], [0.0]]


def test_a_choice_that_the_router_has_ended_while_its_last_token_was_not_told_is_over() -> None:
    """A stop string ends it at the router, and its end of text comes in the step that is under way meanwhile."""
    world = World(num_pages=40)
    steps = NextStep(world.scheduler, world.role, ahead=world.role)

    def step() -> None:
        batch = steps.next()
        world.role.before_forward(batch)
        steps.while_computed(batch)
        steps.computed(batch, world.role.sample(batch, None))

    ends = set[int]()  # choices whose next token is their end of text

    def sample(_: Any, rows: Sequence[Sequence[SampleRow]]) -> list[list[SampledToken | TandemError]]:
        return [[SampledToken(EOS if row.choice in ends else 7) for row in of_one] for of_one in rows]

    world.role._tokens.sample_tokens = sample
    key = world.reserve(local=99, choices=2)
    while steps._untold is None:
        step()
    ends.add(0)
    step()
    assert steps._untold is not None
    world.role.end_choice(key, 0)
    while world.role.ledger.attempts:
        step()
        steps.tell()
    assert EOS not in [token for _, token, _ in world.tokens()], "of the choice that had ended nothing more comes"
    world.assert_empty()


LETTERS = LLMatcher.grammar_from_regex("[a-z]+")


class Apart:
    """Computes apart from its host, and notes what is asked of it."""

    computes_apart = True

    def __init__(self, told: list[str]) -> None:
        self._told = told

    def finish(self) -> None:
        self._told.append("finish")

    def forward(self, *_: object) -> None:
        self._told.append("forward")


@pytest.mark.parametrize(
    ("grammar", "num_tokens"), [("", 6), ("", 20), (LETTERS, 6)], ids=["plain", "chunk", "grammar"]
)
def test_a_step_that_is_to_be_timed_has_ended_when_it_is_sampled(
    grammar: str, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks have the time that the step takes; and where nothing is sampled, sampling waits for no device."""
    world, told = World(), list[str]()
    runner = Runner(cast(Any, Apart(told)), world.scheduler, name="", on_fatal=lambda _: None, pacing=Pacing())
    monkeypatch.setattr(world.role, "sample", lambda *_: told.append("sample") or [])
    params = SamplingParams(temperature=0, max_tokens=8, grammar=grammar)
    world.role.reserve(SESSION, AttemptSpec(AttemptKey("r", 1), 0, tuple(range(2, 2 + num_tokens)), params, 1), 99)
    batch = world.scheduler.schedule()
    steps = NextStep(world.scheduler, world.role, ahead=world.role)
    monkeypatch.setattr(steps, "computed", lambda batch, sampled: None)
    runner._step(world.role, steps, batch)
    is_timed = bool(grammar) or not any(item.samples for item in batch.items)
    assert told[: 2 + is_timed] == (["forward", "finish", "sample"] if is_timed else ["forward", "sample"])
    assert is_timed == (num_tokens == 20 or bool(grammar))


def test_what_prompts_would_take_is_looked_at_when_that_may_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    world, looked_s, look = World(), list[float](), BatchScheduler.prompt_steps

    def noting(scheduler: BatchScheduler) -> PromptSteps:
        looked_s.append(round(world.clock.now(), 3))
        return look(scheduler)

    def granted(name: str) -> Grant:
        world.reserve(name)
        return next(event.grant for event in reversed(world.events) if isinstance(event, GrantMade))

    monkeypatch.setattr(BatchScheduler, "prompt_steps", noting)
    began_s, world.step_s = world.clock.now(), 0.03
    world.hand_off(granted("r"))
    for _ in range(5):
        world.step()
    assert [s - began_s for s in looked_s] == pytest.approx([0.03, 0.15]), "at first, and a tenth of a second later"
    world.hand_off(granted("other"))
    world.step()
    assert looked_s[-1] - began_s == pytest.approx(0.18), "who runs has changed"
    world.reserve("here", local=10)
    world.step()
    assert looked_s[-1] - began_s == pytest.approx(0.21), "a prompt is computed"
    world.step()
    assert looked_s[-1] - began_s == pytest.approx(0.24), "the first step without one tells what it took by itself"
    world.step()
    world.role.going_idle()
    assert [s - began_s for s in looked_s[5:]] == pytest.approx([0.27]), "of a worker at rest"
