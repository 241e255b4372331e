"""A request in the simulated cluster: where it is, and when it got there."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.splitwise_oracle.runs import Arrival


@dataclass(eq=False, slots=True)
class Request:
    """What its machines know of a request; times on the kernel's clock.

    Attributes:
        prompt_on, token_on: numbers of the machines of its two phases, which may be one.
        is_prompt_done: its next task is to generate.
        num_left: tokens that it has yet to generate.
        token_start_s: when it first generated; `None` before.
        num_left_out: batches here that its next task was not in.
    """

    arrival: Arrival
    prompt_on: int = -1
    token_on: int = -1
    is_prompt_done: bool = False
    num_left: int = field(init=False)
    token_start_s: float | None = None
    num_left_out: int = 0
    prompt_end_s: float | None = None
    end_s: float | None = None

    def __post_init__(self) -> None:
        self.num_left = self.arrival.num_output - 1

    @property
    def num_prompt(self) -> int:
        return self.arrival.num_prompt

    @property
    def size(self) -> int:
        """Tokens of its next task in a batch."""
        return 1 if self.is_prompt_done else self.arrival.num_prompt

    @property
    def prompt_memory(self) -> int:
        """Tokens of KV that its prompt takes; with it goes the first token."""
        return self.arrival.num_prompt + 1

    @property
    def memory(self) -> int:
        """Tokens of KV that it has at its end."""
        return self.arrival.num_prompt + self.arrival.num_output

    @property
    def stays(self) -> bool:
        return self.prompt_on == self.token_on

    @property
    def order(self) -> tuple[float, int]:
        return self.arrival.time_s, self.arrival.number
