"""Handoffs between a real prefill and a real decode worker, plain processes both; raw writes of the same extents."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.parts.pair import Handoff, PairSession
from benchmarks.parts.processes import Processes, WorkerOptions, start_workers, threads_of_each
from tandem.bench.load.workload import DEFAULT_VOCABULARY
from tandem.core.errors import TransportError
from tandem.rpc.v1 import common_pb2 as pb

Tell = Callable[[str], None]


@dataclass(frozen=True)
class HandoffSizes:
    """How much is asked; lengths in tokens.

    Attributes:
        num_prompts, prompt: handoffs of long prompts, one at a time.
        num_raw: raw writes of one prompt's extents.
        num_admissions, short_prompt: handoffs beside `num_running` generations, one after the other.
        running_tokens: of each generation; a new one begins when it ends.
        kv_bytes: of each worker's arena.
    """

    num_prompts: int = 7
    prompt: int = 2048
    num_raw: int = 21
    num_admissions: int = 200
    short_prompt: int = 64
    num_running: int = 8
    running_tokens: int = 512
    kv_bytes: int = 512 << 20


@dataclass(frozen=True)
class Transfers:
    """Of long prompts, one at a time.

    Attributes:
        exposed_s: end of the prompt's computation to verified pages at decode, pages having been sent while it was
            computed.
        handoff_s: first post to verified pages at decode, when all pages were there before the first post.
        exposed_answer_s, handoff_answer_s: of the same handoffs, from there to the acknowledgement.
        compute_s: first chunk to last logits, of the first kind.
        num_bytes: of one prompt's pages.
        num_descriptors: of one handoff of the second kind.
        raw_s: one write of the same extents, without digests, between two processes that do nothing else.
        raw_descriptors: of one raw write.
    """

    exposed_s: list[float]
    handoff_s: list[float]
    exposed_answer_s: list[float]
    handoff_answer_s: list[float]
    compute_s: list[float]
    num_bytes: int
    num_descriptors: int
    raw_s: list[float]
    raw_descriptors: int


@dataclass(frozen=True)
class Admissions:
    """Of handoffs beside running generations; seconds.

    Attributes:
        admission_s: the commit's arrival at decode to the request's place in the batch.
        step_s: from one step's tokens to the next one's, as they arrive here.
    """

    admission_s: list[float]
    step_s: list[float]


async def measure_handoffs(
    directory: Path,
    model_dir: Path,
    transport: str,
    sizes: HandoffSizes,
    tell: Tell,
    *,
    with_transfers: bool = True,
    with_admissions: bool = True,
) -> tuple[Transfers | None, Admissions | None]:
    """Of one pair of workers that share the cores; `None` for what is not wanted.

    Raises:
        TandemError: what a worker says went wrong, or that it ended.
    """
    transfers = admissions = None
    options = WorkerOptions(model_dir, transport, threads_of_each(), sizes.kv_bytes)
    async with Processes(directory) as processes:
        tell("two workers start")
        prefill, decode = await start_workers(processes, options)
        async with PairSession(prefill.facts["address"], decode.facts["address"]) as session:
            info = await session.decode_info
            # First: in pools that nothing has scattered, pages are neighbours.
            overlapped, ready = await _hand_off_long(session, info, sizes, tell) if with_transfers else ([], [])
            if with_admissions:
                admissions = await _measure_admissions(session, sizes, tell)
    if with_transfers:
        tell(f"{sizes.num_raw} raw writes")
        raw = await _write_raw(directory, transport, info, ready[-1], sizes.num_raw)
        overlapped, ready = _of_known_end(overlapped), _of_known_end(ready)
        transfers = Transfers(
            exposed_s=[_done(handoff).exposed_s - _done(handoff).answer_s for handoff in overlapped],
            handoff_s=[_done(handoff).handoff_s - _done(handoff).answer_s for handoff in ready],
            exposed_answer_s=[_done(handoff).answer_s for handoff in overlapped],
            handoff_answer_s=[_done(handoff).answer_s for handoff in ready],
            compute_s=[_done(handoff).compute_s for handoff in overlapped],
            num_bytes=_done(ready[-1]).num_bytes,
            num_descriptors=_done(ready[-1]).num_descriptors,
            raw_s=raw["seconds"],
            raw_descriptors=raw["num_descriptors"],
        )
    return transfers, admissions


# --- transfers --------------------------------------------------------------------------------------------------------


async def _hand_off_long(
    session: PairSession, info: pb.WorkerInfo, sizes: HandoffSizes, tell: Tell
) -> tuple[list[Handoff], list[Handoff]]:
    """Long prompts, handed off while they are computed, and again when all is computed.

    All into pages that have been used before, as those of the raw writes: a page's first use makes the operating system
    clear memory beside what is measured. Prefill keeps a prefix cache: the second handoff of a prompt computes its last
    page only, and gets its grant when that is done.
    """
    draw = random.Random(1)
    num_first = -(-info.num_pages * info.layout.page_size // sizes.prompt)
    for number in range(num_first):
        tell(f"prompt {number + 1} of {num_first}: through all pages once")
        await _hand_off(session, _prompt(draw, sizes.prompt))
    prompts = [_prompt(draw, sizes.prompt) for _ in range(1 + sizes.num_prompts)]  # the first does not count
    overlapped, ready = [], []
    for number, prompt in enumerate(prompts):
        tell(f"prompt {number} of {sizes.num_prompts}: handed off while it is computed")
        overlapped.append(await _hand_off(session, prompt))
    tell(f"{sizes.num_prompts} handoffs of computed prompts")
    for prompt in prompts:
        ready.append(await _hand_off_computed(session, prompt))
    return overlapped[1:], ready[1:]


async def _hand_off(session: PairSession, prompt: Sequence[int], num_tokens: int = 2) -> Handoff:
    handoff = await session.begin(prompt, num_tokens)
    await session.finish(handoff)
    return handoff


async def _hand_off_computed(session: PairSession, prompt: Sequence[int]) -> Handoff:
    """The grant is given to prefill when every page is computed."""
    handoff = await session.begin(prompt, num_tokens=2, attaches_at_once=False)
    await session.until(handoff, lambda h: h.has_first_token and h.grant is not None)
    await session.attach(handoff)
    await session.finish(handoff)
    return handoff


async def _write_raw(
    directory: Path, transport: str, info: pb.WorkerInfo, handoff: Handoff, num_runs: int
) -> dict[str, Any]:
    """In two processes of their own, the extents of `handoff`, to the same pages."""
    assert handoff.grant is not None
    layout = info.layout
    spec = {
        "transport": transport,
        "layout": {
            "num_layers": layout.num_layers,
            "num_kv_heads": layout.num_kv_heads,
            "head_dim": layout.head_dim,
            "page_size": layout.page_size,
            "dtype": layout.dtype,
        },
        "num_pages": info.num_pages,
        "remote_pages": list(handoff.grant.pages),
        "num_runs": num_runs,
    }
    async with Processes(directory) as processes:
        return (await (await processes.start("raw", "benchmarks.parts.wire", json.dumps(spec))).ready()).facts


def _of_known_end(handoffs: Sequence[Handoff]) -> list[Handoff]:
    """Those of which decode said when it had verified them: a repeated commit is answered without.

    Raises:
        TransportError: it said so of none.
    """
    known = [handoff for handoff in handoffs if _done(handoff).answer_s > 0]
    if not known:
        raise TransportError("of no handoff it is known when its pages were verified")
    return known


def _done(handoff: Handoff) -> Any:
    assert handoff.done is not None
    return handoff.done


# --- admissions -------------------------------------------------------------------------------------------------------


async def _measure_admissions(session: PairSession, sizes: HandoffSizes, tell: Tell) -> Admissions:
    """Hand off short prompts, one after the other, while others are being generated."""
    draw = random.Random(2)
    tell(f"{sizes.num_running} generations begin")
    running = [
        asyncio.create_task(_generate(session, _prompt(draw, sizes.short_prompt), sizes.running_tokens))
        for _ in range(sizes.num_running)
    ]
    measuring = asyncio.create_task(_admit_all(session, draw, sizes, tell))
    try:
        await asyncio.wait([measuring, *running], return_when=asyncio.FIRST_COMPLETED)
        for generation in running:
            if generation.done():
                generation.result()  # it goes on for ever: this raises why it did not
        return await measuring
    finally:
        for task in (measuring, *running):
            task.cancel()
        await asyncio.gather(measuring, *running, return_exceptions=True)
        await session.cancel_all()


async def _admit_all(session: PairSession, draw: random.Random, sizes: HandoffSizes, tell: Tell) -> Admissions:
    for _ in range(sizes.num_running):  # until all generations have come in
        await _hand_off(session, _prompt(draw, sizes.short_prompt))
    session.step_s.clear()
    admissions = []
    tell(f"{sizes.num_admissions} handoffs beside them")
    for _ in range(sizes.num_admissions):
        handoff = await _hand_off(session, _prompt(draw, sizes.short_prompt))
        assert handoff.admission_s is not None
        admissions.append(handoff.admission_s)
    return Admissions(admissions, [later - earlier for earlier, later in pairwise(session.step_s)])


async def _generate(session: PairSession, prompt: Sequence[int], num_tokens: int) -> None:
    """One generation after the other, until cancelled."""
    while True:
        await _hand_off(session, prompt, num_tokens)


def _prompt(draw: random.Random, length: int) -> list[int]:
    """Random plain tokens: no two prompts share a prefix page."""
    return draw.choices(DEFAULT_VOCABULARY, k=length)
