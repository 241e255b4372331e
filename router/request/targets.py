"""By when tokens are wanted: the service-level objective (SLO) of a request. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tandem.core.config import Config

#: Seconds to the first token, and for each further one, where the configuration leaves them to us.
ON_CPU, ON_GPU = (5.0, 0.2), (1.0, 0.05)


@dataclass(frozen=True, slots=True)
class Targets:
    """Attributes:
    ttft_s: from the arrival of a request to its first token.
    tpot_s: for each further token of a choice, on average.
    """

    ttft_s: float
    tpot_s: float
    least_tpot_s: float = 0.0  # what others' prompts leave it at most, whatever the request itself asks for

    @classmethod
    def of(cls, config: Config, *, on_gpu: bool = False) -> Targets:
        """The cluster's. `on_gpu`: a decode worker computes on a GPU, whatever the configuration says of its pool."""
        ttft_s, tpot_s = ON_GPU if on_gpu or config.pools.decode.gpus else ON_CPU
        return cls(config.slo.ttft_ms / 1000 or ttft_s, config.slo.tpot_ms / 1000 or tpot_s)

    def but(self, ttft_ms: float, tpot_ms: float) -> Targets:
        """With these instead, where they are not 0."""
        return Targets(ttft_ms / 1000 or self.ttft_s, tpot_ms / 1000 or self.tpot_s)

    def asked(self, ttft_ms: float, tpot_ms: float) -> Targets:
        """The same, by a request: it cannot have others give way for more than these targets do."""
        return replace(self.but(ttft_ms, tpot_ms), least_tpot_s=self.tpot_s)

    @property
    def tpot_beside_prompts_s(self) -> float:
        """Seconds for a further token that chunks of others' prompts leave."""
        return max(self.tpot_s, self.least_tpot_s)
