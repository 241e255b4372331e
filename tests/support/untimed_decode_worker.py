"""A decode worker that does not learn how long steps and passes of its draft take.

So it presumes that proposals pay, whatever the machine and the draft: for tests of what becomes of them.
"""

from __future__ import annotations

from decode_worker.worker import DecodeWorker
from tandem.worker.draft_costs import Timing
from tandem.worker.main import run


def _learn(_: Timing, _seconds: float, _now_s: float) -> None:
    """Nothing."""


if __name__ == "__main__":
    Timing.learn = _learn  # type: ignore[method-assign]
    run(DecodeWorker, "decode_worker")
