"""Log-probabilities of prompts: each token's once, from the rows that tell it, however the prompt is computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.core.pages import PagePool
from tandem.core.prompt_scores import TokenScore
from tandem.core.sampling import SamplingParams
from tandem.core.token_ids import token_ids
from tandem.worker.batch import Batch, ScheduledSequence, SchedulerLimits
from tandem.worker.prompt_scoring import PromptScoring, take_scores
from tandem.worker.scheduler import BatchScheduler
from tandem.worker.sequence import Sequence

PAGE, CHUNK = 4, 16


def scheduler_of(num_pages: int = 64, *, seqs: int = 8, tokens: int = 64) -> BatchScheduler:
    return BatchScheduler(PagePool(num_pages, PAGE), SchedulerLimits(seqs, tokens, CHUNK, 100), salt=b"m")


def prompt(
    name: str, num_tokens: int, *, arrival: int = 0, first: int = 0, known: int | None = 1, salt: str = ""
) -> Sequence:
    """`known`: leading tokens whose log-probabilities are there; `None`: they are not wanted."""
    return Sequence(
        request_id=name,
        attempt=1,
        choice=0,
        turn=0.0,
        arrival=arrival,
        token_ids=token_ids(first + i for i in range(num_tokens)),
        num_prompt=num_tokens,
        params=SamplingParams(),
        scoring=None if known is None else PromptScoring(0, known),
        cache_salt=salt,
    )


class Model:
    """A row is the token after which it comes; a token is scored with its row, so that it shows whose it is."""

    def __init__(self, scheduler: BatchScheduler) -> None:
        self.scheduler = scheduler
        self.told: dict[str, dict[int, float]] = {}

    def step(self) -> Batch:
        batch = self.scheduler.schedule()
        rows: list[int] = []
        for item in batch.items:
            end = item.start + item.num_tokens
            rows += item.sequence.token_ids[end - item.num_logits : end]
        logits = np.array(rows, dtype=np.int64)
        if batch.num_scored_tokens:
            logits = take_scores(batch.items, logits, self._score, self._scored)
        expected = [item.sequence.token_ids[item.start + item.num_tokens - 1] for item in batch.items if item.samples]
        assert logits.tolist() == expected, "what is sampled from is the row of the newest token"
        self.scheduler.apply(batch, [[7]] * len(expected))
        return batch

    def _score(self, rows: Any, token_ids: Any, _: int) -> list[TokenScore]:
        assert len(rows) == len(token_ids)
        return [TokenScore(float(row), token_id) for row, token_id in zip(rows.tolist(), token_ids, strict=True)]

    def _scored(self, item: ScheduledSequence, first: int, tokens: Any) -> None:
        sequence = item.sequence
        known = self.told.setdefault(sequence.request_id, {})
        for index, token in enumerate(tokens, first):
            assert index not in known, "told twice"
            assert token.rank == sequence.token_ids[index]
            known[index] = token.logprob
        assert sequence.scoring is not None
        sequence.scoring.num_known = first + len(tokens)

    def check(self, sequence: Sequence, first: int = 1) -> None:
        """Each token that was not known before came with the row of the token before it."""
        before = {index: float(sequence.token_ids[index - 1]) for index in range(first, sequence.num_prompt)}
        assert self.told.get(sequence.request_id, {}) == before


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 90), st.booleans()), min_size=1, max_size=6),
    num_pages=st.integers(23, 60),
    tokens=st.integers(8, 64),
)
def test_each_token_is_told_once_whatever_shares_the_steps_and_is_preempted(
    sizes: list[tuple[int, bool]], num_pages: int, tokens: int
) -> None:
    scheduler = scheduler_of(num_pages, tokens=tokens)
    model = Model(scheduler)
    prompts = [
        prompt(f"p{n}", size, arrival=n, first=100 * n, known=1 if is_scored else None)
        for n, (size, is_scored) in enumerate(sizes)
    ]
    for sequence in prompts:
        scheduler.add(sequence)
    while scheduler.running or scheduler.waiting:
        batch = model.step()
        assert batch.items
        assert batch.num_scored_tokens <= CHUNK, "no more logits at a time than a chunk has"
        for sequence in [s for s in scheduler.running if s.num_output]:
            scheduler.pool.release(scheduler.remove(sequence))
        if batch.items[0].start and len(scheduler.running) > 1:  # something more urgent takes its pages
            scheduler._preempt(batch, scheduler.running[-1])
    for sequence in prompts:
        if sequence.scoring is not None:
            model.check(sequence)
    scheduler.pool.check()


def computed(scheduler: BatchScheduler, sequence: Sequence) -> tuple[Model, int]:
    """The sequence is computed; the model, and how many tokens the cache had of it."""
    model = Model(scheduler)
    scheduler.add(sequence)
    while not sequence.num_output:
        model.step()
    scheduler.pool.release(scheduler.remove(sequence))
    return model, sequence.num_cached


def test_a_cached_prefix_is_computed_again_as_far_as_its_log_probabilities_are_wanted() -> None:
    scheduler = scheduler_of()
    computed(scheduler, prompt("a", 40, known=None))
    assert computed(scheduler, prompt("plain", 40, known=None))[1] == 36
    for known, num_cached in ((1, 0), (4, 0), (5, 4), (20, 16), (39, 36), (40, 36)):
        sequence = prompt(f"known-{known}", 40, known=known)
        model, cached = computed(scheduler, sequence)
        assert cached == num_cached
        model.check(sequence, first=known)


def test_a_prompt_of_one_token_has_nothing_to_tell() -> None:
    sequence = prompt("a", 1)
    model, _ = computed(scheduler_of(), sequence)
    assert model.told == {}
    assert not sequence.is_to_score


def test_prefixes_are_shared_under_one_salt_alone() -> None:
    scheduler = scheduler_of()
    for salt, num_cached in (("", 0), ("mine", 0), ("yours", 0), ("mine", 36), ("yours", 36), ("", 36)):
        assert computed(scheduler, prompt(f"{salt}-{num_cached}", 40, known=None, salt=salt))[1] == num_cached
