"""What became of a request of a simulation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from router.observe.trace import PART_NAMES
from router.request.targets import Targets
from tandem.core.states import RequestState
from tandem.sim.load import Arrival

ENDLESS = Targets(math.inf, math.inf)


@dataclass(slots=True)
class Outcome:
    """What became of a request; seconds of the simulation."""

    arrival: Arrival
    targets: Targets = ENDLESS  # by when its tokens were wanted
    router: int = 0  # its number
    prefill: str = ""  # the worker; empty: decode computed the prompt
    decode: str = ""
    first_token_s: float = 0.0
    second_token_s: float = 0.0
    last_token_s: float = 0.0
    longest_gap_s: float = 0.0
    num_tokens: int = 0
    num_cached: int | None = None  # tokens of its prompt that the worker had which computed it first
    prefill_s: float | None = None  # the first step with tokens of its prompt began
    handed_off_s: float | None = None  # decode has its pages; `None`: it needed none of another worker
    num_recoveries: int = 0  # workers that died while they had it, and others went on
    error: str = ""  # its code; empty: none

    @property
    def is_over(self) -> bool:
        return self.num_tokens == self.arrival.num_output

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrival.arrived_s

    @property
    def e2e_s(self) -> float:
        return self.last_token_s - self.arrival.arrived_s

    @property
    def tpot_s(self) -> float | None:
        """Between two tokens, on average; `None`: there is one."""
        return (self.last_token_s - self.first_token_s) / (self.num_tokens - 1) if self.num_tokens > 1 else None

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by what they were spent for, in its order, as a router names them; once it is over. All in all that
        is from its arrival to its last token. What a state takes again after a fault counts where it had got to."""
        assert self.prefill_s is not None
        ends_s = {
            RequestState.QUEUED: self.prefill_s,
            RequestState.PREFILLING: self.first_token_s,
            RequestState.HANDOFF: self.handed_off_s,
            RequestState.DECODING: self.last_token_s,
        }
        found, since_s = {}, self.arrival.arrived_s
        for state, end_s in ends_s.items():
            if end_s is not None:
                found[PART_NAMES[state]], since_s = end_s - since_s, end_s
        return found

    @property
    def kept(self) -> bool:
        """Whether it kept its own targets."""
        return self.keeps(self.targets.ttft_s, self.targets.tpot_s)

    def keeps(self, ttft_s: float, tpot_s: float) -> bool:
        """Whether it kept both targets."""
        return self.ttft_s <= ttft_s and (self.tpot_s is None or self.tpot_s <= tpot_s)

    def token(self, now_s: float) -> None:
        if self.num_tokens:
            self.longest_gap_s = max(self.longest_gap_s, now_s - self.last_token_s)
            if self.num_tokens == 1:
                self.second_token_s = now_s
        else:
            self.first_token_s = now_s
        self.last_token_s = now_s
        self.num_tokens += 1

    def several(self, ends_s: Sequence[float], longest_s: float) -> None:
        """Tokens at these times, of which two lie `longest_s` apart at most. It has some already."""
        self.longest_gap_s = max(self.longest_gap_s, ends_s[0] - self.last_token_s, longest_s)
        if self.num_tokens == 1:
            self.second_token_s = ends_s[0]
        self.last_token_s = ends_s[-1]
        self.num_tokens += len(ends_s)
