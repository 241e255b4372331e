"""Clusters of simulated engines: one small one, and the section of the page."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks import docs
from benchmarks.simulated.command import SimulatedSizes, measure
from benchmarks.simulated.section import section
from benchmarks.simulated.waterfalls import Waterfalls, judged
from tandem.core.errors import TandemError


@pytest.mark.processes
@pytest.mark.faults
@pytest.mark.timeout(180)
def test_a_small_cluster_takes_its_steps_and_is_shown() -> None:
    sizes = SimulatedSizes(clusters=(1,), num_seqs=3, num_input=40, num_output=20, num_rounds=2, quiet_s=0.1)
    told: list[str] = []
    content = asyncio.run(measure(sizes, told.append))
    assert told == ["1 prefill and 1 decode workers, 3 requests at once"]
    (run,) = content["runs"]
    figures = run["figures"]
    assert figures["tpot_s"] >= 0.0199, "no step takes less than its time"
    assert figures["output_tokens_per_s"] <= 3 / 0.02
    assert all(figures[name] > 0 for name in ("router_s_a_token", "decode_s_a_token", "ttft_s"))
    assert figures["waterfalls"]["num"] == 6
    page = "\n".join(section(content))
    assert "| 1P1D" in page
    assert f"| {figures['tpot_s'] * 1e3:.1f} |" in page
    assert page in docs.page(None, of_simulated=content)


def told(*ends_s: float, age_s: float, gap_s: float = 0.0) -> dict[str, object]:
    begins_s = [0.0, *(end_s + gap_s for end_s in ends_s[:-1])]
    spans = [{"name": "queue", "begin_s": a, "end_s": b} for a, b in zip(begins_s, ends_s, strict=True)]
    return {"id": "abc", "spans": spans, "age_s": age_s}


def test_parts_without_a_gap_that_add_up_are_measured_beside_what_the_client_waited() -> None:
    requests = [(1.01, told(0.4, 1.0, age_s=1.0)), (1.02, told(0.2, 1.0, age_s=1.0)), (1.0, told(1.0, age_s=1.0))]
    assert judged(requests) == Waterfalls(3, pytest.approx(0.01 / 1.01), pytest.approx(0.02 / 1.02))


def test_a_request_of_whose_time_more_than_two_percent_have_no_name_is_an_error() -> None:
    with pytest.raises(TandemError, match=r"of the 1\.030 s of request abc no part names 0\.030 s"):
        judged([(1.0, told(1.0, age_s=1.0)), (1.03, told(0.4, 1.0, age_s=1.0))])
    assert judged([(0.01, told(0.009, age_s=0.009))]).num == 1, "a short one may lack what a tick hides"


@pytest.mark.parametrize("one", [told(0.4, 1.0, age_s=1.0, gap_s=0.1), told(0.4, 0.9, age_s=1.0)])
def test_parts_that_do_not_add_up_are_an_error(one: dict[str, object]) -> None:
    with pytest.raises(TandemError, match=r"request abc do not add up to its 1\.000 s"):
        judged([(1.0, one)])
