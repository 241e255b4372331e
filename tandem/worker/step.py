"""What happens around a step: what the runner asks of a role, and what a role asks of the sampler. No tensors."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, Protocol

from tandem.core.errors import InternalError, TandemError
from tandem.core.sampling import SampledToken, SampleRow
from tandem.worker.batch import Batch
from tandem.worker.sequence import Sequence

SampleTokens = Callable[[Any, Seq[Seq[SampleRow]]], list[list[SampledToken | TandemError]]]
"""From logits, one row an item, and what is asked of each row, to tokens; see `tandem.engine.sampler.Sampler`."""


def may_be_wrong(error: TandemError) -> bool:
    """Whether the KV may be wrong of a sequence that could not be sampled for this reason.

    Else the request is to blame, as one that allows no token: nobody else is to compute anew what is cached.
    """
    return isinstance(error, InternalError)


class StepHooks(Protocol):
    """What a worker does around a step. All calls come on the runner thread."""

    def before_schedule(self) -> None:
        """Pages and places may have come free since the last step."""

    def before_forward(self, batch: Batch) -> Callable[[int], None] | None:
        """A step is about to be computed; returns what to call when a layer's KV is in the arena."""

    def score(self, batch: Batch, logits: Any) -> Any:
        """Tell of prompt tokens' log-probabilities, where the batch gives some; returns the rows for `sample`.

        `logits`: float32 `[sum of num_logits, vocab]`.
        """

    def sample(self, batch: Batch, logits: Any) -> list[list[int]]:
        """The tokens of each item that samples; none where what comes cannot be told yet.

        `logits`: float32 `[items that sample, vocab]`.
        """

    def after_step(self, batch: Batch) -> None:
        """The step is booked: its tokens are in the sequences."""

    def step_failed(self, batch: Batch, error: Exception) -> None:
        """The step raised: end what it held."""

    def going_idle(self) -> None:
        """Nothing can be computed now; the next thing is an entry of the inbox."""


class AheadHooks(Protocol):
    """Of a role whose next step can be planned while one is computed: see `NextStep`."""

    def may_plan_behind(self, batch: Batch) -> bool:
        """Whether the step behind `batch`, which is under way, can be told but for its tokens."""

    def may_tell_later(self, batch: Batch) -> bool:
        """Whether `after_step` may be called when the next step is launched: that needs nothing of it, and ends no
        sequence that this one was not the last token of. The step is booked."""

    def goes_on(self, sequence: Sequence) -> bool:
        """Whether a sequence of the last step, which may not have been told yet, takes part in the next one."""
