"""Predictions beside what was measured, as a section of `docs/benchmarks.md`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.predict.simulated import GOALS
from benchmarks.text import wrapped

FORMAT = "tandem-predict/4"
COMMAND = "`python -m benchmarks predict`"
PLOT = Path("docs/figures/predict.svg")

_TITLES = {
    "output_tokens_per_s": "tokens/s", "e2e_s": "mean E2E", "tpot_s": "mean TPOT", "ttft_p50_s": "TTFT p50",
    "ttft_p99_s": "TTFT p99",
}  # fmt: skip


def section(content: dict[str, Any]) -> Iterator[str]:
    """A table for each model."""
    yield ""
    yield "## The simulator beside its own cluster"
    yield ""
    goals = ", ".join(f"{_TITLES[name]} {goal:.0%}" for name, goal in GOALS.items())
    yield from wrapped(
        f"Measured by {COMMAND}: real clusters whose workers share this host's cores. Times of steps, and how workers "
        "slow each other down, are fitted to what the workers wrote of the first two loads; what a first and a second "
        "token take beside steps, to the first, and what it takes of the cores to pass tokens on, to how long answers "
        "of the second took. "
        "The other loads are only asked about: closed ones as so many clients, open ones with the times at which "
        "requests were sent. A cell is how far off the simulation was of the mean of the runs. "
        f"Goals: {goals}, or as far off as one of the runs is, where that is more; what misses is bold."
    )
    yield ""
    yield from wrapped(
        f"![Output tokens so far, and requests under way, of each load that was only asked about](figures/{PLOT.name})"
    )
    for name, model in content["models"].items():
        yield from _model(name, model)


def _model(name: str, model: dict[str, Any]) -> Iterator[str]:
    machine, num, loads = model["machine"], model["num_of_each"], model["loads"]
    num_met = sum(figure["is_met"] for load in loads for figure in load["figures"].values())
    fit = model["fit"]
    yield ""
    known = "Simulated engines, whose steps take known times"
    fitted = known if fit is None else (
        f"Half of {fit['num']:,} steps are within {fit['median_off']:.1%} of the fit, nine of ten within "
        f"{fit['p90_off']:.1%}. {_slowdowns(model['scenario']['cores'])}"
    )  # fmt: skip
    yield from wrapped(
        f"{num}P{num}D, model {name}, {machine['cpu']}, {machine['num_cores']} cores, {model['date'][:10]}, sources "
        f"{model['code']['digest']}. {fitted}. Met: {num_met} of {len(loads) * len(GOALS)} figures."
    )
    yield ""
    yield f"| load | runs | {' | '.join(_TITLES.values())} |"
    yield "|---|---|" + "---|" * len(_TITLES)
    num_fitted = 2 if fit is not None else 1  # where steps are known, what is beside them is
    for kind in ("calibration", "loads"):
        for number, load in enumerate(model[kind]):
            cells = (_cell(load["figures"][name]) for name in GOALS)
            suffix = ", fitted to" if kind == "calibration" and number < num_fitted else ""
            yield f"| {load['load']}{suffix} | {len(load['measured'])} | {' | '.join(cells)} |"


def _slowdowns(cores: dict[str, Any]) -> str:
    passing = "To pass tokens on takes nothing that shows in how long answers take"
    if "token_us" in cores:
        step_us, token_us = cores["step_us"], cores["token_us"]
        passing = f"To pass on what a step gives takes {step_us:.0f} µs, and {token_us:.0f} µs a token"
    nothing = {"prompts": 0.0, "decode": 0.0}
    prompts, decode = (cores.get(name, nothing) for name in ("prompts", "decode"))
    return (
        f"{cores['num_cores']} steps are computed at a time, of more each has its turns; besides, a step of prompts "
        f"takes {prompts['prompts']:.0%} longer beside each other one that is computed, and {prompts['decode']:.0%} "
        f"beside each that generates; one that generates {decode['prompts']:.0%} beside each of prompts, and "
        f"{decode['decode']:.0%} beside each other. {passing}"
    )


def _cell(figure: dict[str, Any]) -> str:
    text = f"{figure['off']:+.1%}"
    return text if figure["is_met"] else f"**{text}**"
