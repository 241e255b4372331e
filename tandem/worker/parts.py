"""What a worker is made of. One function builds it; the roles take from it what they use."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

from kvtransfer.digest import digests_of, no_digests
from kvtransfer.extents import ArenaShape, TakeDigests
from kvtransfer.interface import find_interface
from kvtransfer.layout import NO_DIGEST, LayoutId
from kvtransfer.transfer_thread import TransferThread
from kvtransfer.transports.base import Transport
from kvtransfer.transports.events import ThreadEvent
from kvtransfer.transports.own_stream import use_own_stream
from kvtransfer.transports.registry import create_transport
from kvtransfer.wire import layout_to_proto, protocols_to_proto
from tandem.core.config import Config, TransportConfig
from tandem.core.errors import ConfigError, TandemError, TransportError
from tandem.core.identity import Role
from tandem.core.pages import PagePool, model_salt
from tandem.core.pidfd import ExitWatch, host_id
from tandem.core.protocols import Protocols
from tandem.core.tokenizer import Tokenizer
from tandem.core.version import version
from tandem.core.vocabulary import Vocabulary
from tandem.core.windows import Windows
from tandem.engine.arena import KVArena
from tandem.engine.engine import Engine
from tandem.rpc import security
from tandem.rpc.convert import ROLE_TO_PROTO, page_counts_to_proto, prompt_steps_to_proto
from tandem.rpc.v1 import common_pb2 as pb
from tandem.worker.cache_report import CacheReport
from tandem.worker.counters import WorkerCounters
from tandem.worker.cpu.core_shares import CoreShares
from tandem.worker.cpu.pacing import CpuPacing
from tandem.worker.cpu.pages_ahead import PagesAhead
from tandem.worker.cpu.transfer_cores import transfer_cores
from tandem.worker.draft_model import load_draft
from tandem.worker.guides import Guides
from tandem.worker.life import WorkerLife
from tandem.worker.limits import Site, max_num_seqs, scheduler_limits
from tandem.worker.load import LoadReport
from tandem.worker.pacing import Pacing
from tandem.worker.page_tiers import TieredPages
from tandem.worker.request import RequestLimits
from tandem.worker.runner import Runner
from tandem.worker.scheduler import BatchScheduler
from tandem.worker.step_engine import StepEngine, load_engine, num_slots
from tandem.worker.step_log import StepLog
from tandem.worker.tier_parts import make_tiers, tiers_to_proto

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Which worker this is, and what it may use.

    Attributes:
        worker_id: stable name in the cluster, e.g. `prefill-0`.
        incarnation: new at each start; also the transport's agent name.
        kv_bytes: memory of the KV arena, in bytes.
        num_threads: CPU threads of the engine.
        host: address to listen on, and to tell to others.
        port: TCP port of the gRPC service; 0 takes a free one.
        core_shares: a file through which the workers of this node share their CPU threads, and beside which they say
            where their weights are; `None`: they share neither.
    """

    worker_id: str
    incarnation: str
    model_dir: Path
    kv_bytes: int
    num_threads: int
    host: str = "127.0.0.1"
    port: int = 0
    device: str = "cpu"
    core_shares: Path | None = None


@dataclass(slots=True)
class WorkerParts:
    """What both roles are built on.

    Attributes:
        info: how others know this worker; its address is there once it listens.
        exits: tells when a process of this host ends; lives in the event loop.
        page_network: interface and address by which pages come and go; empty: the transport chooses.
        draft: the engine of the model that proposes tokens; `None`: there is none.
    """

    config: Config
    info: pb.WorkerInfo
    engine: StepEngine
    scheduler: BatchScheduler
    runner: Runner
    transfer: TransferThread
    layout: LayoutId
    arena_shape: ArenaShape
    take_digests: TakeDigests
    counters: WorkerCounters
    load: LoadReport
    cache: CacheReport
    pacing: Pacing
    life: WorkerLife
    exits: ExitWatch
    loop: asyncio.AbstractEventLoop
    page_network: str
    guides: Guides
    tiers: TieredPages | None
    draft: Engine | None

    @property
    def worker_id(self) -> str:
        return self.info.worker_id

    @property
    def incarnation(self) -> str:
        return self.info.incarnation

    @property
    def pool(self) -> PagePool:
        return self.scheduler.pool

    @property
    def request_limits(self) -> RequestLimits:
        """What a model and the configuration make of a request."""
        return RequestLimits(
            vocab_size=self.engine.vocab_size,
            max_context=self.engine.max_context,
            eos=frozenset(self.engine.eos_token_ids),
            max_choices=self.config.limits.max_choices,
            priority_ageing_s=self.config.scheduling.priority_ageing_s,
            pooling=self.engine.pooling,
        )

    def ask_transfer(self, command: Callable[[Transport], _T]) -> Future[_T]:
        """Run on the transfer thread, in order; from any thread. The future gets a failure, which also ends the
        worker."""
        future = self.transfer.submit(command)
        self.life.watch(future)
        return future

    def on_transfer(self, command: Callable[[Transport], None]) -> Future[None] | None:
        """As `ask_transfer`, for commands that nobody waits for. `None`: nothing happens, since the worker stops."""
        return None if self.life.stopping else self.ask_transfer(command)

    def read_report(self) -> pb.WorkerStatus:
        """The status, with what is counted for heartbeats alone; in the event loop."""
        self.counters.num_unfilled_slots = self.scheduler.num_unfilled_slots
        return self.read_status()

    def read_status(self) -> pb.WorkerStatus:
        """The newest load and all counts; from any thread."""
        load, counters = self.load.newest, self.counters
        return pb.WorkerStatus(
            num_running=load.num_running,
            num_queued=load.num_queued,
            num_queued_tokens=load.num_queued_tokens,
            num_incoming=load.num_incoming,
            pages=page_counts_to_proto(load.pages),
            draining=self.life.draining,
            prompt_tokens_computed=counters.num_prompt_tokens_computed,
            decode_tokens=counters.num_decode_tokens,
            transfer_bytes=counters.num_transfer_bytes,
            preemptions=counters.num_preemptions,
            prompt_tokens_cached=counters.num_prompt_tokens_cached,
            refused=counters.num_refused,
            page_network=self.page_network,
            certificate_expires=security.current().certificate_expires,
            masks=counters.num_masks,
            mask_s=counters.mask_s,
            late_masks=counters.num_late_masks,
            slow_grammars=counters.num_slow_grammars,
            guesses=counters.num_guesses,
            right_guesses=counters.num_right_guesses,
            drafts=counters.num_drafts,
            right_drafts=counters.num_right_drafts,
            mixed_steps=counters.num_mixed_steps,
            mixed_s=counters.mixed_s,
            chunk_tokens=counters.num_chunk_tokens,
            chunk_s=counters.chunk_s,
            steps=counters.num_steps,
            busy_s=counters.busy_s,
            max_num_seqs=self.scheduler.limits.max_num_seqs,
            unfilled_slots=counters.num_unfilled_slots,
            prompt_steps=prompt_steps_to_proto(counters.prompt_steps),
            tiers=tiers_to_proto(self.tiers) if self.tiers is not None else None,
        )


def build_parts(
    role: Role,
    config: Config,
    place: WorkerPlace,
    loop: asyncio.AbstractEventLoop,
    life: WorkerLife,
    *,
    on_transfer_event: Callable[[ThreadEvent], None],
    on_load: Callable[[], None],
    undo: ExitStack,
    engine: StepEngine | None = None,
) -> WorkerParts:
    """Load the model and make everything that both roles are built on. The transfer thread runs then, the runner not.

    Args:
        on_transfer_event: hears of the transport; on the transfer thread.
        on_load: called when the load has changed; on the runner thread.
        undo: gets what gives each part back.
        engine: the model, with its pages, of an earlier life of this process; `None`: it is loaded.

    Raises:
        TandemError: the model cannot be served, memory or transport cannot be had.
    """
    engine = load_engine(
        role,
        config,
        model_dir=place.model_dir,
        kv_bytes=place.kv_bytes,
        num_threads=place.num_threads,
        device=place.device,
        weight_register=_weight_register(config, place),
        kept=engine,
    )
    draft = _load_draft(config, place, engine) if role is Role.DECODE else None
    arena = engine.arena
    if config.cache.preallocate:
        for each in (engine, draft):
            if each is not None:
                each.arena.preallocate()
    site = Site(role, engine.on_cpu, _cores_file(config, place) is not None, engine.types.in_tiles)
    scheduler = BatchScheduler(
        PagePool(engine.num_pages, config.cache.page_size),
        scheduler_limits(config, site, num_slots(engine), engine.window, engine.num_windowed),
        salt=model_salt(engine.weights_sha256),
        prefix_cache=config.cache.prefix_cache,
        # At decode the transfer thread takes pages for grants, and gives them back.
        lock=threading.RLock() if role is Role.DECODE else None,
    )
    cache = CacheReport()
    if config.cache.prefix_cache:
        scheduler.pool.note_changes()
    pacing = _make_pacing(config, place, site, arena)
    undo.callback(pacing.close)
    name, counters = place.worker_id, WorkerCounters()
    step_log = _step_log(config, name, engine.windows)
    if step_log is not None:
        undo.callback(step_log.close)
    runner = Runner(engine, scheduler, name=f"runner-{name}", on_fatal=life.fail, pacing=pacing, step_log=step_log)
    guides = Guides(_load_vocabulary(place, engine), runner.submit, counters)
    undo.callback(guides.close)
    transport = make_transport(config.transport, place)
    cores = transfer_cores(role, os.sched_getaffinity(0)) if site.on_cpu else None
    transfer = TransferThread(transport, on_transfer_event, life.fail, name=f"kv-{name}", cores=cores)
    undo.callback(transfer.stop)
    transfer.start()
    layout = LayoutId(
        weights_sha256=engine.weights_sha256,
        window=engine.window,
        num_windowed=engine.num_windowed,
        **asdict(arena.layout),
    )
    if not config.transport.digests:
        layout = replace(layout, digest=NO_DIGEST)
    to_owner = runner.submit if role is Role.PREFILL else _on_transfer(transfer, life)
    tiers = make_tiers(config.cache, name, layout, arena, scheduler, to_owner, loop, cache.note_tiers, life.fail)
    if tiers is not None:
        undo.callback(tiers.close)
    scheduler.tiers = tiers
    metadata = transfer.submit(lambda transport: _register(transport, arena, place.device)).result()
    return WorkerParts(
        config=config,
        info=_describe(config, place, site, engine, layout, metadata),
        engine=engine,
        scheduler=scheduler,
        runner=runner,
        transfer=transfer,
        layout=layout,
        arena_shape=ArenaShape(layout.num_layers, arena.num_pages, arena.layout.extent_bytes),
        take_digests=_digests(config, engine),
        counters=counters,
        load=LoadReport(scheduler, on_load, life.check_drained, cache.note),
        cache=cache,
        pacing=pacing,
        life=life,
        exits=ExitWatch(loop),
        loop=loop,
        page_network=str(transport.interface or ""),
        guides=guides,
        tiers=tiers,
        draft=draft,
    )


def make_transport(config: TransportConfig, place: WorkerPlace) -> Transport:
    """A library that blocks waits for a peer as long as all else does: silent for so long, it counts as lost."""
    interface = find_interface(config.interface) if config.interface else None
    return create_transport(
        config.name, place.incarnation, host=place.host, interface=interface, timeout_s=config.lease_s
    )


def _on_transfer(transfer: TransferThread, life: WorkerLife) -> Callable[[Callable[[], None]], None]:
    """Runs calls on the transfer thread until the worker stops."""

    def run(call: Callable[[], None]) -> None:
        if not life.stopping:
            try:
                life.watch(transfer.submit(lambda _: call()))
            except TransportError:
                if not life.stopping:
                    raise

    return run


def _load_draft(config: Config, place: WorkerPlace, target: StepEngine) -> Engine | None:
    register = _weight_register(config, place)
    return load_draft(config, target, place.model_dir, num_threads=place.num_threads, weight_register=register)


def _load_vocabulary(place: WorkerPlace, engine: StepEngine) -> Vocabulary | TandemError:
    """A model may do without one: its requests with a grammar get the error."""
    try:
        return Vocabulary(Tokenizer.from_dir(place.model_dir), engine.eos_token_ids, engine.vocab_size)
    except TandemError as error:
        _log.info("no grammars: %s", error.message)
        return error


def _digests(config: Config, engine: StepEngine) -> TakeDigests:
    if not config.transport.digests:
        return no_digests
    return engine.device_digests() or digests_of(engine.arena.extent_view)


def _weight_register(config: Config, place: WorkerPlace) -> Path | None:
    """Where the workers of this node find each other's weights; `None`: this one keeps its own."""
    cores = place.core_shares
    return cores.with_name(f"{cores.name}.weights") if cores is not None and config.model.share_weights else None


def _cores_file(config: Config, place: WorkerPlace) -> Path | None:
    """Where the workers of this node share their cores; `None`: this one does not."""
    computes_here = place.device == "cpu" and config.model.engine == "torch"
    return place.core_shares if computes_here and config.scheduling.share_cores else None


def _make_pacing(config: Config, place: WorkerPlace, site: Site, arena: KVArena) -> Pacing:
    if not site.on_cpu or config.model.engine == "simulated":
        return Pacing()
    path = _cores_file(config, place)
    shares = CoreShares(path, place.num_threads) if path is not None else None
    return CpuPacing(shares, PagesAhead(arena, f"pages-{place.worker_id}"))


def _step_log(config: Config, worker_id: str, windows: Windows) -> StepLog | None:
    """`None`: nobody asked for it. Raises `ConfigError`."""
    directory = config.metrics.step_log
    try:
        return StepLog(Path(directory).expanduser(), worker_id, windows) if directory else None
    except OSError as error:
        raise ConfigError(
            f"metrics.step_log is {directory}, where {worker_id} cannot write ({error.strerror}); name another one",
            key="metrics.step_log",
        ) from error


def _register(transport: Transport, arena: KVArena, device: str) -> bytes:
    """On the transfer thread; returns how peers reach the arena."""
    use_own_stream(arena.device)  # pages are computed before they are sent: no copy need wait for the model
    transport.register(arena.base_address, arena.num_bytes, owner=arena.tensor, device=device)
    return transport.metadata()


def _describe(
    config: Config, place: WorkerPlace, site: Site, engine: StepEngine, layout: LayoutId, metadata: bytes
) -> pb.WorkerInfo:
    return pb.WorkerInfo(
        worker_id=place.worker_id,
        incarnation=place.incarnation,
        role=ROLE_TO_PROTO[site.role],
        node=socket.gethostname(),
        pid=os.getpid(),
        layout=layout_to_proto(layout),
        transport=config.transport.name,
        transport_metadata=metadata,
        num_pages=engine.arena.num_pages,
        max_context=engine.max_context,
        vocab_size=engine.vocab_size,
        eos_token_ids=engine.eos_token_ids,
        version=version(),
        host_id=host_id(),
        protocols=protocols_to_proto(Protocols()),
        max_num_seqs=max_num_seqs(config, num_slots(engine)),
        on_gpu=place.device != "cpu",
    )
