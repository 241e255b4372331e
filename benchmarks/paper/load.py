"""Requests as Splitwise's authors draw them: at random times, prompts and outputs apart from each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.splitwise_oracle.runs import Arrival
from tandem.bench.load.traces import load_trace

FILES = {"conv": "AzureLLMInferenceTrace_conv.csv", "code": "AzureLLMInferenceTrace_code.csv"}
#: Their simulator runs no request of fewer: the first token comes with the prompt, and one at least behind it.
_FEWEST_TOKENS = 2


@dataclass(frozen=True)
class Lengths:
    """Of the requests of a recorded workload, in tokens."""

    prompts: list[int]
    outputs: list[int]

    @classmethod
    def of(cls, directory: Path, workload: str) -> Lengths:
        """Of Azure's trace in `directory`. Raises `ConfigError`."""
        entries = load_trace(directory / FILES[workload], "azure", key="--traces")
        return cls([entry.num_input for entry in entries], [entry.num_output for entry in entries])

    def drawn(self, rate: int, seconds: float, seed: int) -> list[Arrival]:
        """A Poisson process of `rate` a second, for so long; the same for the same arguments."""
        gaps, prompts, outputs = (np.random.default_rng(each) for each in np.random.SeedSequence([seed, rate]).spawn(3))
        times_s: list[float] = []
        now_s = float(gaps.exponential(1 / rate))
        while now_s < seconds:
            times_s.append(now_s)
            now_s += float(gaps.exponential(1 / rate))
        num = len(times_s)
        of_prompts = np.maximum(1, prompts.choice(self.prompts, num)).tolist()
        of_outputs = np.maximum(_FEWEST_TOKENS, outputs.choice(self.outputs, num)).tolist()
        return [Arrival(number, *each) for number, each in enumerate(zip(times_s, of_prompts, of_outputs, strict=True))]
