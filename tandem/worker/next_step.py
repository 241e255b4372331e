"""Which step comes next, and when what a step gave is told: for engines that compute apart, one step ahead. Pure.

Where steps are computed by a device beside the host's processor, most of what the host does for a step can be done
while another one is computed:

    device   | step n                           | step n + 1                       |
    host     | tells n - 1, plans n + 1 | waits | tells n, plans n + 2     | waits |
                                             tokens of n, `next`, launch of n + 1

Between two steps there is left: to take the tokens, to leave out of the plan whose sequences have ended with them or
were taken out, to join to it who has come meanwhile, and the launch. So a step computes what it would have computed
without a plan: nothing is computed for a sequence that has ended, and who comes waits for no step more.

A plan is made only where nothing but generation goes on: nobody waits for a place, no prompt is computed, and there are
pages for all to grow. So a plan takes nothing from anybody while a step is under way, and no page comes free that this
step uses.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from tandem.worker.batch import Batch
from tandem.worker.scheduler import BatchScheduler
from tandem.worker.step import AheadHooks, StepHooks


class NextStep:
    """The steps of one worker, in turn: `next`, `while_computed`, `computed` or `failed`. One thread calls it.

    Args:
        ahead: of a role whose next step may be planned between the launch of a step and its end; `None`: it may not, or
            there is no time between the two.
    """

    def __init__(self, scheduler: BatchScheduler, hooks: StepHooks, *, ahead: AheadHooks | None) -> None:
        self._scheduler = scheduler
        self._hooks = hooks
        self._ahead = ahead
        self._planned: Batch | None = None
        self._untold: Batch | None = None  # a step whose tokens are booked by the scheduler and not told yet

    def next(self) -> Batch:
        """What is to be computed now; empty where nothing can be. No step is under way."""
        planned, self._planned = self._planned, None
        if planned is not None and self._ahead is not None:
            planned.items = [item for item in planned.items if self._ahead.goes_on(item.sequence)]
            if self._scheduler.join(planned) and planned.items:
                return planned
        self.tell()
        self._hooks.before_schedule()
        return self._scheduler.schedule()

    def while_computed(self, batch: Batch) -> None:
        """`batch` is launched: there is time until its tokens are wanted."""
        self.tell()
        if self._ahead is not None and self._ahead.may_plan_behind(batch):
            self._hooks.before_schedule()
            self._planned = self._scheduler.schedule_behind(batch)

    def computed(self, batch: Batch, sampled: Seq[Seq[int]]) -> None:
        """Its tokens are there; `sampled` as of `BatchScheduler.apply`."""
        self._scheduler.apply(batch, sampled)
        if self._planned is not None and self._ahead is not None and self._ahead.may_tell_later(batch):
            self._untold = batch
        else:
            self._hooks.after_step(batch)

    def failed(self, batch: Batch, error: Exception) -> None:
        """It computes nothing any more."""
        self.tell()
        self._planned = None
        self._scheduler.abandon()
        self._hooks.step_failed(batch, error)

    def tell(self) -> None:
        """What the last step gave, if it has not been told."""
        untold, self._untold = self._untold, None
        if untold is not None:
            self._hooks.after_step(untold)
