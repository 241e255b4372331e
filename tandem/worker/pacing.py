"""When a worker's next step begins, and who has its cores meanwhile.

Roles call these hooks; what there is to gain by them depends on the machine. By default nothing is done. Where workers
share the cores of a CPU host, `tandem.worker.cpu.pacing` does it. No result depends on it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable


class Pacing:
    """Steps begin at once, and every worker has its own cores.

    Workers are named by their incarnations. On the runner thread, where nothing else is said.
    """

    def start(self) -> None:
        """The worker serves from now on; on the thread that starts it."""

    # -- who is here, at prefill; in the event loop

    def met(self, incarnation: str, pid: int) -> None:
        """A decode worker runs on this host, as process `pid`."""

    def left(self, incarnation: str) -> None:
        """That worker has ended."""

    # -- steps

    def give_way(self, *, has_work: bool) -> bool:  # noqa: ARG002 - of no interest where nobody waits
        """Let the next step begin later where that is better for all, for a bounded time; whether the inbox may tell of
        more now. Asked again until it does not.

        Args:
            has_work: there is something to compute.
        """
        return False

    def step_begins(self, first_untouched_page: int) -> None:
        """A step is about to be computed; it uses pages before this one only."""

    def rest(self) -> None:
        """There is nothing to compute."""

    # -- handoffs, at prefill

    def before_handoffs(self, receivers: Collection[str]) -> None:
        """A step has been computed of prompts for these decode workers; none of them has been handed off."""

    def after_handoffs(self, receivers: Iterable[str]) -> None:
        """Of these prompts the handoffs may end now, each named by its decode worker."""

    # -- handoffs, at decode

    def first_steps_taken(self, number: int) -> None:
        """So many handoffs have had their first step, or will have none: prefill may go on."""

    # -- the end

    def close(self) -> None:
        """Give back what is shared; on the thread that stops the worker."""
