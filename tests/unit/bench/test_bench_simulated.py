"""Clusters of simulated engines: one small one, and the section of the page."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks import docs
from benchmarks.simulated.command import SimulatedSizes, measure
from benchmarks.simulated.section import section


@pytest.mark.processes
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
    page = "\n".join(section(content))
    assert "| 1P1D" in page
    assert f"| {figures['tpot_s'] * 1e3:.1f} |" in page
    assert page in docs.page(None, of_simulated=content)
