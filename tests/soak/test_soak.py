"""`make soak`: mixed load on 2P2D under `tandem serve`, with a random fault every five seconds.

SOAK_MINUTES=10   how long
SOAK_SEED=1       which faults and requests
SOAK_REPORT=FILE  where the figures go as JSON
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.client import complete
from tests.scenarios.faults.ray_site import RaySite, ray_site
from tests.scenarios.faults.site import assert_same
from tests.soak.chaos import Chaos
from tests.soak.load import Clients, Job, Tally, make_jobs
from tests.soak.memory import MemoryWatch, Trend

MINUTES = float(os.environ.get("SOAK_MINUTES", "10"))
SEED = int(os.environ.get("SOAK_SEED", "1"))
NUM_CLIENTS = 6
NUM_JOBS = 48
FLAT_MIB = 10.0
"""A process grows by no more than this in the second half of its time: over ten minutes, 2 MiB a minute."""
LONG_S = 100.0
"""Processes that lived less say nothing about memory: in the first minute each kind of request has its first time."""
QUIET_S = LONG_S + 50.0
"""Load without faults at the end, so that a process of every role lives long enough."""
ROLES = {"prefill", "decode", "router", "supervisor"}
MAX_ERROR_SHARE = 0.1
"""Of requests may end in a typed error, while every five seconds a process of six is struck."""
CACHE = {"memory_bytes": 48 << 20, "preallocate": True}
"""Of each worker: a process that takes the memory of its pages when they are first written grows for minutes."""

pytestmark = [pytest.mark.soak, pytest.mark.timeout(MINUTES * 60 + 600)]


def test_no_answer_is_wrong_none_hangs_and_nothing_leaks(tmp_path: Path) -> None:
    with ray_site(tmp_path, limits={}, cache=CACHE) as site:  # limits as shipped
        jobs = make_jobs(site.url, NUM_JOBS)
        cluster = site.prepare()
        census = site.census()
        chaos = Chaos(site, SEED)
        clients = Clients(site.url, jobs, NUM_CLIENTS, SEED, chaos.router_struck_since)
        with MemoryWatch(site) as memory, clients:
            with chaos:
                time.sleep(MINUTES * 60)  # the length of the soak
            time.sleep(QUIET_S)
        cluster = site.settled()
        report = make_report(clients.tally, chaos, memory.trends(LONG_S))
        write(report)
        assert clients.tally.wrong == []
        assert clients.tally.hung == []
        assert clients.tally.outcomes["same"] > MINUTES * 10, clients.tally.outcomes
        assert clients.tally.error_share < MAX_ERROR_SHARE, clients.tally.outcomes
        site.check_baseline(cluster, census, timeout_s=15.0)
        assert_all_right(site, jobs)
        trends = memory.trends(LONG_S)
        assert {trend.role for trend in trends} >= ROLES
        assert [trend for trend in trends if trend.grown_mib > FLAT_MIB] == []


def assert_all_right(site: RaySite, jobs: list[Job]) -> None:
    """After all of it the cluster answers as at its beginning."""
    for job in jobs:
        assert_same(complete(site.url, job.prompt, **job.fields), job.expected)
    site.prepare()


def make_report(tally: Tally, chaos: Chaos, trends: list[Trend]) -> dict[str, Any]:
    return {
        "minutes": MINUTES,
        "seed": SEED,
        "requests": sum(tally.outcomes.values()),
        "wrong": len(tally.wrong),
        "hung": len(tally.hung),
        "error_share": round(tally.error_share, 4),
        "tokens": tally.num_tokens,
        "slowest_request_s": round(tally.slowest_s, 1),
        "outcomes": dict(tally.outcomes.most_common()),
        "faults": dict(chaos.strikes.most_common()),
        "memory": [asdict(trend) for trend in trends],
    }


def write(report: dict[str, Any]) -> None:
    """As JSON where wanted, and as lines for people."""
    if target := os.environ.get("SOAK_REPORT"):
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        Path(target).write_text(json.dumps(report, indent=1) + "\n")
    for name, value in report.items():
        if isinstance(value, dict):
            print(f"{name:>18}  " + ", ".join(f"{key} {count}" for key, count in value.items()))
        elif not isinstance(value, list):
            print(f"{name:>18}  {value}")
    print(f"{'memory':>18}  process, minutes watched, MiB at the end, MiB a minute")
    for trend in report["memory"]:
        minutes = trend["seconds"] / 60
        print(f"{'':>18}  {trend['role']}  {minutes:.1f}  {trend['end_mib']}  {trend['mib_per_minute']:+}")
