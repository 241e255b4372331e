"""Works the queue off in the one router that holds the lease."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections import Counter
from collections.abc import Callable

from router.batches.lease import Lease, Wake
from router.batches.run import BatchRun
from router.batches.store import BatchFolder, Store

_log = logging.getLogger(__name__)

#: Batches, and those of one owner; further ones wait. Whose owner has the fewest goes first, then the oldest.
_MAX_AT_ONCE = 8
_MAX_OF_OWNER = _MAX_AT_ONCE // 2
#: One that ends by an unforeseen error again and again pauses longer each time, up to this, and so keeps no place.
_LONGEST_PAUSE_S = 600.0
#: Routers of this host tell of what they queue. Those of others that share the directory cannot: so the leader looks.
_LOOK_S = 5.0


class BatchLeader:
    """Stands in line for the lease from `start` to `stop`. Runs on the router's loop."""

    def __init__(self, store: Store, make_run: Callable[[BatchFolder], BatchRun]) -> None:
        self._store, self._make_run = store, make_run
        self._lease = Lease(store.directory / "lease", self._lead)
        self.wake = Wake(store.directory / "wake")
        self._changed = asyncio.Event()
        self._leading: asyncio.Task[None] | None = None
        self._runs: dict[str, tuple[BatchRun, asyncio.Task[None]]] = {}
        self._told_to_end = weakref.WeakSet[asyncio.Task[None]]()
        # Of each that was interrupted: how often in a row, and until when of the loop's time it pauses.
        self._pauses: dict[str, tuple[int, float]] = {}

    def start(self) -> None:
        self._lease.start()

    async def stop(self) -> None:
        """End what is under way; another router goes on with it. May be called twice."""
        if self._leading is not None:
            self._end(self._leading)
            await asyncio.wait({self._leading})
            await self._end_runs()  # an error may have been ending them when it was cancelled
        self._lease.close()

    def _lead(self) -> None:
        self._leading = asyncio.create_task(self._work(), name="batch leader")

    async def _work(self) -> None:
        """Lead until this is cancelled, or an unforeseen error comes: then who is next in line leads."""
        _log.info("this router leads the queue of batches in %s", self._store.directory)
        try:
            await self._work_off()
        except Exception:  # noqa: BLE001 - who holds the lease and does not work keeps all others from it
            _log.exception("this router leads the queue of batches no more; it stands in line for it again")
            self._lease.give_on()

    async def _work_off(self) -> None:
        try:
            self._listen()
            await self._clear_stale()
            while True:
                self._changed.clear()
                await self._look()
                try:
                    async with asyncio.timeout(_LOOK_S):
                        await self._changed.wait()
                except TimeoutError:
                    continue
        finally:
            self.wake.close()
            await self._end_runs()

    def _listen(self) -> None:
        try:
            self.wake.listen(self._changed.set)
        except OSError as error:
            _log.warning("no pipe can tell of new batches (%s): the router looks every %g s", error, _LOOK_S)

    async def _clear_stale(self) -> None:
        try:
            await asyncio.to_thread(self._store.clear_stale)
        except OSError:
            _log.exception("what ended routers left cannot be cleared; whoever leads next tries again")

    async def _end_runs(self) -> None:
        tasks = {task for _, task in self._runs.values()}
        for task in tasks:
            self._end(task)
        if tasks:
            await asyncio.wait(tasks)

    async def _look(self) -> None:
        """Start what is queued, and let what runs see whether it was cancelled. What cannot be read now is read at the
        next look."""
        try:
            queued = await asyncio.to_thread(self._store.queued)
        except OSError:
            _log.exception("the queue of batches cannot be read; the router looks again")
            queued = []
        for name, (run, _) in self._runs.items():
            try:
                run.look()
            except OSError:
                _log.exception("whether batch %s is cancelled cannot be read; the router looks again", name)
        self._start_some(queued)

    def _start_some(self, queued: list[BatchFolder]) -> None:
        now_s = asyncio.get_running_loop().time()
        names = {folder.path.name for folder in queued}
        self._pauses = {name: pause for name, pause in self._pauses.items() if name in names}
        waiting = [
            folder
            for folder in queued
            if folder.path.name not in self._runs and self._pauses.get(folder.path.name, (0, 0.0))[1] <= now_s
        ]
        num_of = Counter(run.folder.owner for run, _ in self._runs.values())
        while waiting and len(self._runs) < _MAX_AT_ONCE:
            first = min(waiting, key=lambda folder: num_of[folder.owner])
            if num_of[first.owner] >= _MAX_OF_OWNER:
                break
            waiting.remove(first)
            num_of[first.owner] += 1
            self._start(first)

    def _start(self, folder: BatchFolder) -> None:
        run = self._make_run(folder)
        name = folder.path.name

        def ended(task: asyncio.Task[None]) -> None:
            del self._runs[name]
            if task.cancelled():
                return
            if (error := task.exception()) is None:
                self._pauses.pop(name, None)
                self._changed.set()
                return
            num, _ = self._pauses.get(name, (0, 0.0))
            pause_s = _LOOK_S if isinstance(error, OSError) else min(_LOOK_S * 2.0 ** min(num, 30), _LONGEST_PAUSE_S)
            self._pauses[name] = num + 1, asyncio.get_running_loop().time() + pause_s
            _log.error("batch %s was interrupted; it goes on in %g s", name, pause_s, exc_info=error)

        task = asyncio.create_task(run.run(), name=name)
        task.add_done_callback(ended)
        self._runs[name] = (run, task)

    def _end(self, task: asyncio.Task[None]) -> None:
        """Told a second time, it would cut short what it ends. Whether it was told is kept here: `task.cancelling()`
        also counts a timeout of its own which has just passed, and which it takes for no end."""
        if task not in self._told_to_end:
            self._told_to_end.add(task)
            task.cancel()
