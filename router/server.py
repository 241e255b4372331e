"""The router as a thing that starts and stops: HTTP, control service and sessions on one event loop of its own."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path

import uvloop

from router.batches.queue import BatchQueue
from router.control import RouterControl, serve_control
from router.http.app import create_app
from router.http.auth import ApiKeys, check_exposure
from router.http.grammars import GrammarCheck
from router.http.live import Live
from router.http.metrics_page import MetricsPage
from router.http.server import HttpServer, listen
from router.http.siblings import Siblings
from router.http.turn_exchange import TurnExchange
from router.lifecycle.context import RouterContext
from router.lifecycle.migration_slots import MigrationSlots
from router.lifecycle.request_load import RequestLoad
from router.lifecycle.tenants import Tenants
from router.lifecycle.token_tally import TokenTally
from router.lifecycle.turns import Turns
from router.observe.export import Exporter
from router.observe.recorder import Recorder, WorkSpan
from router.openai.model_card import ModelCard
from router.policy.admission import Admission
from router.policy.background import BackgroundAdmission
from router.policy.gate import places_of_one
from router.policy.retry_budget import RetryBudget, retry_burst
from router.request.targets import Targets
from router.workers.gauges import RouterGauges
from router.workers.other_routers import OtherRouters
from router.workers.registry import WorkerRegistry
from router.workers.vllm_names import VllmNames
from tandem.core import fault_points
from tandem.core.addresses import ANY_HOST, join_address, url_host
from tandem.core.clock import MonotonicClock
from tandem.core.config import FEWEST_SEQS, MOST_SEQS, Config
from tandem.core.identity import Role
from tandem.core.metrics import RouterMetrics
from tandem.core.slices import computing_threads, take_short_slices
from tandem.core.tokenizer import Tokenizer
from tandem.rpc.guard import RoleGuard

_log = logging.getLogger(__name__)

_DRAIN_S = 60.0
_FAREWELL_S = 1.0


@dataclass(frozen=True)
class RouterInfo:
    """Where a started router listens."""

    http_url: str  # http://host:port
    control_address: str  # host:port of `tandem.v1.RouterControl`


class RouterServer:
    """One router. `start` and `stop` may be called from any thread; signals are left to the caller.

    Attributes:
        has_failed: whether an error ended it.
        is_leaving: whether it takes no new connections any more, as others do.
    """

    def __init__(
        self,
        config: Config,
        *,
        model_dir: Path,
        host: str = "127.0.0.1",
        http_port: int = 0,
        control_port: int = 0,
        control_host: str = "127.0.0.1",
        key_digests: frozenset[bytes] = frozenset(),
        name: str = "",
        siblings: Path | None = None,
    ) -> None:
        """The system chooses ports that are 0.

        Args:
            key_digests: of API keys that hold beside those of the file.
            name: of this router among those of its cluster, such as `router-0`; its metrics have it as a label.
            siblings: directory where the routers meet that share this port; `None`: it has the port for itself.
        """
        self.has_failed = self.is_leaving = False
        self._name, self._meeting_place = name, siblings
        self._config = config
        self._model_dir = model_dir
        self._host, self._http_port = host, http_port
        self._control_host, self._control_port = control_host, control_port
        self._key_digests = key_digests
        self._listens: Future[RouterInfo] = Future()
        self._closed = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_asked = asyncio.Event()
        self._drain_s = _DRAIN_S

    # -- from any thread

    def start(self) -> RouterInfo:
        """Start and return when both ports listen.

        Raises:
            ConfigError: a port is taken, the API keys are unusable, or there are none beyond loopback.
            ModelLoadError: the tokenizer or the model's configuration cannot be read.
        """
        threading.Thread(target=self._run, name="router", daemon=True).start()
        return self._listens.result()

    def stop(self, drain_s: float = _DRAIN_S) -> None:
        """Refuse new requests, let those under way end for at most `drain_s` seconds, then close. Blocks."""
        if self._loop is not None and not self._closed.is_set():
            self._loop.call_soon_threadsafe(self._begin_stop, drain_s)
        self.wait_closed()

    def wait_closed(self, timeout_s: float | None = None) -> bool:
        """Wait until everything has ended; `False` when `timeout_s` passed first."""
        return self._closed.wait(timeout_s)

    # -- on the router's thread

    def _run(self) -> None:
        take_short_slices()
        failure: BaseException | None = None
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._main())
        except BaseException as error:  # noqa: BLE001 - handed to the caller of `start`, or logged
            failure = error
            if self._listens.done():
                _log.exception("the router failed")
        self.has_failed = failure is not None
        self._closed.set()
        if failure is not None and not self._listens.done():
            self._listens.set_exception(failure)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_default_executor(computing_threads())
        config = self._config
        check_exposure(config.http, self._host, self._key_digests)
        keys = ApiKeys(config.http, self._key_digests, MonotonicClock())
        guard = RoleGuard()
        context = self._context(guard)
        card = ModelCard.from_dir(self._model_dir, config, context.tokenizer)
        if config.metrics.vllm_names:
            names = VllmNames(context.metrics, context.workers, context.admission, card.own_name)
            context.metrics.registry.register(names)
        others = OtherRouters()
        page = MetricsPage(context.metrics, context.tally.settle, self._name, others)
        live = Live(context, card.own_name, self._name, others)
        exchange = TurnExchange(context.turns, self._name, others)
        batches = None
        if config.batches.directory:
            share = config.batches.share
            batches = BatchQueue(config, card, BackgroundAdmission(context.admission, context.clock, share))
        grammars = GrammarCheck(context, card)
        http = HttpServer(create_app(context, card, keys, page, live, grammars, batches), config.limits)
        with closing(grammars), self._siblings() as siblings, self._tracing(context, card):
            bind = partial(listen, self._host, self._http_port)
            listener, is_shared = (bind(), False) if siblings is None else siblings.take_listener(bind)
            if not is_shared:  # else others serve until this router knows the workers: here they would wait
                http.begin()
            with listener:
                await self._serve(context, others, http, guard, live, exchange, listener, siblings, batches)

    @contextmanager
    def _tracing(self, context: RouterContext, card: ModelCard) -> Iterator[None]:
        tracing = self._config.tracing
        if not tracing.otlp_endpoint:
            yield
            return
        now_s = context.clock.now
        exporter = Exporter(tracing.otlp_endpoint, tracing.sample, card.own_name, self._name, now_s)
        context.recorder.on_end = exporter.export
        with closing(exporter):
            yield

    @contextmanager
    def _siblings(self) -> Iterator[Siblings | None]:
        if self._meeting_place is None:
            yield None
            return
        with closing(Siblings(self._meeting_place, self._name)) as siblings:
            yield siblings

    async def _serve(
        self,
        context: RouterContext,
        others: OtherRouters,
        http: HttpServer,
        guard: RoleGuard,
        live: Live,
        exchange: TurnExchange,
        listener: socket.socket,
        siblings: Siblings | None,
        batches: BatchQueue | None,
    ) -> None:
        """Until it is asked to stop."""

        async def leave() -> None:
            _log.info("the router leaves: others take new connections")
            self.is_leaving = True
            if siblings is not None:
                siblings.leave()
            live.close()
            if batches is not None:
                await batches.leader.stop()
            await http.leave()

        control, control_port = await serve_control(
            RouterControl(context, others, http.begin, self._begin_stop, leave),
            guard,
            self._control_host,
            self._control_port,
        )
        http_task = asyncio.create_task(http.serve_on(listener), name="http")
        telling = asyncio.create_task(exchange.run(), name="turns of other routers")
        try:
            info = RouterInfo(
                http_url=f"http://{_for_url(self._host)}:{listener.getsockname()[1]}",
                control_address=join_address(self._control_host, control_port),
            )
            _log.info("the router listens on %s, its control service on %s", *astuple(info))
            self._listens.set_result(info)
            if batches is not None:
                batches.leader.start()
            stop_asked = asyncio.create_task(self._stop_asked.wait())
            await asyncio.wait({http_task, telling, stop_asked}, return_when=asyncio.FIRST_COMPLETED)
            if stop_asked.done():  # else one of the others has ended by itself
                fault_points.reach("router.stop")
                live.close()
                if batches is not None:
                    await batches.leader.stop()
                await self._shut_down(context)
        finally:
            if batches is not None:
                await batches.leader.stop()
            http.stop()
            has_failed = telling.done()
            telling.cancel()
            await asyncio.wait({http_task, telling})
            await control.stop(grace=0)
            await others.close()
            await context.workers.close()
        http_task.result()
        if has_failed:
            telling.result()
        _log.info("the router is closed")

    def _context(self, guard: RoleGuard) -> RouterContext:
        config, clock, metrics = self._config, MonotonicClock(), RouterMetrics()
        scheduling = config.scheduling
        earlier = scheduling.max_num_seqs or FEWEST_SEQS  # as it was then
        workers = WorkerRegistry(lease_s=config.transport.lease_s, metrics=metrics, earlier_max_num_seqs=earlier)

        def num_places() -> float:
            """Of this router."""
            return places_of_one(workers.num_places, workers.num_routers, workers.num_others, workers.num_apart)

        def num_routers() -> int:
            return workers.num_routers

        admission = Admission(scheduling.max_queued_requests, clock, num_places, num_routers)
        burst = retry_burst(scheduling.max_num_seqs or MOST_SEQS)
        budget = RetryBudget(config.limits.retry_budget, burst, clock, num_routers)
        metrics.registry.register(RouterGauges(workers, admission, budget, guard, self._name))
        tokenizer = Tokenizer.from_dir(self._model_dir)
        migrations = MigrationSlots(num_routers=num_routers)
        targets = partial(Targets.of, config)
        metrics.slo_target_s.labels("ttft").set_function(lambda: targets(on_gpu=workers.is_on_gpu).ttft_s)
        metrics.slo_target_s.labels("tpot").set_function(lambda: targets(on_gpu=workers.is_on_gpu).tpot_s)
        tenants = Tenants(metrics, clock, num_routers)
        is_mixed = scheduling.mixed_pool
        turns = Turns(lambda: workers.room(num_places(), is_mixed=is_mixed), scheduling.priority_ageing_s, clock)

        def workers_changed() -> None:
            admission.places_changed()
            turns.look()

        def reported() -> None:
            turns.look()
            if workers.num_routers > 1:  # others may have left places
                admission.on_freed()

        workers.on_change, workers.on_report = workers_changed, reported
        load, recorder = RequestLoad(), Recorder(time.time() - clock.now())
        tally = TokenTally(metrics, recorder, load, tenants, turns, asyncio.get_running_loop().call_later)
        context = RouterContext(
            config, clock, workers, admission, metrics, tokenizer, budget, migrations, tenants, turns, load, recorder,
            tally,
        )  # fmt: skip

        def note_work(request_id: str, attempt: int, role: Role, spans: Iterable[WorkSpan]) -> None:
            context.recorder.worked(request_id, attempt, role, spans, clock.now())

        workers.on_work = note_work
        return context

    def _begin_stop(self, drain_s: float) -> None:
        self._drain_s = drain_s
        self._stop_asked.set()

    async def _shut_down(self, context: RouterContext) -> None:
        under_way = context.open_exchanges
        _log.info("the router drains: %d exchanges get at most %g s", under_way.num, self._drain_s)
        try:
            async with asyncio.timeout(self._drain_s):
                await context.drain()
        except TimeoutError:
            _log.warning("the router closes with %d exchanges under way", under_way.num)
            under_way.break_off("the router is shutting down")
            # Long enough for the errors to be written; a client that does not read gets none.
            await asyncio.wait([asyncio.ensure_future(under_way.wait_none())], timeout=_FAREWELL_S)


def _for_url(host: str) -> str:
    if host in ANY_HOST:
        host = "::1" if host == "::" else "127.0.0.1"
    return url_host(host)
