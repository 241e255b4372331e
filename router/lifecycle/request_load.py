"""What clients ask of the pools, as the supervisor is told it, which sizes them. Requests of batches do not count: they
take what others leave."""

from __future__ import annotations

from dataclasses import dataclass

from router.lifecycle.turns import Turns
from router.request.request import Request
from tandem.rpc.v1 import control_pb2 as pb


@dataclass(slots=True)
class RequestLoad:
    """Counts since the router's start."""

    num_requests: int = 0
    prompt_tokens: float = 0.0  # to compute, as far as can be told when a request comes
    num_ended: int = 0  # with all their tokens
    ended_tokens: int = 0  # of output, of these
    output_tokens: int = 0  # that were given out
    num_first: int = 0  # requests that got their first token
    num_first_late: int = 0
    num_timed: int = 0  # requests that ended with several tokens
    num_timed_late: int = 0

    def came(self, request: Request, computed_share: float) -> None:
        if not request.is_background:
            self.num_requests += 1
            self.prompt_tokens += len(request.prompt_ids) * computed_share

    def gave(self, request: Request, num_tokens: int) -> None:
        if not request.is_background:
            self.output_tokens += num_tokens

    def gave_first(self, request: Request, ttft_s: float) -> None:
        if not request.is_background and request.targets is not None:
            self.num_first += 1
            self.num_first_late += ttft_s > request.targets.ttft_s

    def ended(self, request: Request, num_tokens: int, slowest_tpot_s: float) -> None:
        """With all its tokens. `slowest_tpot_s`: of its choices; 0: none has several tokens."""
        if request.is_background:
            return
        self.num_ended += 1
        self.ended_tokens += num_tokens
        if request.targets is not None and slowest_tpot_s > 0:
            self.num_timed += 1
            self.num_timed_late += slowest_tpot_s > request.targets.tpot_s

    def to_wire(self, turns: Turns) -> pb.RequestLoad:
        return pb.RequestLoad(
            num_requests=self.num_requests,
            prompt_tokens=self.prompt_tokens,
            num_ended=self.num_ended,
            ended_tokens=self.ended_tokens,
            output_tokens=self.output_tokens,
            num_first=self.num_first,
            num_first_late=self.num_first_late,
            num_timed=self.num_timed,
            num_timed_late=self.num_timed_late,
            waiting_tokens=turns.num_waiting_tokens_to_compute,
            num_held_for_decode=turns.num_held_for_decode,
        )
