"""A real cluster whose steps take known times, so that what is left to be wrong is all beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.predict.loads import Load
from benchmarks.predict.measure import Case
from benchmarks.predict.real import ClusterSpec
from tandem.core.config import EMBEDDED_MODEL
from tandem.core.model_path import resolve_model
from tandem.sim.load import Lengths

_TIMES = {"base_ms": 30.0, "token_us": 200.0, "row_us": 1000.0}
# Targets of the real cluster are those of the host's processors, and decide how prompts are cut: the simulated one has
# the same, and both have the limits of steps that go with them.
_CARD = {"is_cpu": True}
_TOKENS = 20_000


def known_case(directory: Path) -> Case:
    """2P2D of simulated engines (docs/simulator.md); `directory` gets the file of their times."""
    pools = {role: {"workers": 2, "tokens": _TOKENS} for role in ("prefill", "decode")}
    settings = {"scheduling": {"max_queued_requests": 1000, "max_num_seqs": 8}}
    lengths, outputs = Lengths(300, 0.8), Lengths(24, 0.6)
    return Case(
        "simulated",
        ClusterSpec(resolve_model(EMBEDDED_MODEL), config=_simulated_engine(directory, settings)),
        longest=1000,
        alone=Load("alone", 6, Lengths(100), Lengths(8), num_clients=1),
        many=Load("many", 60, lengths, outputs, num_clients=12),
        # Half of them is the middle of those that get the places of the first ones: no edge of what is placed at once.
        predicted=(Load("burst", 48, lengths, outputs, burst=48, every_s=1.0),),
        scenario={**pools, "tandem": settings, "card": _CARD},
        times=_TIMES,
    )


def _simulated_engine(directory: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The configuration of workers that take these times."""
    file = directory / "times.yaml"
    pools = {role: {"tokens": _TOKENS} for role in ("prefill", "decode")}
    file.write_text(json.dumps({**pools, "times": "fitted", "fitted": _TIMES, "card": _CARD}))  # JSON is YAML
    return {**settings, "model": {"engine": "simulated", "time_model": str(file)}}
