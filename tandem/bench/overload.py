"""How a router bears overload: `tandem bench overload --url http://127.0.0.1:8000 --json OUT`.

    capacity   the highest Poisson rate of requests without a 429, by bisection
    normal     the medians of TTFT and E2E at 80 % of it
    overload   20 times the capacity for a minute, open loop: nobody waits for an answer before sending
    recovery   80 % again; the time until a second's medians lie within the normal's 95th percentiles and nothing is
               refused, for two seconds in a row

The generator shares its cores with a local cluster; its CPU time is in the report, as is the router's, with its memory.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from tandem.bench.load.http_client import NO_SOCKET, LoadClient, Outcome
from tandem.bench.process_watch import Usage, listener_on, watched
from tandem.bench.rate_search import RateSearch
from tandem.bench.report.summary import percentile
from tandem.bench.server import connected
from tandem.core.errors import TandemError

_OK, _REFUSED = 200, 429
_NORMAL_SHARE = 0.8
_WINDOW_S = 1.0
_WARM_UP = 8
_CLOSED_LOOP = 16
_PRECISION = 1.08


@dataclass(frozen=True)
class Plan:
    """How long each part takes and what is asked; seconds."""

    prompt_words: int = 64
    max_tokens: int = 32
    probe_s: float = 12.0
    num_probes: int = 6
    normal_s: float = 15.0
    overload_s: float = 60.0
    overload_factor: float = 20.0
    recovery_s: float = 15.0
    drain_s: float = 30.0  # beyond the end of a part, for the last answers
    max_sockets: int = 1024
    seed: int = 1


@dataclass
class Phase:
    """The outcomes of one stretch of load."""

    rate: float  # requests a second that were meant
    began_s: float
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def accepted(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.status == _OK]

    @property
    def num_refused(self) -> int:
        return sum(outcome.status == _REFUSED for outcome in self.outcomes)

    def report(self) -> dict[str, Any]:
        """Counts and latencies (seconds) as plain data."""
        sent = [outcome for outcome in self.outcomes if outcome.status != NO_SOCKET]
        span_s = max((o.sent_s for o in self.outcomes), default=self.began_s) - self.began_s
        refused = [outcome for outcome in sent if outcome.status == _REFUSED]
        return {
            "rate": round(self.rate, 3),
            "rate_sent": round(len(sent) / span_s, 3) if span_s else 0.0,
            "num_by_status": {str(k): v for k, v in sorted(Counter(o.status for o in self.outcomes).items())},
            "ttft_s": _summary([o.ttft_s for o in self.accepted]),
            "e2e_s": _summary([o.e2e_s for o in self.accepted]),
            "refusal_s": _summary([o.e2e_s for o in refused]),
            "retry_after_s": {str(k): v for k, v in sorted(Counter(o.retry_after_s for o in refused).items(), key=str)},
        }


class Generator:
    """Open-loop load of equal requests with prompts that share no prefix."""

    def __init__(self, client: LoadClient, model: str, plan: Plan) -> None:
        self._client = client
        self._plan = plan
        self._random = random.Random(plan.seed)
        words = ["lorem", "ipsum", "dolor", "sit", "amet", "sed", "nunc", "urna"]
        self._text = " ".join(words[n % len(words)] for n in range(plan.prompt_words - 1))
        self._fields = {
            "model": model, "max_tokens": plan.max_tokens, "ignore_eos": True, "temperature": 0, "stream": True
        }  # fmt: skip

    def message(self) -> bytes:
        """One request; its first word is its own, so that no prefix cache holds it."""
        prompt = f"{self._random.getrandbits(64):x} {self._text}"
        body = json.dumps({**self._fields, "prompt": prompt}).encode()
        return self._client.message("POST", "/v1/completions", body)

    async def poisson(self, rate: float, duration_s: float) -> Phase:
        """Send at `rate` for `duration_s`, then wait for the last answer."""
        phase = Phase(rate, time.monotonic())
        next_s, end_s = phase.began_s, phase.began_s + duration_s
        while next_s < end_s:
            delay_s = next_s - time.monotonic()
            if delay_s > 0:
                await asyncio.sleep(delay_s)
            # All that is due: at thousands a second one timer serves several.
            now_s = time.monotonic()
            while next_s <= now_s and next_s < end_s:
                self._client.send(self.message(), phase.outcomes.append)
                next_s += self._random.expovariate(rate)
            await asyncio.sleep(0)
        await self._client.wait_none_under_way(self._plan.drain_s)
        return phase

    async def closed_loop(self, num_clients: int, duration_s: float) -> Phase:
        """`num_clients` that each wait for an answer before the next request."""
        phase = Phase(0.0, time.monotonic())

        async def client() -> None:
            while time.monotonic() < phase.began_s + duration_s:
                phase.outcomes.append(await self._client.request(self.message()))
                if phase.outcomes[-1].status != _OK:
                    await asyncio.sleep(0.05)

        clients = [asyncio.create_task(client()) for _ in range(num_clients)]
        _, late = await asyncio.wait(clients, timeout=duration_s + self._plan.drain_s)
        if late:
            await self._client.wait_none_under_way(0)
        await asyncio.gather(*clients)
        return phase


async def find_capacity(generator: Generator, plan: Plan) -> tuple[float, list[dict[str, Any]]]:
    """The highest rate at which a probe met no 429, and the probes.

    The search begins at what a few clients get that wait for their answers, doubles while nothing is refused, then
    bisects (geometrically) until the bounds lie within 8 % or the probes are spent.
    """
    await generator.closed_loop(1, 1.0)
    closed = await generator.closed_loop(_CLOSED_LOOP, plan.probe_s / 2)
    rate = max(1.0, len(closed.accepted) / (time.monotonic() - closed.began_s))
    search, probes = RateSearch(rate, precision=_PRECISION, max_probes=plan.num_probes), []
    while not search.is_done:
        phase = await generator.poisson(search.rate, plan.probe_s)
        is_good = phase.num_refused == 0 and len(phase.accepted) == len(phase.outcomes)
        probes.append({"is_good": is_good, **phase.report()})
        say(f"probe at {search.rate:.1f}/s: {'nothing refused' if is_good else f'{phase.num_refused} refused'}")
        search.tell(went_well=is_good)
    if not search.best:
        raise TandemError(f"every probe down to {search.worst:.2f} requests a second met a refusal: is it idle?")
    return search.best, probes


def seconds_until_normal(recovery: Phase, normal: Phase) -> float | None:
    """From the end of the overload to the first of two normal seconds in a row; `None`: it never came.

    A second is normal when all requests sent in it were accepted, and its medians lie within the normal's 95th
    percentiles. What came to be refused or slow after its second counts against its second.
    """
    limits = [percentile(sorted(getattr(o, name) for o in normal.accepted), 95) for name in ("ttft_s", "e2e_s")]
    num_windows = int(max((o.sent_s for o in recovery.outcomes), default=recovery.began_s) - recovery.began_s)
    in_a_row = 0
    for number in range(num_windows):
        begin_s = recovery.began_s + number * _WINDOW_S
        window = [o for o in recovery.outcomes if begin_s <= o.sent_s < begin_s + _WINDOW_S]
        in_a_row = in_a_row + 1 if _is_normal(window, limits) else 0
        if in_a_row == 2:
            return (number - 1) * _WINDOW_S
    return None


def _is_normal(window: Sequence[Outcome], limits: Sequence[float]) -> bool:
    if not window or any(o.status != _OK for o in window):
        return False
    medians = statistics.median(o.ttft_s for o in window), statistics.median(o.e2e_s for o in window)
    return all(median <= limit for median, limit in zip(medians, limits, strict=True))


async def measure(url: str, plan: Plan, *, model: str | None = None, api_key: str = "") -> dict[str, Any]:
    """Run all parts against the router at `url`; plain data for JSON.

    Raises:
        ConfigError: nobody answers there, or it refuses the key.
        TandemError: even a trickle of requests is refused.
    """
    client = LoadClient(url, max_sockets=plan.max_sockets, api_key=api_key)
    generator = Generator(client, (await connected(client, url, model)).name, plan)
    router = listener_on(client.port)
    for _ in range(_WARM_UP):
        await generator.closed_loop(1, 0.0)
    capacity, probes = await find_capacity(generator, plan)
    normal = await generator.poisson(_NORMAL_SHARE * capacity, plan.normal_s)
    say(f"capacity {capacity:.1f}/s; normal: {_brief(normal)}")
    factor = plan.overload_factor
    async with watched(psutil.Process()) as own, watched(router or psutil.Process()) as routers:
        overload = await generator.poisson(factor * capacity, plan.overload_s)
        recovery = await generator.poisson(_NORMAL_SHARE * capacity, plan.recovery_s)
    say(f"overload: {_brief(overload)}, {overload.num_refused} refused")
    client.close()
    return {
        "plan": vars(plan),
        "num_cores": os.cpu_count(),
        "capacity_per_s": round(capacity, 3),
        "probes": probes,
        "normal": normal.report(),
        "overload": overload.report(),
        "recovery": recovery.report(),
        "latency_ratio": {name: _ratio(overload, normal, name) for name in ("ttft_s", "e2e_s")},
        "normal_again_after_s": seconds_until_normal(recovery, normal),
        "generator": _usage(own),
        "router": _usage(routers) if router is not None else None,
    }


def _ratio(overload: Phase, normal: Phase, name: str) -> float | None:
    """The accepted's median under overload over the normal one."""
    over, usual = ([getattr(o, name) for o in phase.accepted] for phase in (overload, normal))
    return round(statistics.median(over) / statistics.median(usual), 3) if over and usual else None


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "rss_before_mib": usage.rss_before_bytes >> 20,
        "rss_max_mib": usage.rss_max_bytes >> 20,
        "rss_after_mib": usage.rss_after_bytes >> 20,
        "cpu_share": round(usage.cpu_share, 3),
    }


def _summary(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    ordered = sorted(values)
    return {f"p{percent}": round(percentile(ordered, percent), 6) for percent in (50, 90, 95, 99)}


def _brief(phase: Phase) -> str:
    ttft, e2e = (_summary([getattr(o, name) for o in phase.accepted]) for name in ("ttft_s", "e2e_s"))
    if ttft is None or e2e is None:
        return "nothing accepted"
    return f"{len(phase.accepted)} accepted, median TTFT {ttft['p50'] * 1e3:.0f} ms, E2E {e2e['p50'] * 1e3:.0f} ms"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
