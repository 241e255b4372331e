"""What the draft proposes, when it does, and what it holds for that; its model is a rule, whose KV is the tokens."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SeqOf
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.core.clock import VirtualClock
from tandem.core.page_keys import PageKeys
from tandem.core.pages import PagePool, page_keys
from tandem.core.sampling import SampleRow, SamplingParams, SequenceState
from tandem.core.token_ids import token_ids
from tandem.worker.draft_costs import Timing
from tandem.worker.drafts import DraftInput, Drafts
from tandem.worker.guesses import Guesses, Source
from tandem.worker.sequence import Sequence

PAGE = 4
EOS = 99
VOCAB = 50


def rule(context: SeqOf[int]) -> int:
    """What follows: it depends on all that came before."""
    return (sum((index + 1) * token for index, token in enumerate(context)) + 7 * len(context)) % VOCAB


@dataclass
class Model:
    """The draft: what it knows of a text is what lies in its pages."""

    clock: VirtualClock
    is_right: Callable[[int], bool] = lambda _: True  # of what follows so many tokens
    pass_s: float = 0.0
    token_s: float = 0.0  # beyond twelve of a pass
    vocab_size: int = 1000
    slots: dict[int, int] = field(default_factory=dict)
    passes: list[list[int]] = field(default_factory=list)  # of each how many tokens of each sequence
    contexts: list[list[int]] = field(default_factory=list)  # behind which something was drawn

    def __call__(self, inputs: SeqOf[DraftInput]) -> list[int | None]:
        self.passes.append([len(each.token_ids) for each in inputs])
        num_tokens = sum(self.passes[-1])
        self.clock.advance(self.pass_s + self.token_s * max(0, num_tokens - 12))
        return [self._one(each) for each in inputs]

    def _one(self, given: DraftInput) -> int | None:
        assert given.token_ids
        for place, token_id in enumerate(given.token_ids, given.start):
            self.slots[given.pages[place // PAGE] * PAGE + place % PAGE] = token_id
        if given.row is None:
            return None
        end = given.start + len(given.token_ids)
        context = [self.slots[given.pages[place // PAGE] * PAGE + place % PAGE] for place in range(end)]
        state = given.row.state
        assert isinstance(state, State)
        assert given.row.position == end - state.num_prompt
        known = list(state.token_ids)
        assert len(context) >= len(known)
        assert context[: len(known)] == known, "behind it there are proposals of this step alone"
        self.contexts.append(context)
        return rule(context) % self.vocab_size if self.is_right(end) else VOCAB + 1


class State(SequenceState):
    """And the text, which grows."""

    __slots__ = ("num_prompt", "token_ids")


@dataclass
class Owner:
    state: State

    def rows(self, sequence: Sequence, ahead: int) -> list[SampleRow]:
        return [SampleRow(self.state, sequence.params, 0, sequence.num_output + ahead)]


def sequence(prompt: list[int], num_output: int = 1, max_tokens: int = 1000, *, keyed: bool = False) -> Sequence:
    text = token_ids(prompt)
    for _ in range(num_output):
        text.append(rule(text))
    state = State(())
    state.num_prompt, state.token_ids = len(prompt), text
    made = Sequence(
        "r", 1, 0, 0.0, 0, text, len(prompt), SamplingParams(max_tokens=max_tokens), owner=Owner(state),
        num_computed=len(text) - 1,
    )  # fmt: skip
    if keyed:
        made.keys = PageKeys(page_keys(prompt, PAGE, b"m"))
    return made


class World:
    """A batch that generates by the rule, with proposals beside its steps."""

    def __init__(
        self,
        *,
        num_pages: int = 2000,
        most: int = 4,
        step_s: float = 0.0,
        max_context: int = 10_000,
        vocab_size: int = 1000,
        page_size: int = 10_000,
        **of_model: float | Callable[[int], bool],
    ) -> None:
        self.clock = VirtualClock()
        self.model = Model(self.clock, vocab_size=vocab_size, **of_model)  # type: ignore[arg-type]
        self.pool = PagePool(num_pages, PAGE)
        self.step_s = step_s
        self.drafts = Drafts(
            self.model, self.pool, most=most, num_rows=12, max_context=max_context, vocab_size=vocab_size,
            ends=frozenset([EOS]), clock=self.clock,
        )  # fmt: skip
        self.guesses = Guesses(0, 12, page_size, 100_000, frozenset([EOS]), self.drafts)
        self.num_steps = self.num_proposed = self.num_right = 0
        self.may_fail = False

    def step(self, *running: Sequence) -> None:
        """As a decode worker takes it."""
        self.guesses.plan(running)
        assert self.may_fail or not self.drafts._num_failed, "what the model asserts is logged only"
        assert sum(1 + len(each.guesses) for each in running) <= max(12, len(running))
        self.num_steps += 1
        self.clock.advance(self.step_s)
        self.drafts.step_took(self.step_s, is_checked=any(each.guesses for each in running))
        for each in running:
            num_right = 0
            for token_id in (*each.guesses, None):
                each.token_ids.append(rule(each.token_ids))
                if token_id != each.token_ids[-1]:
                    break
                num_right += 1
            if each.guesses:
                assert each.guessed_by.source is Source.DRAFT
                each.guessed_by.judge(len(each.guesses), num_right)
            self.num_proposed += len(each.guesses)
            self.num_right += num_right
            each.num_computed = len(each.token_ids) - 1

    def run(self, num_tokens: int, *running: Sequence) -> None:
        """Until the first of them has so many tokens more."""
        end = len(running[0].token_ids) + num_tokens
        while len(running[0].token_ids) < end:
            self.step(*running)


def test_a_draft_that_is_always_right_saves_steps() -> None:
    world, text = World(), sequence([3, 1, 4, 1, 5])
    world.run(200, text)
    assert world.num_right == world.num_proposed > 120
    assert world.num_steps < 60
    for context in world.model.contexts:
        assert context == list(text.token_ids[: len(context)])


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_lies_in_its_pages_is_what_was_sampled(data: st.DataObject) -> None:
    """Whatever comes of its proposals, whoever else proposes, come and go as they like, in however few pages."""
    wrong = data.draw(st.sets(st.integers(0, 120)))
    num_pages = data.draw(st.integers(2, 60))
    world = World(
        num_pages=num_pages, most=data.draw(st.integers(1, 6)), is_right=lambda end: end not in wrong,
        page_size=data.draw(st.sampled_from([4, 16, 1000])), max_context=data.draw(st.integers(10, 300)),
    )  # fmt: skip
    prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40)
    running: list[Sequence] = []
    for _ in range(data.draw(st.integers(1, 25))):
        match data.draw(st.sampled_from(["come", "come", "go", "alone", "step", "step", "step"])):
            case "come" if len(running) < 6:
                running.append(sequence(data.draw(prompts), keyed=data.draw(st.booleans())))
            case "go" if running:
                running.pop(data.draw(st.integers(0, len(running) - 1)))
            case "alone" if running:  # tokens that others proposed
                one = data.draw(st.sampled_from(running))
                for _ in range(data.draw(st.integers(1, 20))):
                    one.token_ids.append(rule(one.token_ids))
                one.num_computed = len(one.token_ids) - 1
            case _:
                world.step(*running)
        world.pool.check()
        assert world.pool.counts().used <= num_pages
    world.step()
    assert world.pool.counts().used == 0, "nobody runs"


def test_choices_of_one_prompt_compute_it_once() -> None:
    prompt = [token % VOCAB for token in range(40)]
    alone, world = World(), World()
    alone.run(60, sequence(prompt, keyed=True))
    choices = [sequence(prompt, keyed=True) for _ in range(3)]
    for choice, first in zip(choices, (7, 8, 9), strict=True):
        choice.token_ids[-1] = first
    world.run(60, *choices)
    assert world.num_right == world.num_proposed > 60
    # Each computes by itself what the first had not computed when it began.
    chunks = sum(sum(of_pass) for of_pass in world.model.passes if max(of_pass) > 6)
    assert chunks < 90, "by themselves 123"
    again = sequence([*prompt, 5, 6], keyed=True)
    before = len(world.model.passes)
    world.run(10, again)
    assert max(max(of_pass) for of_pass in world.model.passes[before:]) <= 12, "the prompt is there"


def test_pages_that_are_short_go_to_those_who_come_first() -> None:
    world = World(num_pages=16)  # 64 tokens
    first, second = sequence(list(range(20))), sequence(list(range(1, 25)))
    world.run(20, first, second)
    assert world.num_right == world.num_proposed > 0
    before = world.num_proposed
    world.run(12, first, second)
    assert world.num_proposed > before, "the second one gave way"
    assert world.pool.counts().used <= 16
    world.step(second)
    world.run(4, second)
    world.step()
    assert world.pool.counts().used == 0


def test_what_does_not_fit_is_left_alone() -> None:
    world, text = World(num_pages=4), sequence(list(range(20)))
    world.run(30, text)
    assert not world.model.passes
    small = World(max_context=30)
    text = sequence(list(range(5)))
    small.run(60, text)
    assert small.num_right == small.num_proposed > 10
    assert max(len(context) for context in small.model.contexts) < 30
    assert small.pool.counts().used == 0, "it will not propose again"
    strange = World(vocab_size=30)
    strange.run(60, sequence(list(range(5))))
    assert all(max(context) < 30 for context in strange.model.contexts)


def test_without_a_step_between_the_same_is_proposed_again() -> None:
    """No page could be had for the step, say."""
    world, text = World(), sequence([1, 2, 3])
    world.run(12, text)
    world.guesses.plan([text])
    first = text.guesses
    world.guesses.plan([text])
    assert text.guesses == first != ()
    world.run(20, text)
    assert world.num_right == world.num_proposed


def test_ends_are_not_proposed() -> None:
    world, text = World(), sequence([1, 2, 3])
    text.params = SamplingParams(max_tokens=1000, stop_token_ids=tuple(range(0, VOCAB, 2)))
    world.run(100, text)
    assert world.num_proposed
    assert world.num_right == world.num_proposed
    assert not any(token % 2 == 0 for token in text.guesses)


@pytest.mark.long
def test_a_prompt_is_read_when_that_would_have_paid() -> None:
    """A pass takes a quarter of a step, and the prompt as long as 40 steps."""
    world = World(step_s=1.0, pass_s=0.24, token_s=0.02)
    warm = sequence([1, 2, 3])
    world.run(60, warm)
    for num_tokens in (3, 20, 55):
        before = len(world.model.passes)
        world.run(num_tokens, sequence([token % VOCAB for token in range(2000)]))
        # At first it is not known yet how long prompts take.
        chunks = [sum(of_pass) for of_pass in world.model.passes[before:]]
        assert len(chunks) <= 3, num_tokens
        assert set(chunks) <= {24}
    text = sequence([token % VOCAB for token in range(2000)])
    began_s, before = world.clock.now(), len(world.model.passes)
    world.run(1000, text)
    took_s = world.clock.now() - began_s
    assert took_s < 700, "a step a token would take 1000"
    chunks = [sum(of_pass) for of_pass in world.model.passes[before:] if sum(of_pass) > 12]
    assert sum(chunks) >= 1980
    assert max(chunks) * 0.02 <= 0.5, "no step begins later than by half of one"


def test_no_prompt_is_read_for_an_output_that_must_end_soon() -> None:
    world = World(step_s=1.0, pass_s=0.24, token_s=0.02)
    world.run(60, sequence([1, 2, 3]))
    for _ in range(3):
        world.run(60, sequence([token % VOCAB for token in range(40)]))
    before = len(world.model.passes)
    short = sequence([token % VOCAB for token in range(2000)], num_output=500, max_tokens=540)
    world.run(39, short)
    assert len(world.model.passes) == before


@pytest.mark.parametrize("pass_s", [1.0, 0.9])
def test_a_draft_as_slow_as_the_steps_proposes_nothing(pass_s: float) -> None:
    world = World(step_s=1.0, pass_s=pass_s)
    world.run(20, sequence([1, 2, 3]))
    began_s, before = world.clock.now(), world.num_proposed
    num_passes = len(world.model.passes)
    world.run(500, sequence([1, 2, 4]))
    took_s = world.clock.now() - began_s
    if pass_s == 1.0:
        assert world.num_proposed - before < 40
        assert took_s < 500 * 1.02 + 20 * pass_s * (1 + 500 / 60)
    assert len(world.model.passes) - num_passes < 500


def test_a_draft_that_is_always_wrong_costs_next_to_nothing() -> None:
    world = World(step_s=0.01, pass_s=0.001, is_right=lambda _: False)
    world.run(50, sequence([1, 2, 3]))
    for _ in range(3):
        began_s = world.clock.now()
        world.run(500, sequence([1, 2, 4]))
        assert world.clock.now() - began_s < 5.0 * 1.02
    assert not world.num_right


@pytest.mark.parametrize("kind", ["nothing", "an end"])
def test_a_draft_that_says_nothing_is_asked_seldom(kind: str) -> None:
    """It gives no numbers, or ends a text that goes on."""
    world = World(step_s=0.01, pass_s=0.001)
    world.drafts._compute = lambda inputs: [None if kind == "nothing" else EOS for _ in inputs]
    world.run(50, sequence([1, 2, 3]))
    before = world.drafts._num_plans, world.clock.now()
    text = sequence([1, 2, 4])
    num_passes = 0

    def compute(inputs: SeqOf[DraftInput]) -> list[int | None]:
        nonlocal num_passes
        num_passes += 1
        world.clock.advance(0.001)
        return [None if kind == "nothing" else EOS for _ in inputs]

    world.drafts._compute = compute
    world.run(500, text)
    assert world.drafts._num_plans - before[0] == 500
    assert 0 < num_passes < 100
    assert not world.num_proposed


def test_texts_that_follow_a_grammar_say_nothing_of_others() -> None:
    world = World(step_s=0.01, pass_s=0.001, is_right=lambda _: False)
    text = sequence([1, 2, 3])
    text.params = SamplingParams(max_tokens=1000, grammar="any")
    world.run(300, text)
    world.model.is_right = lambda _: True
    before = world.num_steps
    world.run(60, sequence([4, 5, 6]))
    assert world.num_steps - before < 30
    before = world.num_steps
    world.run(30, text)
    assert world.num_steps - before > 20


def test_a_draft_that_is_right_again_is_heard_again() -> None:
    is_good = False
    world = World(step_s=0.01, pass_s=0.001, is_right=lambda _: is_good)
    text = sequence([1, 2, 3])
    world.run(300, text)
    is_good = True
    world.run(200, text)
    before = world.num_steps
    world.run(200, text)
    assert world.num_steps - before < 100


def test_times_are_learnt_from_a_few_and_forgotten() -> None:
    timing = Timing()
    for now_s, seconds in enumerate((9.0, 1.0)):
        timing.learn(seconds, now_s)
        assert timing.at(now_s) is None
    timing.learn(2.0, 2.0)
    assert timing.at(2.0) == 1.0, "the machine did something else the first time"
    for now_s in range(3, 12):
        timing.learn(4.0, now_s)
    assert timing.at(12.0) == 4.0
    assert timing.at(70.0) == 4.0
    assert timing.at(71.0) is None
    timing.learn(5.0, 71.0)
    assert timing.at(71.0) is None


def test_one_that_is_not_right_does_not_hold_up_many() -> None:
    """Eleven wait for each pass: a proposal for one of them is worth less than a pass takes."""
    world = World(step_s=1.0, pass_s=0.2)
    world.run(40, sequence([1, 2, 3]))
    running = [sequence([token]) for token in range(11)]
    before = len(world.model.passes)
    world.run(20, *running)
    assert len(world.model.passes) - before < 10


def test_a_draft_that_fails_is_done_without_and_is_asked_no_more_in_the_end(caplog: pytest.LogCaptureFixture) -> None:
    world, text = World(), sequence([1, 2, 3])
    world.run(20, text)

    def broken(_: SeqOf[DraftInput]) -> list[int | None]:
        raise RuntimeError("no memory")

    works = world.drafts._compute
    world.drafts._compute, world.may_fail = broken, True
    for _ in range(2):
        world.step(text)
        assert text.guesses == ()
    world.drafts._compute = works
    world.run(20, text)
    assert text.token_ids[-1] == rule(text.token_ids[:-1])
    world.drafts._compute = broken
    for _ in range(3):
        world.step(text)
    assert "none is asked any more" in caplog.text
    world.drafts._compute = works
    num_passes = len(world.model.passes)
    world.run(20, text)
    assert len(world.model.passes) == num_passes
    assert text.token_ids[-1] == rule(text.token_ids[:-1])
    assert world.pool.counts().used == 0


def test_what_is_beyond_the_drafts_own_vocabulary_is_not_proposed() -> None:
    """A request may allow none but such tokens; the draft could not read them at the next place."""
    world, text = World(vocab_size=50), sequence([1, 2, 3])
    world.run(10, text)

    def beyond(inputs: SeqOf[DraftInput]) -> list[int | None]:
        return [60 for _ in inputs]

    world.drafts._compute = beyond
    world.run(10, text)
    assert not world.drafts._num_failed
    assert all(guess < 50 for guess in text.guesses)
