"""What single parts of the system cost, beside their goals: from what was measured to figures. Pure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.parts.handoff import Admissions, Transfers
from benchmarks.parts.placement import PlacementCost
from benchmarks.parts.router import RouterTtft, Streamed
from benchmarks.parts.routers import token_cpu_s
from benchmarks.parts.serve import Idle
from benchmarks.peers.figures import Goal
from tandem.bench.report.summary import Distribution, distribution

FORMAT = "tandem-parts/1"

#: What an admission may take beyond one step, in seconds.
ADMISSION_SLACK_S = 0.005

#: Shorter times are shown in microseconds.
_SHOWN_AS_US_S = 1e-4

#: Units of figures.
SHARE, CORES, SECONDS, TOKENS_PER_S = "share", "cores", "s", "tokens/s"


@dataclass(frozen=True)
class Part:
    """One thing that is measured.

    Attributes:
        unit: `SHARE`, `CORES`, `SECONDS` or `TOKENS_PER_S`.
        against: what the value is a share of, if it is one.
    """

    name: str
    title: str
    unit: str
    against: str


EXPOSED = Part(
    "exposed",
    "exposed transfer: end of prefill's computation to verified pages at decode",
    SHARE,
    "of a raw write of the same extents",
)
BANDWIDTH = Part(
    "bandwidth",
    "handoff bandwidth, first post to verified pages; receiver's digests included, sender's taken before",
    SHARE,
    "of the bandwidth of a raw write of the same extents",
)
ADMISSION = Part("admission", "admission at decode, from when it takes up the commit, p99", SECONDS, "")
ROUTER_TTFT = Part("ttft", "what the router adds to TTFT, 1 request in flight, p50", SECONDS, "")
STREAMING = Part("streaming", "tokens that one router process streams, 1 event a token", TOKENS_PER_S, "")
SHARING = Part("routers", "CPU of a streamed token: four routers that share a port", SHARE, "of one router's")
PLACEMENT = Part("placement", "the router places a request among the most workers that were tried, p50", SECONDS, "")
IDLE = Part("idle", "idle: CPU of all of Tandem's own processes", CORES, "")
STARTUP = Part("startup", "`tandem serve` to its first answer, warm", SECONDS, "")

PARTS = (EXPOSED, BANDWIDTH, ADMISSION, ROUTER_TTFT, STREAMING, SHARING, PLACEMENT, IDLE, STARTUP)


@dataclass(frozen=True)
class Figure:
    """One part's figure.

    Attributes:
        value: in the part's unit.
        how: what was measured, in a sentence.
        samples: what the value was made of, by name; seconds where the name says nothing else.
        facts: what else belongs to it.
    """

    part: Part
    value: float
    goal: Goal
    how: str
    samples: Mapping[str, Distribution] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            **asdict(self.part),
            "value": self.value,
            "goal": asdict(self.goal),
            "is_reached": self.goal.is_reached_by(self.value),
            "how": self.how,
            "samples": {name: asdict(found) for name, found in self.samples.items()},
            "facts": dict(self.facts),
        }


# --- from measurements ------------------------------------------------------------------------------------------------


def exposed_figure(measured: Transfers, prompt: int) -> Figure:
    """How much of a serial send is left when the pages go out while the prompt is computed."""
    return Figure(
        EXPOSED,
        statistics.median(measured.exposed_s) / statistics.median(measured.raw_s),
        Goal(0.25, is_lower=False),
        f"prompts of {prompt:,} tokens one at a time, each computed and sent; median over median",
        {
            "exposed": _of(measured.exposed_s),
            "from there to the acknowledgement": _of(measured.exposed_answer_s),
            "raw write": _of(measured.raw_s),
            "prefill computation": _of(measured.compute_s),
        },
        {"bytes": measured.num_bytes, "descriptors of the raw write": measured.raw_descriptors},
    )


def bandwidth_figure(measured: Transfers, prompt: int) -> Figure:
    """How fast a handoff is whose pages are all there before its first post."""
    handoff_s, raw_s = statistics.median(measured.handoff_s), statistics.median(measured.raw_s)
    return Figure(
        BANDWIDTH,
        raw_s / handoff_s,
        Goal(0.85, is_lower=True),
        f"prompts of {prompt:,} tokens that were computed before their grant came; median over median",
        {
            "handoff": _of(measured.handoff_s),
            "from there to the acknowledgement": _of(measured.handoff_answer_s),
            "raw write": _of(measured.raw_s),
        },
        {
            "bytes": measured.num_bytes,
            "handoff bytes/s": measured.num_bytes / handoff_s,
            "raw bytes/s": measured.num_bytes / raw_s,
            "descriptors of the handoff": measured.num_descriptors,
            "descriptors of the raw write": measured.raw_descriptors,
        },
    )


def admission_figure(measured: Admissions, num_running: int) -> Figure:
    """How long a request whose pages have come waits for its place in the batch."""
    admission, step = _of(measured.admission_s), _of(measured.step_s)
    return Figure(
        ADMISSION,
        admission.p99,
        Goal(step.p50 + ADMISSION_SLACK_S, is_lower=False),
        f"short prompts, one after the other, beside {num_running} generations; the goal is the median step and 5 ms",
        {"admission": admission, "step": step},
    )


def ttft_figure(measured: RouterTtft, prompt_chars: int) -> Figure:
    """What is left of TTFT without what prefill took."""
    added = _of(measured.added_s)
    return Figure(
        ROUTER_TTFT,
        added.p50,
        Goal(0.003, is_lower=False),
        f"texts of {prompt_chars} characters, workers that answer at once; the client's TTFT without the worker's part",
        {"added": added, "client's TTFT": _of(measured.client_s), "worker's part": _of(measured.workers_s)},
    )


def streaming_figure(rounds: Sequence[Streamed], num_streams: int, num_tokens: int) -> Figure:
    """The median round's tokens a second."""
    rates = [streamed.tokens_per_s for streamed in rounds]
    return Figure(
        STREAMING,
        statistics.median(rates),
        Goal(10_000, is_lower=True),
        f"{num_streams} streams of {num_tokens} tokens, workers that answer at once, a raw reader in another process",
        {"tokens/s": _of(rates)},
        {
            "router's CPU, cores": statistics.median(streamed.cpu_share for streamed in rounds),
            "reader's CPU, cores": statistics.median(streamed.reader_cpu_share for streamed in rounds),
        },
    )


def sharing_figure(measured: Mapping[int, Sequence[Streamed]], num_streams: int, num_tokens: int) -> Figure:
    """The most routers against one; of each number the tokens a second too, which the cores that there are bound."""
    facts = {}
    for num, rounds in measured.items():
        facts[f"{num}: tokens/s"] = statistics.median(streamed.whole_tokens_per_s for streamed in rounds)
        facts[f"{num}: CPU of a token, µs"] = token_cpu_s(rounds) * 1e6
        facts[f"{num}: routers' CPU, cores"] = statistics.median(streamed.cpu_share for streamed in rounds)
        facts[f"{num}: reader's CPU, cores"] = statistics.median(streamed.reader_cpu_share for streamed in rounds)
    return Figure(
        SHARING,
        token_cpu_s(measured[max(measured)]) / token_cpu_s(measured[1]),
        Goal(1.15, is_lower=False),
        f"{num_streams} streams of {num_tokens} tokens at {', '.join(map(str, measured))} routers on one port, each "
        "with workers of its own that answer at once, a raw reader in another process; of the rounds the one in "
        "which a token cost least",
        facts=facts,
    )


def placement_figure(measured: PlacementCost) -> Figure:
    """The cost with the most workers; with fewer beside it."""
    samples: dict[str, Distribution] = {}
    for name, found in (
        ("placement", measured.placement_s),
        ("whole request", measured.request_s),
        ("status", measured.status_s),
    ):
        samples |= {f"{name}, {num:,} workers": _of(seconds) for num, seconds in found.items()}
    most = max(measured.placement_s)
    return Figure(
        PLACEMENT,
        statistics.median(measured.placement_s[most]),
        Goal(50e-6, is_lower=False),
        f"{most:,} scripted workers; choice of both and what is noted of them, without what is sent",
        samples,
    )


def idle_figure(measured: Idle, idle_s: float) -> Figure:
    """CPU seconds a second of all that is Tandem's own."""
    own: defaultdict[str, float] = defaultdict(float)
    for name, share in measured.own_cpu:
        own[f"{name}, cores"] += share
    return Figure(
        IDLE,
        sum(share for _, share in measured.own_cpu),
        Goal(0.03, is_lower=False),
        f"`tandem serve`, 1 prefill and 1 decode worker, {idle_s:g} s after some load",
        facts={**own, f"Ray's own {measured.num_ray_processes} processes, cores": measured.ray_cpu},
    )


def startup_figure(start_s: Sequence[float]) -> Figure:
    """The median start."""
    return Figure(
        STARTUP,
        statistics.median(start_s),
        Goal(15.0, is_lower=False),
        "the embedded model, after a start that does not count; from the process's start to a whole answer",
        {"start": _of(start_s)},
    )


def _of(values: Sequence[float]) -> Distribution:
    found = distribution(values)
    if found is None:
        raise ValueError("nothing was measured")
    return found


# --- for readers ------------------------------------------------------------------------------------------------------


def shown(value: float, unit: str) -> str:
    """`24 %`, `3.21 ms`, `12.3 µs`, `12,345 tokens/s`."""
    if unit == SHARE:
        return f"{value * 100:,.0f} %"
    if unit == CORES:
        return f"{value * 100:.2f} % of a core"
    if unit == SECONDS and 0 < value < _SHOWN_AS_US_S:
        return f"{value * 1e6:,.1f} µs"
    if unit == SECONDS:
        return f"{value:,.2f} s" if value >= 1 else f"{value * 1e3:,.2f} ms"
    return f"{value:,.0f} {unit}"


def shown_goal(goal: Goal, unit: str) -> str:
    """`≤ 25 %`."""
    return f"{'≥' if goal.is_lower else '≤'} {shown(goal.bound, unit)}"


def sample_unit(name: str) -> str:
    """The unit of the samples of this name."""
    return name if name == TOKENS_PER_S else SECONDS


def shown_fact(value: float) -> str:
    """A number whose name says its unit."""
    return f"{value:,.4g}" if isinstance(value, float) and abs(value) < 1e4 else f"{value:,.0f}"
