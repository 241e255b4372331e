"""What `tandem bench …` runs."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import json
import math
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import uvloop
from rich.console import Console

from tandem.bench.cache_replay import CacheSpec, replay
from tandem.bench.goodput import GoodputSearch, search_goodput
from tandem.bench.load.conversations import ConversationPlan
from tandem.bench.load.records import Slo
from tandem.bench.load.trace_entry import MOONCAKE_BLOCK
from tandem.bench.load.traces import load_trace, scaled
from tandem.bench.load.workload import DEFAULT_VOCABULARY, fixed_lengths, plain_vocabulary
from tandem.bench.overload import Plan
from tandem.bench.overload import measure as measure_overload
from tandem.bench.rate_search import RateSearch
from tandem.bench.report import json_file, results
from tandem.bench.report.cache_table import cache_table, trace_table
from tandem.bench.report.cache_table import document as cache_document
from tandem.bench.report.progress import shown
from tandem.bench.report.results import Run
from tandem.bench.report.tables import count_table, latency_table, probe_table, remarks, turn_table
from tandem.bench.session import Session, Shape, Target, Workload
from tandem.bench.settling import Settling
from tandem.core.client_key import api_key
from tandem.core.errors import ConfigError
from tandem.core.tokenizer import Tokenizer

INTERRUPTED = 130

T = TypeVar("T")


def run(options: argparse.Namespace) -> int:
    """`tandem bench run`; 0, 1 where a request failed, 130 where it was interrupted."""
    json_file.check_before(options.json)
    session, console = _session(options), Console(stderr=True)
    shape = Shape(concurrency=options.concurrency, rate=options.rate)
    session.check(shape)
    measured = in_loop(_run_once(session, shape, options, console))
    _say_run(measured, session)
    _write(options, "run", session, [measured])
    return INTERRUPTED if session.was_interrupted else int(bool(measured.summary.num_failed))


async def _run_once(session: Session, shape: Shape, options: argparse.Namespace, console: Console) -> Run:
    await session.open()
    num = len(session.workload.entries)
    with shown(shape.name, num, console=console, is_wanted=options.progress) as watch:
        load = await session.measure(shape, watch=watch)
    return Run.of(shape, load, _slo(options))


def goodput(options: argparse.Namespace) -> int:
    """`tandem bench goodput`; 0, 1 where no rate kept the SLO, 130 where it was interrupted."""
    json_file.check_before(options.json)
    session, console = _session(options), Console(stderr=True)
    search = GoodputSearch(
        Slo(options.slo_ttft, options.slo_tpot),
        options.share,
        RateSearch(options.start_rate, precision=options.precision, max_probes=options.max_probes),
    )
    show = functools.partial(shown, console=console, is_wanted=options.progress)
    settling = Settling(
        session, lambda text: console.print(f"note: {text}", soft_wrap=True, highlight=False, markup=False)
    )

    async def ready() -> None:
        if not search.probes:
            await settling.measure()
        elif search.probes[-1].load.is_partial:  # what was broken off may still be under way there
            await settling.wait()

    async def search_all() -> None:
        await session.open()
        await search_goodput(session, search, show, ready=ready)

    in_loop(search_all())
    _say_search(search, session)
    _write(options, "goodput", session, search.probes, search=search.as_json())
    return INTERRUPTED if session.was_interrupted else int(not search.rates.best)


def compare(options: argparse.Namespace) -> int:
    """`tandem bench compare`."""
    from tandem.bench.report.compare import compare_files

    table, notes = compare_files(options.first, options.second)
    console = Console()
    console.print(table)
    for note in notes:
        console.print(f"note: {note}", soft_wrap=True, highlight=False, markup=False)
    return 0


def plot(options: argparse.Namespace) -> int:
    """`tandem bench plot`."""
    from tandem.bench.report.plot import plot_files

    for path in plot_files(options.files, options.output):
        print(path)
    return 0


def overload(options: argparse.Namespace) -> int:
    """`tandem bench overload`."""
    json_file.check_before(options.json)
    plan = Plan(
        prompt_words=options.prompt_words,
        max_tokens=options.max_tokens,
        overload_s=options.seconds,
        overload_factor=options.factor,
        max_sockets=options.max_sockets,
        seed=options.seed,
    )
    report = in_loop(measure_overload(options.url, plan, model=options.model, api_key=api_key()))
    if options.json is not None:
        json_file.write(options.json, report)
    else:
        print(json.dumps(report, indent=2))
    return 0


def cache(options: argparse.Namespace) -> int:
    """`tandem bench cache`."""
    json_file.check_before(options.json)
    entries = load_trace(options.file, options.format, limit=options.limit, block_size=options.block_size, key="FILE")
    if not all(entry.block_ids for entry in entries):
        raise ConfigError(f"{options.file} does not say what prompts share; give a trace with hash_ids", key="FILE")
    spec = CacheSpec(options.workers, options.pages, options.tokens_per_s)
    specs = [spec] if spec.num_workers == 1 else [spec, dataclasses.replace(spec, finds_prefixes=False)]
    replays = [(spec, replay(spec, entries)) for spec in specs]
    console = Console()
    console.print(trace_table(replays[0][1]), cache_table(replays), sep="\n")
    if options.json is not None:
        json_file.write(options.json, cache_document(plain_options(options), replays))
    return 0


COMMANDS = {command.__name__: command for command in (run, goodput, compare, plot, overload, cache)}


# --- from options -----------------------------------------------------------------------------------------------------


# What options are where nobody gives them, by what they say something of; given elsewhere they would do nothing.
_OF_TRACES = {"limit": None, "format": None, "block_size": MOONCAKE_BLOCK, "scale_time": 1.0}
_OF_CONVERSATIONS = {"turns": 6, "think_time": 0.0, "api": "completions"}
_OF_EQUAL_REQUESTS = {"input_len": 512, "output_len": 64}
_OF_TIMES = {"scale_time": 1.0}
_OF_RESULTS = {"records": False, "label": None}
#: Conversations' texts are words.
_NOT_OF_CONVERSATIONS = _OF_TRACES | {
    "trace": None, "num_requests": None, "cut": None, "tokenizer": None, "vocab": None, "scale_lengths": 1.0
}  # fmt: skip
_OPTIONS = {"scale_time": "--scale-time (or --speed)"}  # those that are not written as they are called here


def _refuse_given(options: argparse.Namespace, unused: Mapping[str, Any], why: str) -> None:
    """Raises `ConfigError` where one of them is not as it is by default."""
    for name, default in unused.items():
        if getattr(options, name, default) != default:
            option = _OPTIONS.get(name, f"--{name.replace('_', '-')}")
            raise ConfigError(f"{option} {why}", key=option)


def _session(options: argparse.Namespace) -> Session:
    if options.json is None:
        _refuse_given(options, _OF_RESULTS, "says something of the file of --json: name one, or leave it out")
    target = Target(
        options.url, options.model, ignore_eos=options.ignore_eos, timeout_s=options.timeout,
        max_sockets=options.max_connections,
    )  # fmt: skip
    if getattr(options, "conversations", None) is not None:  # `goodput` has none
        return Session(target, _conversations(options))
    _refuse_given(options, _OF_CONVERSATIONS, "says something of conversations: give --conversations, or leave it out")
    return Session(target, workload_of(options))


def _conversations(options: argparse.Namespace) -> Workload:
    _refuse_given(options, _NOT_OF_CONVERSATIONS, "does not go with --conversations: leave one of them out")
    plan = ConversationPlan(
        options.conversations, options.turns, options.input_len, options.output_len, options.think_time, options.api
    )
    return Workload.of_conversations(plan, seed=options.seed, num_warm_up=options.warmup)


def workload_of(options: argparse.Namespace) -> Workload:
    """Of a trace, or of equal requests. Raises `ConfigError`."""
    tokenizer = None if options.tokenizer is None else Tokenizer.from_dir(options.tokenizer)
    if options.trace is None:
        _refuse_given(options, _OF_TRACES, "says something of a trace: give --trace, or leave it out")
        num = 64 if options.num_requests is None else options.num_requests
        entries = fixed_lengths(num, options.input_len, options.output_len)
    else:
        _refuse_given(options, _OF_EQUAL_REQUESTS, "does not go with --trace, which has its own lengths: leave it out")
        if None not in (options.limit, options.num_requests):
            raise ConfigError("--num-requests does not go with --limit, which says the same of a trace: leave one out",
                              key="--num-requests")  # fmt: skip
        if (chosen := _chosen_times(options)) is not None:
            _refuse_given(options, _OF_TIMES, f"says something of a trace's own times, and {chosen}: leave it out")
        limit = options.limit if options.num_requests is None else options.num_requests
        entries = load_trace(
            options.trace, options.format, limit=limit, tokenizer=tokenizer, block_size=options.block_size
        )
    entries = scaled(entries, lengths=options.scale_lengths, time=options.scale_time)
    return Workload(
        entries, _vocabulary(options.vocab, tokenizer), seed=options.seed, num_warm_up=options.warmup,
        max_len=options.cut,
    )  # fmt: skip


def _chosen_times(options: argparse.Namespace) -> str | None:
    """By what requests come at other times than a trace's own; `None`: they do not."""
    if not hasattr(options, "rate"):
        return "a search has rates of its own"
    if options.rate is not None:
        return "--rate has others"
    return None if options.concurrency is None else "--concurrency has none"


def _vocabulary(given: range | None, tokenizer: Tokenizer | None) -> Sequence[int]:
    """The ids to draw from: those given, less the tokenizer's special ones; else all of its others."""
    if given is None:
        return DEFAULT_VOCABULARY if tokenizer is None else plain_vocabulary(tokenizer)
    if tokenizer is None:
        return given
    plain = [token_id for token_id in given if token_id < tokenizer.vocab_size and not tokenizer.is_special(token_id)]
    if not plain:
        raise ConfigError("--vocab names no ids but special ones and ones outside the tokenizer", key="--vocab")
    return plain


def _slo(options: argparse.Namespace) -> Slo | None:
    slo = Slo(options.slo_ttft, options.slo_tpot)
    return None if slo == Slo() else slo


def _write(options: argparse.Namespace, kind: str, session: Session, runs: Sequence[Run], **more: Any) -> None:
    """To the file of `--json`, where there is one."""
    if options.json is not None:
        content = results.document(kind, session, plain_options(options), runs, with_records=options.records, **more)
        json_file.write(options.json, content)


def plain_options(options: argparse.Namespace) -> dict[str, Any]:
    """The command's options as they go into JSON; of files only the names, as their places mean nothing elsewhere."""
    left_out = {"run", "debug", "command", "json", "progress"}
    if getattr(options, "trace", None) is not None:
        left_out |= {"input_len", "output_len"}
    if getattr(options, "conversations", None) is None:
        left_out |= {"conversations", "turns", "think_time", "api"}
    return {name: _plain_value(value) for name, value in sorted(vars(options).items()) if name not in left_out}


def _plain_value(value: Any) -> Any:
    if isinstance(value, range):
        return [value.start, value.stop]
    return value.name if isinstance(value, Path) else value


def in_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run it in a loop of its own."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


# --- to the terminal --------------------------------------------------------------------------------------------------


def _say_run(measured: Run, session: Session) -> None:
    console = Console()
    console.print(f"{session.served.name} at {session.target.url}, {measured.shape.name}", markup=False)
    console.print(count_table(measured))
    console.print(latency_table(measured.summary))
    if measured.summary.turns:
        console.print(turn_table(measured.summary.turns))
    for remark in (*_cuts(session), *remarks(measured)):
        console.print(f"note: {remark}", soft_wrap=True, highlight=False, markup=False)


def _cuts(session: Session) -> list[str]:
    return [str(session.cut)] if session.cut is not None and session.cut.num_cut else []


def _say_search(search: GoodputSearch, session: Session) -> None:
    console = Console()
    console.print(probe_table(search.probes))
    for cut in _cuts(session):
        console.print(f"note: {cut}", soft_wrap=True, highlight=False, markup=False)
    for probe in search.probes:
        for kind, number in probe.summary.num_failed.items():
            if kind != "interrupted":
                console.print(f"note: at {probe.shape.rate:.3f} /s {number} failed: {kind}", markup=False)
    if session.was_interrupted:
        console.print("note: partial: the search was stopped before its end")
    rates = search.rates
    if rates.best:
        if not rates.is_close and not session.was_interrupted:
            higher = "a higher rate" if rates.worst == math.inf else f"a rate below {rates.worst:.3f} /s"
            console.print(
                f"note: the search ended with its probes (--max-probes): {higher} may keep the SLO too", soft_wrap=True
            )
        console.print(f"goodput: {rates.best:.3f} requests/s", highlight=False)
    elif rates.worst < math.inf:
        console.print(f"no rate down to {rates.worst:.3f} /s kept the SLO", highlight=False)
