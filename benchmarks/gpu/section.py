"""What a machine with a GPU told (`tools/gpu_check.sh`), as a section of `docs/benchmarks.md`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.check import FORMAT as FORMAT
from benchmarks.text import wrapped

COMMAND = "`tools/gpu_check.sh`"


def section(content: dict[str, Any]) -> Iterator[str]:
    """Its tests, each step beside what the card allows, digests of pages, and handoffs on the one card."""
    figures, tests, handoff = (content["parts"][name]["result"] for name in ("figures", "tests", "handoff"))
    yield ""
    yield "## On a GPU"
    yield ""
    yield from wrapped(" ".join(_introduction(content, figures, tests)))
    yield ""
    yield "| model | step | time | tokens/s | of the limit | goal | the model alone | the sampler alone |"
    yield "|---|---|---|---|---|---|---|---|"
    yield from map(_row, figures["figures"])
    yield ""
    rates = [
        f"{name.upper()} {told['device'] / 1e9:,.0f} GB/s on the card, {told['host'] / 1e9:,.1f} read by the host"
        for name, told in figures["digests"].items()
    ]
    yield from wrapped(f"Digests of pages of 256 slots: {'; '.join(rates)}.")
    yield ""
    handoffs = handoff["handoffs"]
    are_right = all(each["are_the_models"] for each in handoffs)
    times = [f"{each['seconds'] * 1e3:,.0f} ms for a prompt of {each['prompt_tokens']:,}" for each in handoffs]
    words = (
        "Handoffs between two processes on this card, of a small model in float32 (pages go through host memory by "
        f"gloo: NCCL takes no card twice): the tokens are {'' if are_right else '**not** '}the model's own. From the "
        f"request to the last of {handoffs[0]['tokens']} tokens: {', '.join(times)}."
    )
    yield from wrapped(words)


def _introduction(content: dict[str, Any], figures: dict[str, Any], tests: dict[str, Any]) -> Iterator[str]:
    versions, limits, device = figures["versions"], figures["limits"], figures["device"]
    failed, skipped = tests["failures"] + tests["errors"], tests["skipped"]
    yield f"Measured by {COMMAND} on {figures['date'][:10]}: {device['name']}, CUDA {device['cuda']},"
    yield f"torch {versions['torch']}, Triton {versions['triton']}; sources {content['code']['digest']};"
    yield f"attention by {' and '.join(sorted({*figures['attention'].values()}))}."
    reasons = "; ".join(f"{num}: {reason}" for reason, num in sorted(tests["reasons_of_skips"].items()))
    why = f" ({reasons})" if reasons else ""
    yield f"Of `tests/gpu`, {tests['tests'] - failed - skipped} passed, {failed} failed, {skipped} were skipped{why}."
    yield "Measured limits:"
    yield f"{limits['flop_per_s'] / 1e12:,.0f} TFLOP/s in bfloat16, {limits['bytes_per_s'] / 1e9:,.0f} GB/s; beside"
    yield "each step stands its share of the least time that these allow. Steps are timed as they are served, with"
    yield "tokens drawn at temperature 1. Weights are random, in bfloat16, of the shapes of Llama 3."


def _row(figure: dict[str, Any]) -> str:
    shared = "" if figure["has_own_pages"] else " (sequences share pages)"
    cells = (
        figure["model"].upper(),
        figure["work"] + shared,
        _ms(figure["seconds"]),
        f"{figure['tokens'] / figure['seconds']:,.0f}",
        f"{figure['share']:.0%}",
        f"≥ {figure['goal']:.0%}: {'reached' if figure['is_met'] else '**missed**'}",
        _ms(figure["forward_s"]),
        _ms(figure["sampling_s"]),
    )
    return f"| {' | '.join(cells)} |"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:,.2f} ms"
