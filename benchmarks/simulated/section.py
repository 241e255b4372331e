"""Clusters of simulated engines, as a section of `docs/benchmarks.md`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.text import wrapped
from tandem.bench.other_load import QUIET_CORES

FORMAT = "tandem-simulated/1"
COMMAND = "`python -m benchmarks simulated`"


def section(content: dict[str, Any]) -> Iterator[str]:
    """A row for each cluster."""
    settings, machine = content["settings"], content["machine"]
    yield ""
    yield "## Clusters whose engine only takes time"
    yield ""
    yield from wrapped(
        f"Measured by {COMMAND} on {content['date'][:10]} ({machine['cpu']}, {machine['num_cores']} cores; sources "
        f"{content['code']['digest']}): real routers and workers, as plain processes, whose steps take "
        f"{settings['step_ms']:g} ms and compute nothing. {settings['num_seqs']} requests at once for each decode "
        f"worker, {settings['num_input']} tokens in, {settings['num_output']} out, streamed. What a step takes beyond "
        "its time is what all beside the model costs, while it shares these cores with the load generator. Unnamed is "
        "what of the time that a client waited is no part of the request's waterfall: the median and the most of the "
        "last thousand requests."
    )
    yield ""
    yield (
        "| workers | tokens/s | TPOT, ms | of the model's | p99 ITL, ms | router, µs a token | decode, µs a token "
        "| cores: router · decode · prefill · load generator | unnamed, % |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for run in content["runs"]:
        figures, num = run["figures"], run["num_of_each"]
        cores = figures["cores"]
        shares = " · ".join(f"{cores[name]:.2f}" for name in ("router", "decode", "prefill", "load generator"))
        busy = "" if run["other_cores"] < QUIET_CORES else " (beside other load)"
        yield (
            f"| {num}P{num}D{busy} | {figures['output_tokens_per_s']:,.0f} | {figures['tpot_s'] * 1e3:.1f} "
            f"| {figures['tpot_s'] * 1e3 / settings['step_ms']:.2f} | {figures['itl_p99_s'] * 1e3:.1f} "
            f"| {figures['router_s_a_token'] * 1e6:.1f} | {figures['decode_s_a_token'] * 1e6:.1f} | {shares} "
            f"| {_unnamed(figures['waterfalls'])} |"
        )


def _unnamed(fall: dict[str, Any]) -> str:
    return f"{fall['median_unnamed']:.2%} · {fall['worst_unnamed']:.2%}".replace("%", "")
