"""Goodput on mixes of short and long prompts: what is asked, what a request must keep, the search, and the section."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import pytest
from bench_peers import Peer, serving, well_behaved
from rich.console import Console

from benchmarks.peers import idle
from benchmarks.peers.idle import Idleness
from tandem.bench.goodput import GoodputSearch, ProbeLength, search_goodput
from tandem.bench.load.records import Slo
from tandem.bench.load.workload import fixed_lengths
from tandem.bench.rate_search import RateSearch
from tandem.bench.report.progress import shown
from tandem.bench.session import Session, Target, Workload
from tandem.core.errors import TandemError

QUIET = Console(file=io.StringIO())

# --- a search's probes ------------------------------------------------------------------------------------------------


def test_a_probe_has_requests_enough_and_takes_time_enough_but_has_an_end() -> None:
    length = ProbeLength(60, 20.0, 1200)
    assert [length.num(rate) for rate in (0.1, 1.0, 3.0, 3.01, 10.0, 60.0, 1e6)] == [60, 60, 60, 61, 200, 1200, 1200]


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


async def test_no_probe_begins_when_the_time_is_up() -> None:
    async with serving(Peer(well_behaved)) as url:
        session = Session(Target(url), Workload(fixed_lengths(4, 8, 2), range(128, 256), num_warm_up=0))
        await session.open()
        search = GoodputSearch(Slo(60.0, 60.0), 0.9, RateSearch(100.0), max_s=1e-6)
        await search_goodput(session, search, lambda title, total: shown(title, total, console=QUIET))
    assert (len(search.probes), search.rates.is_done, search.is_done) == (1, False, True)
    assert search.as_json()["goodput_per_s"] == 100.0
    assert search.as_json()["failed_from_per_s"] is None


# --- a server that is idle --------------------------------------------------------------------------------------------


async def test_a_server_is_idle_when_a_request_is_as_fast_as_it_was_alone() -> None:
    """It is slow for as long as something holds it, whatever it says of itself."""
    slow = 0

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        nonlocal slow
        if slow:
            slow -= 1
            await asyncio.sleep(2 * idle._FACTOR * idleness.alone_s + 2 * idle._SLACK_S)
        return await well_behaved(body, writer)

    peer = Peer(answer)
    async with serving(peer) as url, Idleness.measured(url, range(128, 256)) as idleness:
        assert 0 < idleness.alone_s < 1
        slow, before = 3, idleness.num_asked
        await idleness.wait()
        assert slow == 0
        assert idleness.num_asked - before >= 4
    prompts = [tuple(body["prompt"]) for body in peer.bodies]
    assert len(set(prompts)) == len(prompts), "none is in a prefix cache"


async def test_a_server_that_never_becomes_idle_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "_SETTLE_S", 0.2)
    async with serving(Peer(well_behaved)) as url, Idleness.measured(url, range(128, 256)) as idleness:
        idleness.alone_s = -1.0  # nothing is as fast
        with pytest.raises(TandemError, match=r"a request alone still takes more than .* after the load has ended"):
            await idleness.wait()
