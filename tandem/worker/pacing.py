"""Who has a worker's cores while it does not compute, and what is made ready for its steps.

Roles call these hooks; what there is to gain by them depends on the machine. By default nothing is done. Where workers
share the cores of a CPU host, `tandem.worker.cpu.pacing` does it. No result depends on it.
"""

from __future__ import annotations


class Pacing:
    """Every worker has its own cores. On the runner thread, where nothing else is said."""

    def start(self) -> None:
        """The worker serves from now on; on the thread that starts it."""

    def step_begins(self, first_untouched_page: int) -> None:
        """A step is about to be computed; it uses pages before this one only."""

    def rest(self) -> None:
        """There is nothing to compute."""

    def close(self) -> None:
        """Give back what is shared; on the thread that stops the worker."""
