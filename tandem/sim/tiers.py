"""Page tiers of a simulated worker: the shipped ones (`tandem/worker/page_tiers.py`) over stores without bytes, whose
reads and writes take as long as their bandwidth says."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tandem.core.pages import CacheChange
from tandem.core.tiers import TierIndex
from tandem.sim.kernel import Kernel
from tandem.worker.disk_tier import DiskTier
from tandem.worker.host_tier import HostTier
from tandem.worker.page_tiers import TieredPages
from tandem.worker.scheduler import BatchScheduler
from tandem.worker.tier_store import TierCounters


@dataclass(frozen=True, slots=True)
class TierShape:
    """What each worker has below its pool.

    Attributes:
        host_bytes, disk_bytes: that it keeps there; 0: nothing.
        host_bytes_per_s: between the memories of the host and the card.
        disk_bytes_per_s: of the disk, to read and to write at once.
    """

    host_bytes: int
    disk_bytes: int
    host_bytes_per_s: float
    disk_bytes_per_s: float


class _Time:
    """The kernel's, and what the call that runs on a lane has taken by now."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.spent_s = kernel, 0.0

    def now_s(self) -> float:
        return self.kernel.now_s + self.spent_s

    def after(self, delay_s: float, call: Callable[[], object]) -> None:
        self.kernel.after(self.spent_s + delay_s, call)


class VirtualLane:
    """A thread of its own: calls one after the other, each as long as it says to `_Time`. What a call changes is there
    when it begins; what it has done by others, when it has got so far."""

    def __init__(self, time: _Time) -> None:
        self._time, self._is_busy = time, False
        self.is_running = False  # one of its calls
        self._calls: deque[Callable[[], None]] = deque()

    def put(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        if not self._is_busy:
            self._is_busy = True
            self._time.after(0.0, self._run)

    def _run(self) -> None:
        if not self._calls:
            self._is_busy = False
            return
        self.is_running = True
        self._calls.popleft()()
        self.is_running = False
        self._time.after(0.0, self._run)
        self._time.spent_s = 0.0

    def close(self) -> None:
        self._calls.clear()

    def join(self, _: float) -> bool:
        return not self._is_busy


class VirtualTier:
    """A `TierStore` that knows what it holds, and how long that takes."""

    def __init__(
        self, like: type[HostTier | DiskTier], most_bytes: int, page_bytes: int, bytes_per_s: float, time: _Time
    ) -> None:
        self.name, self.guessed_bytes_per_s = like.name, like.guessed_bytes_per_s
        self.counters = TierCounters()
        self.on_change: Callable[[Iterable[bytes]], None] = lambda _: None
        self._page_bytes, self._page_s, self._time = page_bytes, page_bytes / bytes_per_s, time
        self._index = TierIndex[bytes](most_bytes)

    def has(self, key: bytes) -> bool:
        return key in self._index

    def use(self, keys: Sequence[bytes]) -> None:
        self._index.use(keys)

    def held(self) -> tuple[int, int]:
        return len(self._index), self._index.num_bytes

    def find(self) -> None:
        """It begins empty."""

    def get(self, key: bytes, _: memoryview) -> bool:
        if key not in self._index:
            return False
        self._time.spent_s += self._page_s
        self.counters.num_read += 1
        self.counters.read_s += self._page_s
        return True

    def put(self, key: bytes, parent: bytes, _: memoryview) -> None:
        gone = self._index.add(key, self._page_bytes, parent or None)
        self.counters.num_evicted += len(gone)
        self.on_change([key, *gone])
        if key in gone:
            self.counters.num_lost += 1
            return
        self._time.spent_s += self._page_s
        self.counters.num_written += 1
        self.counters.write_s += self._page_s

    def discard(self, key: bytes) -> None:
        self._index.drop(key)
        self.on_change([key])

    def close(self) -> None:
        """Nothing of it lasts."""


class _NoMemory:
    """Of a pool whose pages have no bytes."""

    def read_page(self, page: int, into: memoryview) -> None:
        pass

    def write_page(self, page: int, data: memoryview) -> None:
        pass


def simulated_tiers(
    shape: TierShape,
    kernel: Kernel,
    scheduler: BatchScheduler,
    page_bytes: int,
    to_owner: Callable[[Callable[[], None]], None],
    tell: Callable[[CacheChange, CacheChange], None],
) -> TieredPages | None:
    """Those of one worker; `None`: not a page has room in them. `to_owner`: runs a call when no step is under way."""
    time, stores = _Time(kernel), list[VirtualTier]()
    writer, reader = VirtualLane(time), VirtualLane(time)

    def hand_over(call: Callable[[], None]) -> None:
        # What the writer asks is whether pages are still what was copied. That changes nothing, so it is no reason to
        # take the steps of a worker one by one that could be taken at once.
        time.after(0.0, call if writer.is_running else lambda: to_owner(call))

    if shape.host_bytes >= page_bytes:
        whole = shape.host_bytes // page_bytes * page_bytes
        stores.append(VirtualTier(HostTier, whole, page_bytes, shape.host_bytes_per_s, time))
    if shape.disk_bytes >= page_bytes:
        stores.append(VirtualTier(DiskTier, shape.disk_bytes, page_bytes, shape.disk_bytes_per_s, time))
    if not stores:
        return None
    return TieredPages(
        scheduler,
        _NoMemory(),
        page_bytes,
        stores,
        to_owner=hand_over,
        call_later=time.after,
        tell=tell,
        writer=writer,
        reader=reader,
        clock=time.now_s,
        make_buffer=lambda _: memoryview(b""),
    )
