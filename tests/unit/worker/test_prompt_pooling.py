"""Vectors of prompts: each token that counts is taken once, however the prompt is computed, cached or preempted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtransfer.protocol.messages import AttemptKey
from tandem.core.errors import InvalidRequestError
from tandem.core.pages import PagePool
from tandem.core.pooling import Pooling, PoolingKind, PoolingTask
from tandem.core.sampling import SamplingParams
from tandem.core.token_ids import token_ids
from tandem.worker.batch import SchedulerLimits
from tandem.worker.prompt_pooling import PromptPooling
from tandem.worker.request import AttemptSpec, RequestLimits
from tandem.worker.scheduler import BatchScheduler
from tandem.worker.sequence import Sequence
from tandem.worker.validate import validate

PAGE, CHUNK = 4, 16


def scheduler_of(num_pages: int = 64, *, seqs: int = 8, tokens: int = 64) -> BatchScheduler:
    return BatchScheduler(PagePool(num_pages, PAGE), SchedulerLimits(seqs, tokens, CHUNK, 100), salt=b"m")


def prompt(name: str, num_tokens: int, kind: PoolingKind, *, arrival: int = 0, first: int = 0) -> Sequence:
    return Sequence(
        request_id=name,
        attempt=1,
        choice=0,
        turn=0.0,
        arrival=arrival,
        token_ids=token_ids(first + i for i in range(num_tokens)),
        num_prompt=num_tokens,
        params=SamplingParams(),
        samples=False,
        pooling=PromptPooling(kind),
    )


def sum_rows(rows: Any, total: Any) -> Any:
    return rows.sum(axis=0) + (0 if total is None else total)


def step(scheduler: BatchScheduler) -> None:
    """Compute a step by a model whose hidden state of a token is [its id, 1]: the second number counts the tokens."""
    batch = scheduler.schedule()
    for item in batch.items:
        sequence, end = item.sequence, item.start + item.num_tokens
        ids = sequence.token_ids[end - item.num_logits : end]
        rows = np.array([[token_id, 1] for token_id in ids]).reshape(-1, 2)[: len(item.pooled)]
        assert sequence.pooling is not None
        sequence.pooling.take(rows, end, sequence.num_prompt, sum_rows)
    scheduler.apply(batch, [])


def check(sequence: Sequence) -> None:
    ids = sequence.token_ids
    assert sequence.pooling is not None
    wanted = {PoolingKind.LAST: [ids[-1], 1], PoolingKind.CLS: [ids[0], 1], PoolingKind.MEAN: [sum(ids), len(ids)]}
    assert sequence.pooling.total.tolist() == wanted[sequence.pooling.kind]


@pytest.mark.parametrize("kind", list(PoolingKind))
@settings(max_examples=60, deadline=None)
@example(lengths=[40, 40], tokens=16, preempted_after=0)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    tokens=st.integers(CHUNK, 40),
    preempted_after=st.integers(0, 3),
)
def test_each_token_that_counts_is_taken_once(
    kind: PoolingKind, lengths: list[int], tokens: int, preempted_after: int
) -> None:
    """Prompts begin alike, so that later ones find pages in the cache; one loses its pages on the way."""
    scheduler = scheduler_of(tokens=tokens)
    sequences = [prompt(f"r{n}", length, kind, arrival=n) for n, length in enumerate(lengths)]
    for sequence in sequences:
        scheduler.add(sequence)
    for number in range(60):
        step(scheduler)
        for sequence in [s for s in scheduler.running if not s.num_to_compute]:
            scheduler.pool.release(scheduler.remove(sequence))
        if number == preempted_after and scheduler.running:
            lost = scheduler.running[-1]
            scheduler.pool.release(scheduler.remove(lost))
            scheduler.pool.discard(lost.keys)
            lost.num_computed = lost.num_published = 0
            scheduler.add(lost)
    assert not scheduler.running
    assert not scheduler.waiting
    for sequence in sequences:
        check(sequence)
    assert scheduler.pool.counts().used == 0


@pytest.mark.parametrize(("kind", "num_cached"), [(PoolingKind.LAST, 36), (PoolingKind.CLS, 0), (PoolingKind.MEAN, 0)])
def test_only_the_last_token_s_vector_has_use_for_a_cached_prefix(kind: PoolingKind, num_cached: int) -> None:
    scheduler = scheduler_of()
    for number in range(2):
        sequence = prompt(f"r{number}", 40, kind)
        scheduler.add(sequence)
        while sequence.num_to_compute:
            step(scheduler)
        check(sequence)
        scheduler.pool.release(scheduler.remove(sequence))
    assert sequence.num_cached == num_cached


def test_a_worker_takes_only_what_its_model_does() -> None:
    def spec(num_tokens: int, *, pools: bool) -> AttemptSpec:
        return AttemptSpec(AttemptKey("r", 1), 0, (1,) * num_tokens, SamplingParams(), pools=pools)

    pooling = RequestLimits(10, 8, frozenset(), 1, pooling=Pooling(PoolingTask.EMBED, PoolingKind.LAST))
    generating = RequestLimits(10, 8, frozenset(), 1)
    validate(spec(8, pools=True), pooling)  # a prompt may fill the context: no token of output need fit
    validate(spec(7, pools=False), generating)
    for wrong, limits, words in (
        (spec(9, pools=True), pooling, "must have 1 to 8"),
        (spec(8, pools=False), generating, "must have 1 to 7"),
        (spec(2, pools=False), pooling, "model pools; the request generates"),
        (spec(2, pools=True), generating, "model generates; the request pools"),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            validate(wrong, limits)
