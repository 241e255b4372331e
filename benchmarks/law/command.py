"""`python -m benchmarks law`: the law beside constants, on loads of all kinds and two time models, in the simulator."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.code import Code
from benchmarks.law.loads import Kind, by_chance, closed, opened
from benchmarks.law.section import FORMAT, section
from tandem.bench.machine import now
from tandem.bench.report import json_file
from tandem.sim.load import Arrival
from tandem.sim.outcome import Outcome
from tandem.sim.scenario import read_scenario
from tandem.sim.shape import WorldShape

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"

GRID = tuple(product((32, 128, 512, 1024, 2048), (16, 64, 256), (1, 4, 16, 32)))
"""Tokens of a prompt, of an output, and clients that ask again when they are answered."""

OPEN = (Kind(32, 256), Kind(128, 64), Kind(512, 64), Kind(1024, 16), Kind(2048, 256))
"""Also by chance, at `OPEN_SHARE` of what the best constants reach with `MOST_CLIENTS`."""
OPEN_SHARE, MOST_CLIENTS, OPEN_REQUESTS = 0.9, 32, 400

PROMPTS, OUTPUTS = Kind(1024, 16), Kind(128, 256)
"""Between which the load changes, and back, at `CHANGING_SHARE` of what each reaches."""
CHANGING_SHARE, PHASE_REQUESTS = 0.8, 150


@dataclass(frozen=True, slots=True)
class Model:
    """A time model, and by when a further token is wanted; `before`: the constants that were its defaults."""

    name: str
    title: str
    tpot_s: float
    before: str


MODELS = (
    Model("two_cores", "two cores", 0.06, "12 tokens a step"),
    Model("h200", "two H200", 0.05, "none"),
)

NONE = "none"
STEP_TOKENS = (12, 32, 64, 128, 256, 512)
"""Up to which a decode step takes tokens of prompts, where a constant says so."""


def ttft_s(alone_s: float) -> float:
    """By when a first token is wanted, by the time that a request alone has."""
    return 3 * alone_s + 0.5


def run(json: Path | None) -> None:
    """Print the section, and write what was found to `json`."""
    found = measure(lambda text: Console(stderr=True).print(text))
    content = {"format": FORMAT, "date": now(), "code": Code.of().as_json(), **found}
    Console(soft_wrap=True).print("\n".join(section(content)).strip(), highlight=False, markup=False)
    if json is not None:
        json_file.write(json, content)


def measure(
    tell: Callable[[str], None],
    models: Sequence[Model] = MODELS,
    grid: Iterable[tuple[int, int, int]] = GRID,
    kinds: Sequence[Kind] = OPEN,
) -> dict[str, Any]:
    """What was found: plain data."""
    grid = list(grid)
    return {
        "settings": {
            "constants": [NONE, *(f"{number} tokens a step" for number in STEP_TOKENS)],
            "open_share": OPEN_SHARE,
            "changing_share": CHANGING_SHARE,
            "kinds": [str(PROMPTS), str(OUTPUTS)],
        },
        "models": [{**asdict(model), "cases": list(_Bench(model, tell).cases(grid, kinds))} for model in models],
    }


class _Bench:
    """One time model."""

    def __init__(self, model: Model, tell: Callable[[str], None]) -> None:
        self._model, self._tell = model, tell
        self._shape = read_scenario(SCENARIOS / f"{model.name}.yaml").shape()
        self._alone_s: dict[Kind, float] = {}

    def cases(self, grid: Sequence[tuple[int, int, int]], kinds: Sequence[Kind]) -> Iterable[dict[str, Any]]:
        for num_input, num_output, num_clients in grid:
            kind = Kind(num_input, num_output)
            name = f"{kind}, {num_clients} clients"
            yield self._case("closed", name, [kind], self._closed(kind, num_clients))
            if num_clients > 1:
                yield self._case("varying", name, [kind], self._closed(kind, num_clients, varying=True))
        for kind in kinds:
            rate = OPEN_SHARE * self._reached(kind)
            load = by_chance([(kind, rate, OPEN_REQUESTS / rate)], seed=1)
            yield self._case("open", f"{kind}, {rate:.3g} a second", [kind], partial(opened, load))
        rates = {kind: CHANGING_SHARE * self._reached(kind) for kind in (PROMPTS, OUTPUTS)}
        phases = [(kind, rates[kind], PHASE_REQUESTS / rates[kind]) for kind in (PROMPTS, OUTPUTS, PROMPTS)]
        load = by_chance(phases, seed=1)
        yield self._case("changing", f"{PROMPTS}, {OUTPUTS} and back", [PROMPTS, OUTPUTS], partial(opened, load))

    def _closed(self, kind: Kind, num_clients: int, *, varying: bool = False) -> Callable[[WorldShape], list[Outcome]]:
        return lambda shape: closed(shape, kind, num_clients, max(48, 12 * num_clients), varying=varying)

    def _reached(self, kind: Kind) -> float:
        """Requests a second, with the best constants."""
        load = self._closed(kind, MOST_CLIENTS)
        rates = []
        for shape in self._constants().values():
            outcomes = load(shape)
            rates.append(len(outcomes) / max(one.last_token_s for one in outcomes))
        return max(rates)

    def _case(
        self, how: str, name: str, kinds: Sequence[Kind], load: Callable[[WorldShape], list[Outcome]]
    ) -> dict[str, Any]:
        self._tell(f"{self._model.title}, {how}: {name}")
        wanted_s = {kind: ttft_s(self._alone(kind)) for kind in kinds}
        # One target for the cluster: where kinds change, that of the longer one.
        law = replace(self._shape, ttft_s=max(wanted_s.values()), tpot_s=self._model.tpot_s)
        return {
            "how": how,
            "name": name,
            "law": self._figures(load(law), wanted_s),
            "constants": {what: self._figures(load(shape), wanted_s) for what, shape in self._constants().items()},
        }

    def _alone(self, kind: Kind) -> float:
        """To the first token of a request that is alone."""
        if kind not in self._alone_s:
            self._alone_s[kind] = closed(self._shape, kind, 1, 1)[0].ttft_s
        return self._alone_s[kind]

    def _constants(self) -> dict[str, WorldShape]:
        """Decode workers that take prompts up to a number of tokens in a step whatever targets say, or none."""
        shape = replace(self._shape, ttft_s=math.inf, tpot_s=math.inf)
        found = {NONE: replace(shape, mixed_pool_tokens=0)}
        for number in STEP_TOKENS:
            limits = replace(shape.decode.limits, paced_tokens=number)
            found[f"{number} tokens a step"] = replace(shape, decode=replace(shape.decode, limits=limits))
        return found

    def _figures(self, outcomes: Sequence[Outcome], wanted_s: Mapping[Kind, float]) -> dict[str, float]:
        ends_s, num = max(one.last_token_s for one in outcomes), len(outcomes)
        longest_s = max(wanted_s.values())  # also of lengths that vary, which have the target of their kind

        def ttft_of(arrival: Arrival) -> float:
            return wanted_s.get(Kind(arrival.num_input, arrival.num_output), longest_s)

        kept = sum(one.keeps(ttft_of(one.arrival), self._model.tpot_s) for one in outcomes)
        return {
            "tokens_per_s": round(sum(one.num_tokens for one in outcomes) / ends_s, 4),
            "kept_per_s": round(kept / ends_s, 6),
            "kept_share": round(kept / num, 4),
            "mean_ttft_s": round(sum(one.ttft_s for one in outcomes) / num, 5),
            "mean_tpot_s": round(sum(one.tpot_s or 0.0 for one in outcomes) / num, 6),
            "by_decode_share": round(sum(not one.prefill for one in outcomes) / num, 4),
        }
