"""The way of a suspicion from the router's event loop to the supervisor's actor."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from router.worker_key import WorkerKey

log = logging.getLogger(__name__)


class Suspicions:
    """Tells of suspected writers on a thread of its own: without its control store Ray does not answer for a minute.

    One that cannot be told is logged and dropped: such a writer answers the supervisor's heartbeats no more either.

    Args:
        tell: is called with worker id and incarnation; it may block and may fail.
    """

    def __init__(self, tell: Callable[[str, str], None]) -> None:
        self._tell = tell
        self._suspected: queue.SimpleQueue[WorkerKey] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="suspicions", daemon=True).start()

    def add(self, writer: WorkerKey) -> None:
        """From any thread; neither blocks nor fails."""
        self._suspected.put(writer)

    def _run(self) -> None:
        while True:
            writer = self._suspected.get()
            try:
                self._tell(writer.worker_id, writer.incarnation)
            except Exception:  # whatever Ray raises: the next one may succeed
                log.exception("the supervisor was not told that writer %s is suspected", writer)
