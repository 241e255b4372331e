"""The tiers below a worker's page pool, made from its configuration; what the status tells of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from kvtransfer.layout import LayoutId
from kvtransfer.transports.own_stream import use_own_stream
from tandem.core.config import CacheConfig
from tandem.core.pages import CacheChange
from tandem.engine.arena import KVArena, host_memory
from tandem.rpc.v1 import common_pb2 as pb
from tandem.worker.disk_tier import DiskTier, disk_directory
from tandem.worker.host_tier import HostTier
from tandem.worker.lane import Lane
from tandem.worker.page_tiers import TieredPages
from tandem.worker.scheduler import BatchScheduler
from tandem.worker.tier_store import TierStore

_log = logging.getLogger(__name__)

# So long the start waits for what earlier lives left on disk; the rest is found while the worker serves.
_FIND_S = 2.0


def make_tiers(
    config: CacheConfig,
    worker_id: str,
    layout: LayoutId,
    arena: KVArena,
    scheduler: BatchScheduler,
    to_owner: Callable[[Callable[[], None]], None],
    loop: asyncio.AbstractEventLoop,
    tell: Callable[[CacheChange, CacheChange], None],
    on_fatal: Callable[[BaseException], None],
) -> TieredPages | None:
    """The tiers that `config` asks for; `None`: it asks for none, or none can be had.

    Args:
        to_owner, tell: as of `TieredPages`.
        loop: keeps the time.

    Raises:
        ConfigError: there is not as much host memory.
    """
    if layout.num_windowed and (config.host_bytes or config.disk_path):
        _log.warning(
            "no pages are kept below the pool, since some layers see a window and have pages of their own; turn "
            "cache.mixed_windows off to keep all pages, and copies of them"
        )
        return None
    stores: list[TierStore] = []
    page_bytes = arena.layout.page_bytes
    if num_slots := config.host_bytes // page_bytes:
        stores.append(HostTier(host_memory(num_slots * page_bytes, arena.device), page_bytes))
    if config.disk_path:
        directory = disk_directory(config.disk_path, worker_id)
        try:
            stores.append(DiskTier(directory, layout, config.disk_bytes))
        except OSError as error:  # what is computed anew costs time, and a worker that does not start costs more
            _log.warning("no pages are kept on disk: %s", error)
    if not stores:
        return None
    begin = partial(use_own_stream, arena.device)
    tiers = TieredPages(
        scheduler,
        arena,
        page_bytes,
        stores,
        to_owner=to_owner,
        call_later=lambda delay_s, call: _call_later(loop, delay_s, call),
        tell=tell,
        writer=Lane(f"tiers-write-{worker_id}", begin, on_fatal),
        reader=Lane(f"tiers-read-{worker_id}", begin, on_fatal),
    )
    tiers.has_found.wait(_FIND_S)
    return tiers


def _call_later(loop: asyncio.AbstractEventLoop, delay_s: float, call: Callable[[], None]) -> None:
    loop.call_soon_threadsafe(loop.call_later, delay_s, call)


def tiers_to_proto(tiers: TieredPages) -> pb.TierReport:
    """From any thread."""
    counters = tiers.counters
    return pb.TierReport(
        tiers=[_store_to_proto(store) for store in tiers.stores],
        fetched=counters.num_fetched,
        missed=counters.num_missed,
        abandoned=counters.num_abandoned,
    )


def _store_to_proto(store: TierStore) -> pb.TierStatus:
    num_pages, num_bytes = store.held()
    counters = store.counters
    return pb.TierStatus(
        name=store.name,
        pages=num_pages,
        bytes=num_bytes,
        read=counters.num_read,
        written=counters.num_written,
        evicted=counters.num_evicted,
        corrupt=counters.num_corrupt,
        lost=counters.num_lost,
        read_s=counters.read_s,
        write_s=counters.write_s,
    )
