"""An observer of a router's session whom nothing concerns."""

from __future__ import annotations

from typing import Any

from router.workers.session import WorkerSession
from tandem.rpc.v1.common_pb2 import CachedPages, WorkerStatus


class Unheard:
    """A `SessionObserver`."""

    def session_changed(self, session: WorkerSession) -> None: ...

    def readiness_changed(self, session: WorkerSession) -> None: ...

    def worker_died(self, session: WorkerSession) -> None: ...

    def status_reported(self, session: WorkerSession, status: WorkerStatus) -> None: ...

    def load_changed(self, session: WorkerSession) -> None: ...

    def pages_cached(self, session: WorkerSession, news: CachedPages) -> None: ...

    def event_seen(self, message: Any) -> None: ...
