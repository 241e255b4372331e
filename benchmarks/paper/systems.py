"""Who serves the clusters in the simulator: Splitwise's policies on their profile, and those that ship."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks.paper.clusters import A100, DESIGNS, H100, Cluster, Hardware
from benchmarks.paper.slo import BOUNDS, Reference
from benchmarks.splitwise_oracle.machine import ROOM
from benchmarks.splitwise_oracle.runs import Arrival, Run, Times
from benchmarks.splitwise_oracle.times import Splitwise
from benchmarks.splitwise_oracle.world import LINK_BYTES_PER_S, OnEnd, simulate
from tandem.core.config_tree import build
from tandem.core.step_times import StepTimes, Terms
from tandem.sim import load
from tandem.sim.outcome import Outcome
from tandem.sim.scenario import Scenario
from tandem.sim.shape import PoolShape, WorldShape
from tandem.sim.world import World

SYSTEMS = SPLITWISE, TANDEM, TANDEM_ON_PROFILE = "splitwise", "tandem", "tandem-on-profile"
#: BLOOM-176B in 16 bits: each of its heads has K and V of its own.
MODEL = {"parameters": 176e9, "layers": 70, "hidden_size": 14336, "kv_heads": 112, "head_dim": 128}
_BESIDE = 1  # of the bounds at p50, p90 and p99 that of p90: what nine of ten requests are to keep


@dataclass(frozen=True)
class System:
    """One of the three: policies and a model of the time that steps take.

    Attributes:
        profile: of Splitwise's, by the name of the hardware.
    """

    name: str
    profile: Mapping[str, Splitwise]

    @property
    def reference(self) -> Reference:
        """An A100 machine by the same model of times."""
        if self.name == TANDEM:
            times = _roofline(A100)
            return Reference(partial(_prompt_s, times), partial(_token_s, times))
        curves = self.profile[A100.name]
        return Reference(curves.prompt.at, curves.token.at)

    def times(
        self, cluster: Cluster, arrivals: Sequence[Arrival], on_end: OnEnd = lambda *_: None
    ) -> list[Times | None]:
        """Of each request; `None` where one did not end. `on_end`: called as each ends; what it raises ends all.

        Raises:
            ConfigError: the profile lacks a machine.
        """
        if self.name == SPLITWISE:
            run = Run(str(cluster), list(arrivals), cluster.machines(), [], [])
            return simulate(run, self.profile, on_end).times
        by_number = {arrival.number: arrival for arrival in arrivals}

        def ended(outcome: Outcome) -> None:
            on_end(by_number[outcome.arrival.number], _times(outcome))

        world = World(self._shape(cluster, arrivals), ended)
        return [_times(outcome) for outcome in world.run([_as_ours(arrival) for arrival in arrivals])]

    def _shape(self, cluster: Cluster, arrivals: Sequence[Arrival]) -> WorldShape:
        """As a user would set it up: the targets are those of nine in ten requests, of a prompt of median length.
        Without a split all machines are decode workers, which compute the prompts too."""
        typical, reference = round(statistics.median(each.num_prompt for each in arrivals)), self.reference
        targets_s = {
            "ttft_ms": 1e3 * BOUNDS["ttft"][_BESIDE] * reference.prompt_s(typical),
            "tpot_ms": 1e3 * BOUNDS["tbt"][_BESIDE] * reference.token_s(typical),
        }
        shape, design = _scenario(H100, {"tandem": {"slo": targets_s}}).shape(), DESIGNS[cluster.design]
        nums = (cluster.num_prompt, cluster.num_token) if design.is_split else (0, cluster.num_prompt)
        return replace(
            shape,
            prefill=self._pool(shape.prefill, nums[0], design.prompt),
            decode=self._pool(shape.decode, nums[1], design.token),
        )

    def _pool(self, pool: PoolShape, num: int, hardware: Hardware) -> PoolShape:
        times = _roofline(hardware) if self.name == TANDEM else self.profile[hardware.name]
        return replace(pool, num_workers=num, bounds=None, times=times)


def _scenario(hardware: Hardware, more: Mapping[str, Any]) -> Scenario:
    pool = {"tokens": int(ROOM)}
    tree = {
        "prefill": pool,
        "decode": pool,
        "model": MODEL,
        "times": "roofline",
        "card": {"tflops": hardware.tflops, "gb_per_s": hardware.gb_per_s},
        "network": {"gb_per_s": LINK_BYTES_PER_S / 1e9},
    }
    return build(Scenario, {**tree, **more})


def _roofline(hardware: Hardware) -> StepTimes:
    return _scenario(hardware, {}).step_times()


def _prompt_s(times: StepTimes, num_tokens: int) -> float:
    return times.seconds(Terms.of([(0, num_tokens, False)]))


def _token_s(times: StepTimes, num_tokens: int) -> float:
    return times.seconds(Terms.of([(num_tokens, 1, True)]))


def _as_ours(arrival: Arrival) -> load.Arrival:
    return load.Arrival(arrival.number, arrival.time_s, arrival.num_prompt, arrival.num_output)


def _times(outcome: Outcome) -> Times:
    """By Splitwise's definitions: TBT is what comes after the first token, through all tokens."""
    after_s = outcome.e2e_s - outcome.ttft_s
    return Times(outcome.ttft_s, after_s / outcome.arrival.num_output, outcome.e2e_s)
