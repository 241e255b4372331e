"""`python -m benchmarks predict`: real clusters on this host, and what simulations of them said."""

from __future__ import annotations

import asyncio
import json as json_format
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from benchmarks.origin import origin
from benchmarks.peers.models import MODEL_OPTIONS, made_model
from benchmarks.predict.curves import plot as drawn
from benchmarks.predict.known import known_case
from benchmarks.predict.loads import calibration, predicted
from benchmarks.predict.measure import Case, measure
from benchmarks.predict.real import ClusterSpec
from benchmarks.predict.section import COMMAND, FORMAT, section
from tandem.bench.report import json_file
from tandem.core.config import EMBEDDED_MODEL
from tandem.core.model_path import resolve_model

#: The models, by name, with how many requests there are of each load, and how many a second are much.
MODELS = {"embedded": (4.0, 40.0), "82m": (0.75, 3.0)}
_LONGEST = 1000
_KV_BYTES = {"embedded": 64 << 20, "82m": 512 << 20}


def run(json: Path | None, plot: Path | None, models: Sequence[str], num_repetitions: int) -> None:
    """Print the section, write everything to `json`, where models that were measured before stay, and draw all that is
    there in `plot`.

    Raises:
        ConfigError: it cannot be written, or is no such file.
        TandemError: a process ended, was not ready in time, or a request failed.
    """
    err = Console(stderr=True)
    held = json_file.read_format(json, FORMAT, COMMAND)["models"] if json is not None and json.exists() else {}
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, tempfile.TemporaryDirectory() as directory:
        for name in models:
            of_model = known_case(Path(directory)) if name == "simulated" else case(name, err)
            found = runner.run(measure(of_model, num_repetitions, lambda text: err.print(text, highlight=False)))
            held[name] = {**origin(), **found}
    content: dict[str, Any] = {"format": FORMAT, "models": held}
    Console(soft_wrap=True).print("\n".join(section(content)).strip(), highlight=False, markup=False)
    if json is not None:
        json_file.write(json, content)
    if plot is not None:
        plot.write_text(drawn(content))


def case(name: str, console: Console) -> Case:
    """2P2D of one model; a random one is made at first use."""
    model_dir = resolve_model(EMBEDDED_MODEL) if name == "embedded" else made_model(console, "82m", MODEL_OPTIONS)
    scale, rate = MODELS[name]
    alone, many = calibration(scale, _LONGEST, rate)
    shape = json_format.loads((model_dir / "config.json").read_text())
    model = {
        "layers": shape["num_hidden_layers"],
        "hidden_size": shape["hidden_size"],
        "kv_heads": shape["num_key_value_heads"],
        "head_dim": shape["head_dim"],
        "kv_dtype": "float32",
    }
    token_bytes = 2 * 4 * model["layers"] * model["kv_heads"] * model["head_dim"]
    pool = {"workers": 2, "tokens": _KV_BYTES[name] // token_bytes}
    scenario = {"prefill": pool, "decode": pool, "model": model, "card": {"is_cpu": True}}
    spec = ClusterSpec(model_dir, kv_bytes=_KV_BYTES[name])
    return Case(name, spec, _LONGEST, alone, many, predicted(scale, _LONGEST, rate), scenario)
