"""The actor around the watcher of a node."""

from __future__ import annotations

from tandem.cluster.ray.actor import begin
from tandem.cluster.ray.node_watcher import NodeWatcher
from tandem.cluster.spec import ClusterSpec
from tandem.core.pidfd import ProcessId


class WatcherActor:
    """The watcher of a node other than the supervisor's; its calls are coroutines, so that any number may wait."""

    def __init__(self, spec: ClusterSpec) -> None:
        begin(spec, "watcher", None)
        self._watcher: NodeWatcher | None = None

    async def wait_ended(self, process: ProcessId, timeout_s: float) -> bool:
        """Whether it has provably ended, after at most `timeout_s`."""
        return await self._running().wait_ended(process, timeout_s)

    async def kill(self, process: ProcessId) -> None:
        self._running().kill(process)

    async def watched(self) -> dict[str, bool]:
        return self._running().watched()

    def _running(self) -> NodeWatcher:
        if self._watcher is None:  # the event loop is there from the first call on
            self._watcher = NodeWatcher()
        return self._watcher
