"""Decode steps without their computation: scheduling, laying out, booking, by the code of a decode worker."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from decode_worker.job import DecodeJob
from kvtransfer.protocol.messages import AttemptKey
from tandem.core.page_keys import PageKeys
from tandem.core.pages import PagePool, next_page_keys, pages_for
from tandem.core.sampling import SamplingParams
from tandem.core.token_ids import TokenIds, token_ids
from tandem.engine.batch import build_batch, check_sequence
from tandem.engine.block_tables import BlockTables
from tandem.engine.layout import KVLayout
from tandem.worker.batch import Batch, SchedulerLimits
from tandem.worker.runner import inputs_of
from tandem.worker.scheduler import BatchScheduler

PAGE_SIZE = 32
_LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, page_size=PAGE_SIZE, dtype="float32")
_VOCAB = 128_256
_SALT = b"measured"
_CPU = torch.device("cpu")
_ROOM = 1024  # tokens that each sequence may generate
_STRIDE = 7919  # between tokens that follow each other: a text has many different ones


class Steps:
    """A decode worker's batch, for `num_sequences` handoffs of about `context` tokens.

    Their lengths differ, so that about as many pages fill in each step as in any other.
    """

    def __init__(self, num_sequences: int, context: int) -> None:
        self._num_sequences = num_sequences
        self._context = context
        self._max_context = context + _ROOM
        pool = PagePool(num_sequences * pages_for(self._max_context, PAGE_SIZE), PAGE_SIZE)
        limits = SchedulerLimits(num_sequences, max(2048, num_sequences), 512, num_sequences)
        self._scheduler = BatchScheduler(pool, limits, salt=_SALT)
        self._tables = BlockTables(pages_for(self._max_context, PAGE_SIZE), pool.num_pages, device=_CPU)
        self._sampled = [[7]] * num_sequences

    @property
    def num_pages_written(self) -> int:
        """Of block tables, so far."""
        return self._tables.num_written

    def admit(self) -> None:
        """All handoffs come."""
        pool = self._scheduler.pool
        text = token_ids(_STRIDE * place % _VOCAB for place in range(self._context))
        for number in range(self._num_sequences):
            prompt = text[: self._context - number % PAGE_SIZE]
            prompt[0] = number
            job = _job(number, prompt)
            pages = pool.allocate(pages_for(job.num_tokens, PAGE_SIZE))
            assert pages is not None
            self._scheduler.enter(job.begin_choice(self._scheduler.groups, 0, [7], pages, 0))

    def settle(self) -> None:
        """What came with the handoffs is in the prefix cache, as it is after some steps: each adds a part of it."""
        for sequence in self._scheduler.running:
            self._scheduler.publish_computed(sequence)

    def run(self) -> None:
        """One step; each sequence gets a token."""
        batch = self._scheduler.schedule()
        self._lay_out(batch)
        self._scheduler.apply(batch, self._sampled)

    def _lay_out(self, batch: Batch) -> None:
        inputs = inputs_of(batch)
        for sequence in inputs:
            check_sequence(sequence, _LAYOUT, _VOCAB, self._max_context)
        build_batch(inputs, PAGE_SIZE, _CPU, self._tables)

    def times_s(self, num_steps: int, clock: Callable[[], float] = time.thread_time) -> list[float]:
        """Of each of the next steps."""
        found = []
        for _ in range(num_steps):
            began_s = clock()
            self.run()
            found.append(clock() - began_s)
        return found

    def times_between_s(self, num_steps: int, clock: Callable[[], float] = time.thread_time) -> list[float]:
        """Of the next steps, each planned while the one before it is computed: what is left to do between the two."""
        found = []
        batch = self._scheduler.schedule()
        self._lay_out(batch)
        for _ in range(num_steps):
            behind = self._scheduler.schedule_behind(batch)  # while `batch` is computed
            assert behind is not None
            began_s = clock()
            self._scheduler.apply(batch, self._sampled)
            self._scheduler.join(behind)
            self._lay_out(behind)
            found.append(clock() - began_s)
            batch = behind
        self._scheduler.apply(batch, self._sampled)
        return found


def _job(number: int, prompt: TokenIds[int]) -> DecodeJob:
    return DecodeJob(
        key=AttemptKey(f"r{number}", 1),
        turn=0.0,
        tpot_s=math.inf,
        own_turn=0.0,
        arrival=number,
        num_tokens=len(prompt),
        num_running=1,
        page_keys=PageKeys(next_page_keys(prompt, PAGE_SIZE, _SALT)),
        session=0,
        prompt_ids=prompt,
        params=SamplingParams(max_tokens=_ROOM),
        num_choices=1,
        going_on=[0],
        journal={},
    )
