"""Measures the turns of a comparison, one server at a time."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.code import PACKAGES, Code
from benchmarks.peers.idle import Idleness, answered
from benchmarks.peers.servers import Contestant, Place, command_line
from benchmarks.peers.turns import ANSWERS, Load, Measured, Plan, SearchedLoad, Turn, seed_of, turns
from tandem.bench.goodput import search_goodput
from tandem.bench.load.http_client import LoadClient, get
from tandem.bench.load.trace_entry import TraceEntry
from tandem.bench.load.workload import fixed_lengths, make_jobs
from tandem.bench.machine import now
from tandem.bench.other_load import OtherLoad
from tandem.bench.report.progress import shown
from tandem.bench.report.results import Run
from tandem.bench.server import connected
from tandem.bench.server_process import Command, running
from tandem.bench.session import Session, Shape, Target, Workload
from tandem.core.errors import TandemError

#: Tandem's count of prompt tokens by the role that computed them; metrics of others have no such name.
_COUNTER = re.compile(rb'^tandem_prompt_tokens_computed_total\{role="(\w+)"\} (\S+)$', re.MULTILINE)
_OK = 200
#: Workers report their counts some times a second: when two readings this far apart agree, all have.
_BETWEEN_READINGS_S = 1.0
_SETTLE_S = 30.0
_ANSWER_S = 300.0
_QUIET_S = 2.0  # for how long it is measured what others do before a turn


@dataclass(frozen=True)
class Comparison:
    """Everything that a comparison needs."""

    plan: Plan
    place: Place
    contestants: Sequence[Contestant]
    vocabulary: Sequence[int]
    trace: Sequence[TraceEntry]  # of the search for goodput
    measured: Measured
    console: Console
    code: Code  # of Tandem, when the comparison began
    packages: Path = PACKAGES  # where that code is


async def compare(comparison: Comparison) -> int:
    """Do what is left to do; how many requests failed in that.

    Raises:
        TandemError: a server did not start, or answered its warm-up wrongly, or Tandem's sources changed meanwhile;
            what was measured stays in the file.
        KeyboardInterrupt: SIGINT came.
    """
    measured, plan = comparison.measured, comparison.plan
    by_name = {contestant.name: contestant for contestant in comparison.contestants}
    left = list(turns(plan, measured.done, measured.done_goodput))
    num_failed = 0
    for number, turn in enumerate(left, 1):
        comparison.console.print(f"turn {number} of {len(left)}: {turn.contestant}", highlight=False)
        num_failed += await _while_it_runs([(comparison, turn)], by_name[turn.contestant])
    return num_failed


async def compare_together(comparisons: Sequence[Comparison]) -> int:
    """Do what is left of some with the same servers, model and place; each server is started once for all of them, in
    the order of the first one. How many requests failed. Raises as `compare`."""
    first = comparisons[0]
    by_name = {contestant.name: contestant for contestant in first.contestants}
    left = [(each, turn) for each in comparisons for turn in turns(each.plan, each.measured.done)]
    num_failed = 0
    for name in first.plan.contestants:
        if parts := [(each, turn) for each, turn in left if turn.contestant == name]:
            first.console.print(f"{name}: {len(parts)} of {len(comparisons)} to measure", highlight=False)
            num_failed += await _while_it_runs(parts, by_name[name])
    return num_failed


async def _while_it_runs(parts: Sequence[tuple[Comparison, Turn]], contestant: Contestant) -> int:
    """Start a server, and do what it is started for; how many requests failed."""
    first, turn = parts[0]
    searched = first.plan.searched(turn)
    told = None if searched is None else searched.told
    place = replace(first.place, directory=first.place.directory / contestant.name, told=told)
    place.directory.mkdir(parents=True, exist_ok=True)
    commands = contestant.commands(place)
    about = await _about(first, contestant, commands, place)
    async with running(commands, place.directory):
        return sum([await _one_turn(comparison, turn, contestant, about) for comparison, turn in parts])


async def _one_turn(comparison: Comparison, turn: Turn, contestant: Contestant, about: dict[str, Any]) -> int:
    measured, plan = comparison.measured, comparison.plan
    num_failed = 0
    if plan.has_answers and turn.contestant not in measured.done_answers:
        measured.add_answers({**about, "answers": await _answers(comparison)})
    for load in turn.loads:
        run = await _run_load(comparison, load, seed_of(plan, load.name, turn.repetition))
        num_failed += sum(run["figures"]["num_failed"].values())
        measured.add_run({**about, "load": load.name, "repetition": turn.repetition, **run})
    if (searched := plan.searched(turn)) is not None:
        search = await _search(comparison, searched, contestant.num_workers)
        measured.add_goodput({**about, **search})
    return num_failed


async def _about(
    comparison: Comparison, contestant: Contestant, commands: Sequence[Command], place: Place
) -> dict[str, Any]:
    """Who is measured in a turn, with which code and commands, and how many cores others used just before.

    Raises:
        TandemError: Tandem's sources are no longer those with which the comparison began.
    """
    if not contestant.is_peer and Code.of(comparison.packages).digest != comparison.code.digest:
        raise TandemError("Tandem's sources changed since the comparison began: start it again to measure Tandem anew")
    others = OtherLoad()
    await asyncio.sleep(_QUIET_S)
    return {
        "contestant": contestant.name,
        "code": None if contestant.is_peer else comparison.code.as_json(),
        "commands": [command_line(command, place) for command in commands],
        "other_cores": round(others.cores(), 3),
    }


async def _answers(comparison: Comparison) -> list[list[str]]:
    """The texts of the events of each answer to the prompts that are asked one by one.

    Raises:
        TandemError: there is no answer.
    """
    entries = fixed_lengths(ANSWERS.num_requests, ANSWERS.num_input, ANSWERS.num_output)
    seed = f"{comparison.plan.seed}:{ANSWERS.name}"
    url = f"http://127.0.0.1:{comparison.place.port}"
    client = LoadClient(url, max_sockets=1, timeout_s=_ANSWER_S)
    answers = []
    try:
        served = await connected(client, url, None)
        for job in make_jobs(entries, vocabulary=comparison.vocabulary, seed=seed):
            _, stream = await answered(client, job, served.name)
            answers.append(stream.texts)
    finally:
        client.close()
    return answers


async def _run_load(comparison: Comparison, load: Load, seed: int) -> dict[str, Any]:
    """The figures of one load as plain data; times in seconds."""
    entries = fixed_lengths(load.num_requests, load.num_input, load.num_output)
    session = _session(comparison, entries, seed)
    await session.open()
    before = await prompt_tokens(session.target.url)
    shape = Shape(concurrency=load.concurrency) if load.rate is None else Shape(rate=load.rate)
    with shown(f"load {load.name}", len(entries), console=comparison.console) as watch:
        sent = await session.measure(shape, watch=watch)
    if session.was_interrupted:
        raise KeyboardInterrupt
    after = await prompt_tokens(session.target.url)
    run = Run.of(shape, sent, None).as_json(with_records=False)
    del run["shape"], run["is_partial"], run["figures"]["itl_windows"]
    computed = {role: after[role] - before.get(role, 0) for role in after}
    return {"date": now(), "seed": seed, "prompt_tokens_computed": computed, **run}


async def _search(comparison: Comparison, load: SearchedLoad, num_workers: int) -> dict[str, Any]:
    search = load.search()
    session = _session(comparison, comparison.trace, comparison.plan.seed)
    await session.open()
    show = functools.partial(shown, console=comparison.console)
    async with Idleness.measured(session.target.url, comparison.vocabulary, num_workers) as idleness:
        await search_goodput(session, search, show, ready=idleness.wait)
    if session.was_interrupted:
        raise KeyboardInterrupt
    return {"date": now(), **search.as_json(), "probes": [_probe(probe) for probe in search.probes]}


def _probe(probe: Run) -> dict[str, Any]:
    """Of one that was stopped early the share is of what had been sent by then."""
    summary = probe.summary
    latencies = {"ttft_s": summary.ttft_s, "tpot_s": summary.tpot_s, "lateness_s": summary.lateness_s}
    return {
        "rate": probe.shape.rate,
        "num_requests": summary.num_requests,
        "duration_s": summary.duration_s,
        "is_partial": probe.load.is_partial,
        "share": summary.goodput.share if summary.goodput else None,
        "num_failed": summary.num_failed,
        **{name: None if found is None else asdict(found) for name, found in latencies.items()},
    }


def _session(comparison: Comparison, entries: Sequence[TraceEntry], seed: int) -> Session:
    url = f"http://127.0.0.1:{comparison.place.port}"
    workload = Workload(entries, comparison.vocabulary, seed=seed, num_warm_up=comparison.plan.num_warm_up)
    return Session(Target(url), workload)


async def prompt_tokens(url: str) -> dict[str, int]:
    """Prompt tokens computed so far by each role, when all workers have reported; nothing of a server without these.

    Raises:
        TandemError: the counts go on changing though nothing is asked.
    """
    latest = await _read_counter(url)
    try:
        async with asyncio.timeout(_SETTLE_S):
            while latest:
                await asyncio.sleep(_BETWEEN_READINGS_S)
                earlier, latest = latest, await _read_counter(url)
                if earlier == latest:
                    break
    except TimeoutError:
        raise TandemError(f"{url}/metrics counts prompt tokens though nothing is asked") from None
    return latest


async def _read_counter(url: str) -> dict[str, int]:
    answer = await get(url, "/metrics", timeout_s=_SETTLE_S)
    if answer.status != _OK:
        return {}
    return {role.decode(): int(float(value)) for role, value in _COUNTER.findall(answer.body)}
