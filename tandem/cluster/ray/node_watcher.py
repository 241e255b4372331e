"""Each node with processes of ours has a watcher, which proves that processes of its node have ended, and kills them.

A broken connection, a missed heartbeat or Ray's word that an actor is dead prove nothing about a process. What proves
its end is a pidfd that becomes readable, or that its number belongs to nobody, or to a process that started at another
time. All of that only the node itself can see.
"""

from __future__ import annotations

import asyncio
from functools import cached_property

import ray

from tandem.cluster.ray.actor import begin
from tandem.cluster.spec import ClusterSpec
from tandem.core.machine import HostBoot, this_boot
from tandem.core.pidfd import ExitWatch, ProcessId, started_at

MAX_REMEMBERED = 4096
"""Ends that are kept for a later supervisor; more do not happen while there is none."""


class NodeWatcher:
    """Called in one event loop. Whatever is asked about a process makes it watched until its end."""

    def __init__(self) -> None:
        self._watched: dict[str, asyncio.Event] = {}  # set: ended. Oldest first.

    @cached_property
    def _exits(self) -> ExitWatch:
        return ExitWatch(asyncio.get_running_loop())

    async def wait_ended(self, process: ProcessId, timeout_s: float | None) -> bool:
        """Whether it has provably ended, after at most `timeout_s`; `None`: once it has."""
        ended = self._watch(process)
        try:
            async with asyncio.timeout(timeout_s):
                await ended.wait()
        except TimeoutError:
            return False
        return True

    def kill(self, process: ProcessId) -> None:
        """SIGKILL, which a stopped process takes too; without effect on one that has ended."""
        self._watch(process)
        self._exits.kill(process.name)

    def watched(self) -> dict[str, bool]:
        """What was ever asked about, oldest first: the process's name, and whether its end was seen."""
        return {name: ended.is_set() for name, ended in self._watched.items()}

    def _watch(self, process: ProcessId) -> asyncio.Event:
        if (known := self._watched.get(process.name)) is not None:
            return known
        ended = self._watched[process.name] = asyncio.Event()
        self._exits.watch(process.name, process.pid, ended.set)
        # Looked at after the pidfd was opened: if this is our process, then so is the pidfd's.
        if not ended.is_set() and started_at(process.pid) != process.started:
            self._exits.forget(process.name)
            ended.set()
        self._forget_oldest()
        return ended

    def _forget_oldest(self) -> None:
        done = [name for name, ended in self._watched.items() if ended.is_set()]
        for name in done[: max(0, len(done) - MAX_REMEMBERED)]:
            del self._watched[name]


class WatcherActor(NodeWatcher):
    """The watcher of a node other than the supervisor's. Its calls share one event loop, so any number may wait."""

    def __init__(self, spec: ClusterSpec) -> None:
        begin(spec, "watcher", None)
        super().__init__()

    def boot(self) -> HostBoot:
        """Under which this node runs."""
        return this_boot(str(ray.util.get_node_ip_address()))
