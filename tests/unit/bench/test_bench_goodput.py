"""Goodput on mixes of short and long prompts: what is asked, what a request must keep, the search, and the section."""

from __future__ import annotations

import asyncio
import functools
import io
import itertools
import json
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
from bench_peers import END, STREAM, Peer, chunk, event, serving, usage, well_behaved
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from benchmarks import docs
from benchmarks.goodput import __main__ as command
from benchmarks.goodput.figures import alone_ttft_s, reference
from benchmarks.goodput.load import SHARE, Effort, MixLoad
from benchmarks.goodput.measure import Goodput
from benchmarks.goodput.mixes import MIXES, SPREAD, Kind, Mix
from benchmarks.goodput.points import TYPES, Point, all_points, alone_loads, mix_of
from benchmarks.goodput.section import section
from benchmarks.goodput.slo import LENGTHS, SloByPrompt
from benchmarks.peers import idle, run
from benchmarks.peers.comparisons import Comparisons
from benchmarks.peers.idle import Idleness, Pace
from benchmarks.peers.models import MODEL_OPTIONS, Model
from benchmarks.peers.servers import Contestant, Place
from benchmarks.peers.turns import Load, read
from tandem.bench.goodput import GoodputSearch, ProbeLength, search_goodput
from tandem.bench.load import drive
from tandem.bench.load.records import RequestRecord, Slo
from tandem.bench.load.trace_entry import TraceEntry
from tandem.bench.load.workload import fixed_lengths, poisson_arrivals
from tandem.bench.rate_search import RateSearch
from tandem.bench.report.progress import shown
from tandem.bench.server_process import Command
from tandem.bench.session import Session, Shape, Target, Watcher, Workload
from tandem.core.errors import ConfigError, TandemError
from tandem.core.ports import free_port

PEER_PROCESS = Path(__file__).with_name("peer_process.py")
QUIET = Console(file=io.StringIO())

# --- a search's probes ------------------------------------------------------------------------------------------------


def test_a_probe_has_requests_enough_and_takes_time_enough_but_has_an_end() -> None:
    length = ProbeLength(60, 20.0, 1200)
    assert [length.num(rate) for rate in (0.1, 1.0, 3.0, 3.01, 10.0, 60.0, 1e6)] == [60, 60, 60, 61, 200, 1200, 1200]


@pytest.mark.long
async def test_probes_are_as_long_as_their_rate_asks_for_and_share_lengths_and_no_prompt() -> None:
    peer = Peer(well_behaved)
    entries = [*fixed_lengths(4, 8, 2), *fixed_lengths(8, 16, 2)]
    search = GoodputSearch(Slo(60.0, 60.0), 0.9, RateSearch(100.0, max_probes=4), ProbeLength(4, 0.04, 10))
    waited, totals = [], []

    async def ready() -> None:
        waited.append(len(peer.bodies))

    def show(title: str, total: int) -> Any:
        totals.append(total)
        return shown(title, total, console=QUIET)

    async with serving(peer) as url:
        session = Session(Target(url), Workload(entries, range(128, 256), num_warm_up=0))
        await session.open()
        peer.bodies.clear()
        await search_goodput(session, search, show, ready=ready)
    assert totals == [4, 8, 10, 10]
    assert waited == [0, 4, 12, 22], "each probe waits until its server is ready"
    prompts = [body["prompt"] for body in peer.bodies]
    assert [len(prompt) for prompt in prompts[:4]] == [8] * 4
    assert sorted(len(prompt) for prompt in prompts[4:12]) == [8] * 4 + [16] * 4
    assert len(set(map(tuple, prompts))) == len(prompts) == 32
    assert not any(a != b and a == b[: len(a)] for a in prompts for b in prompts), "none begins as another one"


@pytest.mark.long
async def test_when_the_time_is_up_no_probe_begins_once_a_rate_was_too_high() -> None:
    async with serving(Peer(well_behaved)) as url:
        session = Session(Target(url), Workload(fixed_lengths(4, 8, 2), range(128, 256), num_warm_up=0))
        await session.open()
        search = GoodputSearch(Slo(1e-9), 1.0, RateSearch(100.0), max_s=1e-6)
        await search_goodput(session, search, lambda title, total: shown(title, total, console=QUIET))
        endless = GoodputSearch(Slo(60.0, 60.0), 0.9, RateSearch(100.0, max_probes=3), max_s=1e-6)
        await search_goodput(session, endless, lambda title, total: shown(title, total, console=QUIET))
    assert (len(search.probes), search.rates.is_done, search.is_done) == (1, False, True)
    assert search.as_json()["goodput_per_s"] is None
    assert search.as_json()["failed_from_per_s"] == 100.0
    assert [probe.shape.rate for probe in endless.probes] == [100.0, 200.0, 400.0], "or nothing would be known"


@pytest.mark.long
async def test_a_rate_so_low_that_its_requests_take_too_long_to_come_is_not_tried() -> None:
    async with serving(Peer(well_behaved)) as url:
        session = Session(Target(url), Workload(fixed_lengths(40, 8, 2), range(128, 256), num_warm_up=0))
        await session.open()
        length = ProbeLength(40, 0.0, 40)  # eight seconds at 5 requests/s
        search = GoodputSearch(Slo(1e-9), 1.0, RateSearch(40.0), length, max_s=6.0)
        await search_goodput(session, search, lambda title, total: shown(title, total, console=QUIET))
        late = GoodputSearch(Slo(60.0, 60.0), 0.9, RateSearch(40.0, max_probes=1), length, max_s=0.01)
        await search_goodput(session, late, lambda title, total: shown(title, total, console=QUIET))
    assert [probe.shape.rate for probe in search.probes] == [40.0, 20.0, 10.0]
    assert search.as_json()["failed_from_per_s"] == 10.0
    assert len(late.probes) == 1, "the first is tried, or nothing would be known"


# --- a server that is idle --------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("is_late", ["first", "later"])
async def test_a_server_is_idle_when_requests_are_as_fast_as_they_were_alone(is_late: str) -> None:
    """It is slow for as long as something holds it, whatever it says of itself: also where decode alone is held."""
    slow = 0

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        nonlocal slow
        limit = idleness.alone.longest() if slow else Pace(0.0, 0.0)
        slow = max(0, slow - 1)
        if limit.ttft_s and is_late == "first":
            await asyncio.sleep(2 * limit.ttft_s)
        writer.write(STREAM)
        for number in range(body["max_tokens"]):
            writer.write(chunk(event()))
            await asyncio.sleep(2 * limit.gap_s if number == 2 and is_late == "later" else 0.0)
        for content in (chunk(usage(body["max_tokens"])), END):
            writer.write(content)
        return True

    peer = Peer(answer)
    async with serving(peer) as url, Idleness.measured(url, range(128, 256), 1) as idleness:
        assert 0 < idleness.alone.ttft_s < 1
        slow, before = 3, idleness.num_asked
        await idleness.wait()
        assert slow == 0
        assert idleness.num_asked - before >= 4
    prompts = [tuple(body["prompt"]) for body in peer.bodies]
    assert len(set(prompts)) == len(prompts), "none is in a prefix cache"


async def test_each_worker_of_a_server_is_asked_and_the_slowest_counts() -> None:
    """The server has two, of which one is busy; it gives a request to the one that has less to do."""
    num_busy, most = 0, 0

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        nonlocal num_busy, most
        most = max(most, peer.num_under_way)
        if num_busy and peer.num_under_way == 2:
            num_busy -= 1
            await asyncio.sleep(2 * idleness.alone.longest().ttft_s)
        return await well_behaved(body, writer)

    peer = Peer(answer)
    async with serving(peer) as url, Idleness.measured(url, range(128, 256), 2) as idleness:
        num_busy = 2
        await idleness.wait()
    assert (num_busy, most) == (0, 2)


def test_a_pace_is_of_the_slowest_and_both_its_times_count() -> None:
    records = [record(16, 0.2, 0.01), record(16, 0.1, 0.03)]
    assert Pace.of(records) == Pace(pytest.approx(0.2), pytest.approx(0.03))
    assert Pace.usual([Pace(1.0, 6.0), Pace(3.0, 5.0), Pace(2.0, 4.0)]) == Pace(2.0, 5.0)
    limit = Pace(0.1, 0.02).longest()
    assert (limit.ttft_s, limit.gap_s) == pytest.approx((0.205, 0.045))
    paces = [Pace(0.2, 0.04), Pace(0.21, 0.04), Pace(0.2, 0.05)]
    assert [pace.is_within(limit) for pace in paces] == [True, False, False]


@pytest.mark.long
async def test_a_server_that_never_becomes_idle_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "_SETTLE_S", 0.2)
    async with serving(Peer(well_behaved)) as url, Idleness.measured(url, range(128, 256), 1) as idleness:
        idleness.alone = Pace(-1.0, -1.0)  # nothing is as fast
        with pytest.raises(TandemError, match=r"a request alone still takes more than .* after the load has ended"):
            await idleness.wait()


# --- the search for a rate, with noise --------------------------------------------------------------------------------


def searched(limit: float, start: float, seed: int) -> RateSearch:
    """Of a server that keeps a rate by chance: surely far below `limit`, hardly ever far above."""
    generator = random.Random(seed)
    effort = Effort()
    search = RateSearch(start, precision=effort.precision, max_probes=effort.max_probes, step=effort.step)
    while not search.is_done:
        steepness = 30 * math.log(search.rate / limit)
        search.tell(went_well=generator.random() < 1 / (1 + math.exp(min(steepness, 700))))
    return search


def flat(alone_s: float) -> SloByPrompt:
    """Targets of prompts that take as long alone, whatever their length."""
    return SloByPrompt(((32, alone_s), (3072, alone_s)))


@given(limit=st.floats(0.2, 20.0), factor=st.floats(0.2, 5.0), seed=st.integers(0, 2**32))
def test_the_search_ends_near_the_limit_though_rates_near_it_go_by_chance(
    limit: float, factor: float, seed: int
) -> None:
    search = searched(limit, limit * factor, seed)
    assert search.is_close
    assert search.num_probes <= 12
    assert limit / 2 < search.best < search.worst < limit * 2


def test_the_search_is_within_a_tenth_of_the_limit_mostly() -> None:
    found = [searched(2.0, 9.0, seed) for seed in range(200)]
    errors = sorted(abs(math.log(math.sqrt(search.best * search.worst) / 2.0)) for search in found)
    assert errors[180] < math.log(1.15)
    assert errors[100] < math.log(1.06)


# --- the mixes --------------------------------------------------------------------------------------------------------


def test_a_mix_is_the_same_each_time_and_a_longer_one_begins_as_a_shorter() -> None:
    for mix in MIXES:
        assert mix.entries(200) == mix.entries(400)[:200]
        assert replace(mix, name="another").entries(200) != mix.entries(200)
    assert len({mix.name for mix in MIXES}) == len(MIXES) == 5


def test_each_round_of_a_mix_has_all_its_kinds_and_lengths_are_near_their_means() -> None:
    for mix in MIXES:
        entries = mix.entries(100 * mix.num_a_round)
        means = {kind.num_input for kind in mix.kinds}
        for at in range(0, len(entries), mix.num_a_round):
            kinds = sorted(min(means, key=lambda mean: abs(math.log(entry.num_input / mean)))
                           for entry in entries[at : at + mix.num_a_round])  # fmt: skip
            assert kinds == sorted(kind.num_input for kind in mix.kinds for _ in range(kind.count))
        for name in ("num_input", "num_output"):
            mean = math.fsum(getattr(kind, name) * kind.count for kind in mix.kinds) / mix.num_a_round
            assert math.fsum(getattr(entry, name) for entry in entries) / len(entries) == pytest.approx(mean, rel=0.1)
        assert max(entry.num_input for entry in entries) <= mix.longest
        assert len({(entry.num_input, entry.num_output) for entry in entries}) > 50


def test_requests_alone_span_all_prompts_and_none_is_longer_than_the_model_takes() -> None:
    for mix in MIXES:
        entries = mix.entries(1200)
        assert LENGTHS[0] <= min(entry.num_input for entry in entries)
        assert mix.longest <= LENGTHS[-1]
        assert max(entry.num_input + entry.num_output for entry in entries) <= int(str(MODEL_OPTIONS["max-positions"]))
    assert [load.num_input for load in alone_loads()] == list(LENGTHS)
    assert {load.concurrency for load in alone_loads()} == {1}


def test_no_mix_lets_a_server_give_up_all_its_long_prompts() -> None:
    for mix in MIXES:
        longest = max(mix.kinds, key=lambda kind: kind.num_input)
        assert longest.count / mix.num_a_round > 1 - SHARE
        search, shortest = MixLoad(mix, flat(0.1), Effort()).search(), round(longest.num_input * (1 - SPREAD))
        are_long = [entry.num_input >= shortest for entry in mix.entries(Effort().length.most)]
        for num, num_long in enumerate(itertools.accumulate(are_long), 1):
            if num < Effort().length.least:
                continue
            assert num_long > search.num_allowed(num), (mix.name, num)


# --- what a request must keep -----------------------------------------------------------------------------------------


def record(num_input: int, ttft_s: float, tpot_s: float, **more: Any) -> RequestRecord:
    """One of eleven tokens."""
    event_s = tuple(1.0 + ttft_s + tpot_s * number for number in range(11))
    fields = {"number": 0, "num_input_asked": num_input, "num_output_asked": 11, "sent_s": 1.0, "num_output": 11}
    return RequestRecord(**{**fields, "ended_s": event_s[-1], "event_s": event_s, **more})


SLO = SloByPrompt(((100, 0.1), (200, 0.3), (1000, 2.7)))


@pytest.mark.parametrize(
    ("num_input", "alone_s"),
    [(100, 0.1), (150, 0.2), (200, 0.3), (201, 0.303), (600, 1.5), (1000, 2.7), (1100, 3.0), (75, 0.05)],
)
def test_a_request_alone_takes_as_long_as_those_measured_on_either_side(num_input: int, alone_s: float) -> None:
    assert SLO.alone_s(num_input) == pytest.approx(alone_s)
    assert SLO.of(num_input).ttft_s == pytest.approx(3 * alone_s + 0.5)
    assert SLO.of(num_input).tpot_s == 0.06


@pytest.mark.parametrize(
    ("num_input", "ttft_s", "tpot_s", "is_met"),
    [
        (100, 0.79, 0.0599, True),
        (100, 0.81, 0.0599, False),
        (100, 0.79, 0.0601, False),
        (1000, 0.81, 0.0599, True),
        (1000, 8.59, 0.0599, True),
        (1000, 8.61, 0.0599, False),
    ],
)
def test_a_request_keeps_both_targets_of_its_own_length(
    num_input: int, ttft_s: float, tpot_s: float, *, is_met: bool
) -> None:
    assert SLO.is_met_by(record(num_input, ttft_s, tpot_s)) is is_met
    assert not SLO.is_met_by(record(num_input, ttft_s, tpot_s, failure="timeout"))


def test_a_probe_may_miss_a_tenth_and_no_more() -> None:
    search = MixLoad(MIXES[0], flat(0.5), Effort()).search()
    assert [search.num_allowed(num) for num in (32, 39, 40, 69, 70, 1200)] == [3, 3, 4, 6, 7, 120]


def test_a_search_begins_where_a_few_requests_are_under_way_that_are_as_slow_as_they_may() -> None:
    entries = MIXES[0].entries(1200)
    mean_s = 0.25 + 0.06 * math.fsum(entry.num_output for entry in entries) / 1200
    assert MixLoad(MIXES[0], flat(0.25), Effort()).start_rate == pytest.approx(8 / mean_s, abs=1e-3)
    assert MixLoad(MIXES[0], flat(0.25), Effort(num_at_once=4)).start_rate == pytest.approx(4 / mean_s, abs=1e-3)
    assert Effort().step ** 0.25 < Effort().precision, "two probes more are enough"


@dataclass
class BatchingServer:
    """A session with a server that computes prompts one by one before it gives all that generate a token each, in
    seconds of its own."""

    entries: list[TraceEntry]
    prompt_s: float  # a token
    step_s: float
    sequence_s: float  # more of a step for each that generates
    was_interrupted: bool = False

    @property
    def workload(self) -> BatchingServer:
        return self

    async def measure(self, shape: Shape, *, number: int, limit: int, watch: Watcher) -> drive.Load:
        assert shape.rate is not None
        arrivals_s = poisson_arrivals(limit, shape.rate, "1")
        now_s, num_prompts = 0.0, 0
        generating: dict[int, list[float]] = {}
        records: list[RequestRecord] = []
        while len(records) < limit:
            if num_prompts < limit and (arrivals_s[num_prompts] <= now_s or not generating):
                now_s = max(now_s, arrivals_s[num_prompts]) + self.entries[num_prompts].num_input * self.prompt_s
                generating[num_prompts], num_prompts = [now_s], num_prompts + 1
                continue
            now_s += self.step_s + self.sequence_s * len(generating)
            for at, event_s in list(generating.items()):
                event_s.append(now_s)
                entry = self.entries[at]
                if len(event_s) < entry.num_output:
                    continue
                del generating[at]
                records.append(
                    RequestRecord(at, entry.num_input, entry.num_output, arrivals_s[at], now_s,
                                  event_s=tuple(event_s), num_output=entry.num_output)
                )  # fmt: skip
                if not watch(records[-1]):
                    return drive.Load(records, now_s, is_partial=True)
        return drive.Load(records, now_s)


@pytest.mark.parametrize(
    ("name", "speed"),
    [("chats", 1.4), ("chats", 2.5), ("code", 2.0), ("code", 3.0), ("long-outputs", 2.0), ("long-outputs", 2.5),
     ("chats-and-summaries", 1.5), ("chats-and-summaries", 3.0), ("mostly-short", 1.2), ("mostly-short", 2.5)],
)  # fmt: skip
async def test_a_server_that_keeps_about_one_a_second_is_known_to_a_fifth_in_its_time(name: str, speed: float) -> None:
    """The targets are those of another, slower one."""
    mix = next(mix for mix in MIXES if mix.name == name)
    searched = MixLoad(mix, SloByPrompt(((0, 0.005), (1000, 0.805))), Effort())
    search = searched.search()
    server = BatchingServer(searched.entries, 0.0008 / speed, 0.012 / speed, 0.011 / speed)
    await search_goodput(cast(Session, server), search, lambda title, total: shown(title, total, console=QUIET))
    assert 0.7 < search.rates.best < 3.0
    assert search.rates.worst <= search.rates.best * 1.21
    assert math.fsum(probe.load.duration_s for probe in search.probes) < 165.0


def test_servers_are_told_what_the_mean_prompt_of_the_longest_kind_must_keep() -> None:
    mix = Mix("two", (Kind(3, 100, 10), Kind(1, 600, 10)))
    assert MixLoad(mix, SloByPrompt(((200, 0.2), (1000, 1.0))), Effort()).told == (2.3, 0.06)


def test_settings_are_as_json_reads_them_back() -> None:
    settings = MixLoad(MIXES[4], SLO, Effort()).settings()
    assert json.loads(json.dumps(settings)) == settings
    assert settings["alone_ttft_s"] == {"100": 0.1, "200": 0.3, "1000": 2.7}


# --- what the files say -----------------------------------------------------------------------------------------------

CODE = {"digest": "0123456789abcdef", "commit": "c0ffee" * 6 + "c0ff", "is_dirty": False}
MACHINE = {"cpu": "a CPU", "num_cores": 2, "memory_gib": 16.0, "system": "Linux"}


def about(name: str) -> dict[str, Any]:
    code = CODE if name.startswith("tandem") else None
    return {"contestant": name, "date": "2026-01-01T00:00:00+00:00", "code": code, "other_cores": 0.01}


def content(point: Point, runs: Sequence[Any] = (), searches: Sequence[Any] = ()) -> dict[str, Any]:
    settings: dict[str, Any] = {"machine": MACHINE, "peer_versions": {"vllm": "0.32.0"}, "point": asdict(point)}
    settings["loads"] = {load.name: load.settings() for load in alone_loads()}
    targets = tuple((length, round(0.01 + length / 1000, 4)) for length in LENGTHS)  # as in `measured_alone`
    settings["goodput"] = MixLoad(MIXES[0], SloByPrompt(targets), Effort()).settings()
    return {"settings": settings, "runs": list(runs), "goodput": list(searches)}


def alone(name: str, ttft_s: float) -> list[dict[str, Any]]:
    """A hundredth of a second and `ttft_s` for a thousand tokens."""
    return [
        about(name)
        | {"load": load.name, "repetition": 1}
        | {"figures": {"ttft_s": {"p50": 0.01 + ttft_s * load.num_input / 1000}, "num_failed": {}}}
        for load in alone_loads()
    ]


def measured_alone(dtype: str = "float32") -> dict[str, Any]:
    """What makes the targets of `content`."""
    return content(Point("alone", dtype), alone("peer-colocated", 1.0))


def search(name: str, best: float | None, worst: float | None) -> dict[str, Any]:
    return about(name) | {"goodput_per_s": best, "failed_from_per_s": worst}


def text(*contents: dict[str, Any]) -> str:
    return "\n".join(section(contents))


def joined(*contents: dict[str, Any]) -> str:
    return " ".join(text(*contents).split())


def row(page: str, *cells: str) -> str:
    (found,) = (line for line in page.splitlines() if line.startswith(f"| {' | '.join(cells)} |"))
    return found


def test_all_are_judged_by_vllm_where_it_was_measured() -> None:
    assert reference(["tandem-colocated", "peer-colocated", "tandem"]) == "peer-colocated"
    assert reference(["tandem-colocated", "tandem"]) == "tandem"
    assert reference([]) is None
    held = content(Point("alone"), [*alone("tandem", 0.5), *reversed(alone("peer-colocated", 1.0))])
    found = alone_ttft_s(held, "peer-colocated")
    assert [length for length, _ in found] == list(LENGTHS)
    assert [ttft_s for _, ttft_s in found] == pytest.approx([0.01 + length / 1000 for length in LENGTHS], abs=1e-4)
    assert dict(alone_ttft_s(held, "tandem"))[3072] == pytest.approx(1.546)
    held["runs"][0]["figures"]["num_failed"] = {"timeout": 1}
    assert [length for length, _ in alone_ttft_s(held, "tandem")] == list(LENGTHS[1:])


def test_the_section_has_a_row_for_each_mix_and_type_and_says_what_was_not_measured() -> None:
    three = [search(*each) for each in (("tandem", 3, 3.2), ("tandem-colocated", 4, 4.3), ("peer-colocated", 1.5, 1.6))]
    page = text(
        measured_alone("float32"),
        measured_alone("bfloat16"),
        content(Point("chats"), searches=three),
        content(Point("chats", "bfloat16"), searches=[search("tandem", 3.0, 3.2), search("peer-colocated", 2.5, 2.7)]),
        content(Point("code"), searches=[search("peer-colocated", 1.0, 1.09)]),
    )
    none = "not measured"
    reached = "3.00 | 4.00 | 1.50 | 2.00 (1.88 to 2.13) | ≥ 1.5: reached | 0.75 (0.70 to 0.80)"
    assert row(page, "chats", "float32") == f"| chats | float32 | {reached} |"
    missed = f"| chats | bfloat16 | 3.00 | {none} | 2.50 | 1.20 (1.11 to 1.28) | ≥ 1.5: **missed** |  |"
    assert row(page, "chats", "bfloat16") == missed
    assert row(page, "code", "float32") == f"| code | float32 | {none} | {none} | 1.00 |  |  |  |"
    for mix in MIXES[2:]:
        for dtype in TYPES:
            assert row(page, mix.name, dtype) == f"| {mix.name} | {dtype} | {none} | {none} | {none} |  |  |  |"
    flowing = page.replace("\n", " ")
    assert "is reached in 1 of 2. The geometric mean of the ratios that are known is 1.55." in flowing
    assert "| mostly-short | 7 of 8: 96 / 64, 1 of 8: 2,048 / 64 |" in page
    assert "Warning" not in page


def test_a_search_that_does_not_know_says_so() -> None:
    page = text(
        measured_alone(),
        content(Point("chats"), searches=[search("tandem", 3.0, None), search("peer-colocated", 2.5, 2.7)]),
        content(Point("code"), searches=[search("tandem", 3.0, 4.0), search("peer-colocated", None, 0.5)]),
        content(Point("long-outputs"), searches=[search("tandem", None, 0.5), search("peer-colocated", 1.0, 1.1)]),
        content(Point("mostly-short"), searches=[search("tandem", 1.4, 2.8), search("peer-colocated", 1.0, 1.1)]),
    )
    cells = row(page, "chats", "float32").split(" | ")
    assert (cells[2], *cells[5:7]) == ("≥ 3.00", "> 1.11", "≥ 1.5: undecided")
    cells = row(page, "code", "float32").split(" | ")
    assert (cells[2], *cells[4:7]) == ("3.00 (fails from 4.00)", "< 0.50", "> 6.00", "≥ 1.5: reached")
    cells = row(page, "long-outputs", "float32").split(" | ")
    assert (cells[2], *cells[5:7]) == ("< 0.50", "< 0.50", "≥ 1.5: **missed**")
    cells = row(page, "mostly-short", "float32").split(" | ")
    assert (cells[2], *cells[5:7]) == ("1.40 (fails from 2.80)", "1.27 to 2.80", "≥ 1.5: undecided")
    assert "is reached in 1 of 4, undecided in 2." in page.replace("\n", " ")
    assert "geometric mean" not in page, "bounds have none"


def test_the_mean_is_of_searches_that_know_and_says_what_it_leaves_out() -> None:
    page = text(
        measured_alone(),
        content(Point("chats"), searches=[search("tandem", 3.0, 3.2), search("peer-colocated", 1.5, 1.6)]),
        content(Point("code"), searches=[search("tandem", 1.4, 2.8), search("peer-colocated", 1.0, 1.1)]),
        content(Point("long-outputs"), searches=[search("tandem", None, 0.5), search("peer-colocated", 1.0, 1.1)]),
    ).replace("\n", " ")
    assert "The geometric mean of the ratios that are known is 2.00." in page
    assert "2 of 3 are known too roughly and are not in it." in page


def test_a_mix_with_other_targets_than_are_told_is_named_and_does_not_count() -> None:
    known = content(Point("chats"), searches=[search("tandem", 3.0, 3.2), search("peer-colocated", 1.5, 1.6)])
    older = content(Point("code"), searches=[search("tandem", 3.0, 3.2), search("peer-colocated", 1.0, 1.1)])
    older["settings"]["goodput"]["alone_ttft_s"]["512"] = 0.6
    page = text(measured_alone(), known, older)
    assert "than the requests alone below make: code in float32. The goal's" in page
    assert "is reached in 1 of 1. The geometric mean of the ratios that are known is 2.00." in page.replace("\n", " ")
    assert " 3.00 (2.73 to 3.20) | ≥ 1.5: reached |" in row(page, "code", "float32")
    without = text(known)
    assert "make: chats in float32." in without, "nothing says what its targets are made of"
    assert "is reached in" not in without
    assert "other targets" not in text(measured_alone(), known)


def test_the_section_says_on_which_mixes_tandem_was_told_the_targets() -> None:
    told, untold = (content(Point(mix), searches=[search("tandem", 3.0, 3.2)]) for mix in ("chats", "code"))
    del untold["settings"]["goodput"]["told_s"]
    assert "Tandem was told (`slo`) the TPOT and the TTFT of the longest kind's mean prompt; vLLM" in joined(told)
    assert "mean prompt, on chats in float32; vLLM" in joined(told, untold)
    assert "No server was told these targets." in joined(untold)


def test_requests_alone_are_told_and_whose_make_the_targets() -> None:
    page = text(content(Point("alone"), [*alone("tandem", 0.5), *alone("peer-colocated", 1.0)]))
    bold = " | **42** | **138** | **522** | **1,034** | **2,058** | **3,082** |"
    assert row(page, "vLLM, one engine", "float32").endswith(bold)
    assert row(page, "Tandem", "float32").endswith(" | 74 | 266 | 522 | 1,034 | 1,546 |")
    assert row(page, "Tandem", "bfloat16").count("not measured") == len(LENGTHS)


def test_what_speaks_against_the_figures_is_said() -> None:
    loud = search("tandem", 3.0, 3.2) | {"other_cores": 0.7}
    other = search("tandem-colocated", 3.0, 3.2) | {"code": {**CODE, "digest": "f" * 16}}
    page = text(content(Point("chats"), searches=[loud, other]))
    assert "others used 0.70 cores just before Tandem, goodput" in page
    assert "not all figures of Tandem are of the same code" in page


def test_the_page_has_the_section_and_says_when_nothing_was_measured() -> None:
    assert "No goodput on mixes was measured yet: `make bench-goodput` does" in docs.page(None)
    found = content(Point("chats"), searches=[search("tandem", 3.0, 3.2)])
    assert "| chats | float32 | 3.00 |" in docs.page(None, of_goodput=[found])


# --- measuring --------------------------------------------------------------------------------------------------------

TOY_MIX = Mix("chats", (Kind(1, 8, 4), Kind(1, 16, 4)))
TOY_ALONE = tuple(Load(f"alone-{length}", length, 2, 1, 3) for length in (4, 24))


def goodput(directory: Path, *points: Point, names: Sequence[str] = ("tandem", "peer-colocated")) -> Goodput:
    """Toy servers, of which one is ours, with sources in `directory`."""
    contestants = [Contestant(name, name, toy, is_peer=name.startswith("peer")) for name in names]
    return Goodput(
        comparisons=Comparisons(
            directory=directory / "goodput",
            contestants=contestants,
            place=Place(Path(), free_port(), (0,), directory / "logs"),
            settings=lambda plan, _: {
                "loads": {load.name: load.settings() for load in plan.loads},
                **({} if plan.goodput is None else {"goodput": plan.goodput.settings()}),
            },
            console=Console(file=io.StringIO(), width=200),
            packages=directory,
        ),
        points=points,
        model=lambda _: Model(directory, range(128, 256)),
        mix=lambda point: None if point.mix == "alone" else TOY_MIX,
        alone_loads=TOY_ALONE,
        effort=Effort(ProbeLength(4, 0.0, 8), num_at_once=100_000, max_probes=3),  # in a moment
        slo=functools.partial(SloByPrompt, slack_s=60.0, tpot_s=60.0),  # whatever else the machine does
    )


told_to_toys: list[tuple[float, float] | None] = []


def toy(place: Place) -> list[Command]:
    told_to_toys.append(place.told)
    return [Command("toy", (sys.executable, str(PEER_PROCESS), str(place.port)), place.port)]


@pytest.mark.faults
@pytest.mark.processes
async def test_requests_alone_then_a_mix_and_its_resumption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_QUIET_S", 0.05)
    mix = Point("chats")
    # A mix alone has no targets.
    tiny = goodput(tmp_path, mix)
    assert await tiny.measure() == 0
    assert "its targets are not known: 82m-float32-alone was not measured" in tiny.failures[mix.name]

    tiny = goodput(tmp_path, mix.alone, mix)
    assert [tiny.is_done(point) for point in tiny.points] == [False, False]
    told_to_toys.clear()
    assert await tiny.measure() == 0
    of_longest = told_to_toys[-1]
    assert told_to_toys == [None, None, of_longest, of_longest], "requests alone have no target yet"
    assert of_longest is not None
    assert of_longest[0] > 60.0
    assert of_longest[1] == 60.0
    assert (tiny.failures, [tiny.is_done(point) for point in tiny.points]) == ({}, [True, True])
    asked = read(tiny.comparisons.path(mix.alone))
    assert {(each["contestant"], each["load"]) for each in asked["runs"]} == {
        (name, load.name) for name in ("tandem", "peer-colocated") for load in TOY_ALONE
    }
    held = read(tiny.comparisons.path(mix))
    targets = {str(length): ttft_s for length, ttft_s in alone_ttft_s(asked, "peer-colocated")}
    assert held["settings"]["goodput"]["alone_ttft_s"] == targets
    assert {each["contestant"] for each in held["goodput"]} == {"tandem", "peer-colocated"}
    for each in held["goodput"]:
        start, step = each["probes"][0]["rate"], tiny.effort.step
        highest = start * step * step
        assert [probe["rate"] for probe in each["probes"]] == [start, start * step, highest]
        assert [(probe["num_requests"], probe["share"]) for probe in each["probes"]] == [(4, 1.0)] * 3
        assert (each["goodput_per_s"], each["failed_from_per_s"]) == (highest, None)
    assert f"| chats | float32 | ≥ {highest:.2f} | not measured | ≥ {highest:.2f} |" in text(
        *({**each, "settings": {**each["settings"], "machine": MACHINE}} for each in (asked, held))
    )

    # Again there is nothing to do; with other sources ours alone is measured anew, and the targets stay.
    before = tiny.comparisons.path(mix).read_text()
    assert await tiny.measure() == 0
    assert tiny.comparisons.path(mix).read_text() == before
    (tmp_path / "tandem").mkdir()
    (tmp_path / "tandem" / "new.py").write_text("")
    assert [tiny.is_done(point) for point in tiny.points] == [False, False]
    assert await tiny.measure() == 0
    again = read(tiny.comparisons.path(mix))
    assert again["settings"] == held["settings"]
    (peer,) = (each for each in held["goodput"] if each["contestant"] == "peer-colocated")
    assert [each for each in again["goodput"] if each["contestant"] == "peer-colocated"] == [peer]

    # Another effort is another measurement.
    tiny.effort = replace(tiny.effort, max_probes=2)
    assert not tiny.is_done(mix)
    reason = r"goodput\.max_probes is 3 there and 2 here\): name another place with --out"
    with pytest.raises(ConfigError, match=reason) as refused:
        await tiny.measure()
    assert refused.value.key == "--out"


@pytest.mark.faults
@pytest.mark.processes
async def test_once_vllm_is_there_its_targets_hold_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_QUIET_S", 0.05)
    mix = Point("chats")
    ours = goodput(tmp_path, mix.alone, mix, names=["tandem"])
    assert await ours.measure() == 0
    assert ours.is_done(mix)
    both = goodput(tmp_path, mix.alone, mix)
    assert not both.is_done(mix)
    assert await both.measure() == 0
    asked, held = (read(both.comparisons.path(point)) for point in both.points)
    targets = {str(length): ttft_s for length, ttft_s in alone_ttft_s(asked, "peer-colocated")}
    assert held["settings"]["goodput"]["alone_ttft_s"] == targets
    assert len(held["goodput"]) == 2
    # Without it they stay.
    assert ours.is_done(mix)


def test_points_are_requests_alone_then_each_mix_for_each_type() -> None:
    names = [point.name for point in all_points()]
    assert names[:3] == ["82m-float32-alone", "82m-float32-chats", "82m-float32-code"]
    assert len(set(names)) == len({point.seed for point in all_points()}) == len(names) == 12
    assert [mix_of(point) for point in all_points()[:6]] == [None, *MIXES]


@pytest.mark.processes
def test_the_command_lists_its_points_and_refuses_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--out", str(tmp_path), "--servers", "tandem")
    assert command.main(["--dry-run", "--types", "bfloat16", "--mixes", "code", *given]) == 0
    assert capsys.readouterr().out.split() == ["point", "82m-bfloat16-alone", "82m-bfloat16-code"]
    assert command.main(["--servers", "nobody", "--out", str(tmp_path)]) == 1
    assert "no server is called nobody" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["--requests", "0", *given])
    assert "--requests" in capsys.readouterr().err
