"""A real cluster whose steps take known times, beside a simulation of it: they must queue, place and batch alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.predict.loads import Load
from benchmarks.predict.measure import Case, measure
from benchmarks.predict.real import ClusterSpec
from tandem.core.config import EMBEDDED_MODEL
from tandem.core.model_path import resolve_model
from tandem.sim.load import Lengths

_TIMES = {"base_ms": 30.0, "token_us": 200.0, "row_us": 1000.0}
# What is beside steps takes a core's time too, and others may use the cores of a test.
_NEAR = {"output_tokens_per_s": 0.12, "e2e_s": 0.12, "tpot_s": 0.12, "ttft_p50_s": 0.3}


@pytest.mark.alone
@pytest.mark.timeout(180)
async def test_a_simulation_says_what_a_cluster_of_known_steps_does(tmp_path: Path) -> None:
    pools = {role: {"workers": 2, "tokens": 20_000} for role in ("prefill", "decode")}
    settings = {"scheduling": {"max_queued_requests": 1000, "max_num_seqs": 8}}
    lengths, outputs = Lengths(300, 0.8), Lengths(24, 0.6)
    case = Case(
        "simulated",
        ClusterSpec(resolve_model(EMBEDDED_MODEL), config=simulated_engine(tmp_path, settings)),
        longest=1000,
        alone=Load("alone", 6, Lengths(100), Lengths(8), num_clients=1),
        many=Load("many", 60, lengths, outputs, num_clients=12),
        predicted=(Load("burst", 40, lengths, outputs, burst=40, every_s=1.0),),
        scenario={**pools, "tandem": settings},
        times=_TIMES,
    )
    content = await measure(case, 1, lambda _: None)
    for load in (content["calibration"][1], *content["loads"]):
        for name, near in _NEAR.items():
            assert abs(load["figures"][name]["off"]) < near, (load["load"], name, load["said"], load["measured"])


def simulated_engine(directory: Path, settings: dict[str, object]) -> dict[str, object]:
    """The configuration of workers that take these times."""
    file = directory / "times.yaml"
    fitted = ", ".join(f"{name}: {value}" for name, value in _TIMES.items())
    pools = "".join(f"{role}: {{tokens: 20000}}\n" for role in ("prefill", "decode"))
    file.write_text(f"{pools}times: fitted\nfitted: {{{fitted}}}\n")
    return {**settings, "model": {"engine": "simulated", "time_model": str(file)}}
