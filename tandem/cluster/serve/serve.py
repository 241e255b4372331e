"""`tandem serve`: from a configuration to a cluster that answers, and back to nothing.

    claim of the port ─> check ─> Ray ─> supervisor ─> workers and router ─> ready
          ─> (Ctrl-C, `tandem stop`, failure) ─> all stopped

A local cluster ends with this process, however it ends. In a Ray that was joined, the actors are detached: they end
with Ctrl-C and `tandem stop`, and go on if this process is killed.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc

from router.http.auth import KEYS_VARIABLE
from tandem.cluster.checks.host import human_bytes, this_host
from tandem.cluster.checks.preflight import Plan, Preflight
from tandem.cluster.ray import home
from tandem.cluster.ray.probe import require_token
from tandem.cluster.serve import processes
from tandem.cluster.serve.banner import ready_banner
from tandem.cluster.serve.first_start import raise_if_hopeless
from tandem.cluster.serve.report import ClusterNews, Reporter, RequestNews
from tandem.cluster.serve.signals import StopRequested, StopSignals
from tandem.cluster.serve.stopping import STOP_S, stop_cluster
from tandem.cluster.serve.supervisor_watchdog import end_silent_supervisor, watch_ray
from tandem.cluster.spec import SUPERVISOR_NAME, ClusterSpec, NotStarted, SupervisorFace
from tandem.cluster.statefile import Claim, Stage
from tandem.core.addresses import join_address
from tandem.core.arguments import PoolSizes
from tandem.core.config import Config, PoolConfig
from tandem.core.errors import ConfigError, ForbiddenError, InternalError, TandemError, WorkerLostError, error_class
from tandem.core.identity import Role
from tandem.core.ports import free_port
from tandem.core.version import version
from tandem.engine.quantized.scheme import read_scheme
from tandem.rpc.channel import make_channel
from tandem.rpc.permissions import PeerRole
from tandem.rpc.security import configure
from tandem.rpc.v1 import supervisor_pb2, supervisor_pb2_grpc

if TYPE_CHECKING:
    from tandem.cluster.ray.home import RayHome
    from tandem.rpc.v1.supervisor_pb2_grpc import SupervisorControlAsyncStub as _Stub

GRACE_S = 30.0
"""What requests under way get after the first Ctrl-C; the second ends them."""

WITHOUT_RAY_S = 120.0
"""How long a local cluster serves on without Ray's control store, as long as all its processes live."""

JOIN_REMEDY = (
    """start one with `ray start --head --resources='{"prefill": 1, "decode": 1}'`, or leave --address out for a Ray """
    "of its own"
)

# How long a supervisor that has never served may fail by what may pass.
FIRST_START_S = 60.0

# Hosts remove files of their temporary directories after days at the earliest.
_RENEW_CLAIM_S = 3600.0

_FIRST_RETRY_S = 0.2
_MAX_RETRY_S = 5.0


def serve(config: Config, address: str | None, on_ready: Callable[[], None] | None = None) -> int:
    """Run a cluster until it is stopped; the exit code.

    Args:
        address: of a running Ray cluster to join (`auto`: the one of this host); `None`: a Ray of its own.
        on_ready: called once, when the cluster answers; with it there is no terminal to stop it from.

    Raises:
        TandemError: it cannot start, or it failed; everything has been stopped.
    """
    with Reporter() as reporter:
        serving = Serving(config, address, reporter, on_ready)
        try:
            serving.run()
        except StopRequested:
            reporter.end_steps()
        finally:
            serving.clean_up()
        if serving.left_running:
            return 1
        reporter.line("Stopped.")
    return 0


class Serving:
    """One run of `tandem serve`."""

    def __init__(
        self, config: Config, address: str | None, reporter: Reporter, on_ready: Callable[[], None] | None = None
    ) -> None:
        self._config, self._address, self._reporter, self._on_ready = config, address, reporter, on_ready
        self._signals = StopSignals(self._say_stopping, self._force)
        self._claim = Claim(config.http.port, local=address is None)
        self._home: RayHome | None = None
        self._supervisor: Any = None  # its Ray actor
        self._control_address = ""
        self._starts_ray = False  # from then on this process and its descendants are the cluster's
        self._has_ended = False  # the cluster, as its supervisor has said
        self.left_running = False  # in a joined Ray nobody has confirmed that everything stopped
        self._news, self._request_news = ClusterNews(), RequestNews()
        self._was_ready = False
        self._ray_lost = asyncio.Event()
        self._broken = asyncio.Event()  # something of the cluster does not run

    @property
    def _local(self) -> bool:
        return self._address is None

    def run(self) -> None:
        self._signals.install()
        self._claim.take(waits_for="the checks of this host and the model")
        self._reporter.line(f"Tandem {version()}", style="bold")
        plan = Preflight(self._config, this_host(), local=self._local).plan()
        self._say_plan(plan)
        os.environ.pop(KEYS_VARIABLE, None)  # the processes of a Ray of our own get digests, like those of a joined one
        if self._address is None:
            self._begin_step("Starting Ray", waits_for="Ray to start")
            self._starts_ray = True
            processes.adopt_orphans()
            processes.start_guard()
            self._home = home.start_local_ray()
        else:
            self._begin_step(f"Joining Ray at {self._address}", waits_for="Ray to let it in")
            self._home = home.join_ray(self._address, remedy=JOIN_REMEDY)
            home.check_reachable()
            require_token(self._home.address)
        self._signals.install()
        self._reporter.line(f"  ray         at {self._home.address}, logs in {self._home.log_directory}")
        self._begin_step("Starting the workers", waits_for="the supervisor to start")
        self._start_supervisor(plan, self._home)
        asyncio.run(self._supervise(plan))

    def clean_up(self) -> None:
        """Stop what has been started, whatever happened before: first in order, then by force."""
        self._signals.begin_cleanup()
        self._claim.tell(Stage.STOPPING, "its processes to end")
        if self._home and not self._local and self._supervisor is not None:
            asyncio.run(self._shut_down(grace_s=0.0))
        if self._home and not self._ray_lost.is_set():  # a lost Ray does not answer the farewell either
            home.leave_ray()
        if self._starts_ray:
            processes.kill_descendants()
        self._claim.release()

    # --- starting ------------------------------------------------------------------------------------------------

    def _begin_step(self, text: str, *, waits_for: str) -> None:
        self._reporter.step(text)
        self._claim.tell(Stage.STARTING, waits_for)

    def _start_supervisor(self, plan: Plan, home: RayHome) -> None:
        import ray

        from tandem.cluster.ray.supervisor_actor import start_supervisor

        host = "127.0.0.1" if self._local else ray.util.get_node_ip_address()
        configure(plan.config.security, PeerRole.CLIENT, host)
        if SUPERVISOR_NAME in ray.util.list_named_actors():
            raise ConfigError(
                f"a Tandem cluster runs in the Ray cluster at {home.address} already; change it with `tandem scale`, "
                "end it with `tandem stop --address`, or start a Ray of its own without --address",
                key="--address",
            )
        spec = ClusterSpec(
            config=plan.config,
            model_name=plan.model_name,
            model_dir=str(plan.facts.directory) if self._local else "",
            kv_bytes=plan.kv_bytes,
            num_threads=plan.num_threads,
            local=self._local,
            control_port=free_port(),  # the supervisor keeps it for all its lives
            node_id=home.node_id,
            ray_address=home.address,
            log_directory=plan.config.logging.directory or (home.log_directory if self._local else ""),
        )
        with self._signals.postponed():  # else what Ray has begun to start would be nobody's
            self._supervisor = start_supervisor(spec, plan.key_digests)
        self._claim.tell(
            Stage.STARTING,
            "the workers and the router to be ready",
            control_address=join_address(host, spec.control_port),
            tls=spec.config.security.tls,
            certificates=spec.config.security.certificates,
        )

    async def _supervise(self, plan: Plan) -> None:
        """Until a signal, the cluster's end or its failure."""
        watching = asyncio.create_task(self._watch(plan))
        stopping = asyncio.create_task(self._signals.wait())
        lost = asyncio.create_task(self._watch_ray())
        keeping = asyncio.create_task(self._keep_claim())
        await asyncio.wait({watching, stopping, lost}, return_when=asyncio.FIRST_COMPLETED)
        ended = watching.done()
        for task in (watching, stopping, lost, keeping):
            task.cancel()
        outcomes = await asyncio.gather(watching, stopping, lost, return_exceptions=True)
        if not ended:
            self._reporter.end_steps()
            self._claim.tell(Stage.STOPPING, "requests under way and its processes to end")
            await self._shut_down(GRACE_S if self._was_ready else 0.0)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    async def _keep_claim(self) -> None:
        while True:
            await asyncio.sleep(_RENEW_CLAIM_S)
            self._claim.renew()

    async def _watch(self, plan: Plan) -> None:
        """Tell what changes, until the cluster has ended. A supervisor that dies is awaited: Ray starts it again."""
        retry_s = _FIRST_RETRY_S
        while True:
            face = await self._find_supervisor()
            self._control_address = face.address
            async with make_channel(face.address) as channel:
                stub: _Stub = supervisor_pb2_grpc.SupervisorControlStub(channel)
                ending: asyncio.Task[None] | None = None
                try:
                    async for cluster in stub.WatchCluster(supervisor_pb2.WatchClusterRequest()):
                        retry_s = _FIRST_RETRY_S
                        self._heard(cluster, plan)
                        if cluster.stopping and not cluster.workers and not cluster.routers:
                            self._has_ended = True
                            return
                        ending = ending or asyncio.create_task(self._end_silent(stub, face, plan))
                except grpc.aio.AioRpcError as error:
                    if error.code() is grpc.StatusCode.PERMISSION_DENIED:  # for ever
                        raise ForbiddenError(f"the supervisor at {face.address}: {error.details()}") from error
                    self._reporter.line(f"  supervisor  does not answer ({error.code().name}); Ray starts it again")
                finally:
                    if ending:
                        ending.cancel()
            await asyncio.sleep(retry_s)  # one that lives and fails is not asked without a pause
            retry_s = min(2 * retry_s, _MAX_RETRY_S)

    async def _end_silent(self, stub: _Stub, face: SupervisorFace, plan: Plan) -> None:
        lease_s = plan.config.transport.lease_s
        await end_silent_supervisor(stub, face, lease_s)
        self._reporter.line(f"  supervisor  was silent for {lease_s:g} s and is killed")

    async def _find_supervisor(self) -> SupervisorFace:
        """Wait until it serves, however often it starts, or is started by Ray, and tell what it waits for.

        Raises `TandemError`: it has never served and cannot, or Ray starts no further one.
        """
        import ray
        from ray.exceptions import RayActorError

        loop = asyncio.get_running_loop()
        began_at, said = loop.time(), ""
        while True:
            try:
                found: SupervisorFace | NotStarted = await self._supervisor.wait_ready.remote()
            except RayActorError as error:
                reason = str(error).strip().splitlines()[-1]
                raise InternalError(f"the supervisor ended: {reason}{self._and_logs()}") from error
            if isinstance(found, SupervisorFace):
                return found
            if not self._control_address and (found.code or loop.time() - began_at >= FIRST_START_S):
                await asyncio.to_thread(ray.kill, self._supervisor)  # a joined Ray would let it try for ever
                self._has_ended = True  # it has started nothing
                raise error_class(found.code)(f"the supervisor cannot start: {found.message}{self._and_logs()}")
            if found.message != said:
                said = found.message
                meanwhile = "requests go on" if self._was_ready else "nothing else starts before it"
                self._reporter.line(f"  supervisor  cannot start yet: {said}; it tries again, and {meanwhile}")

    def _and_logs(self) -> str:
        return f"; logs are in {self._home.log_directory}" if self._home is not None else ""

    async def _watch_ray(self) -> None:
        """Tell when Ray's control store is lost or back. A local one cannot come back: raises when it is time to stop.

        Raises:
            InternalError: what ends now could not be started again, or it has served long enough without Ray.
        """
        assert self._home is not None
        watching = asyncio.create_task(watch_ray(self._home.address, self._say_ray))
        try:
            if not self._local:
                await watching
            await self._ray_lost.wait()
            try:
                async with asyncio.timeout(WITHOUT_RAY_S):
                    await self._broken.wait()
            except TimeoutError:
                self._reporter.line(f"Stopping: requests under way finish first, for at most {GRACE_S:.0f} s.")
            else:
                self._reporter.line("Stopping: something has ended that cannot be started again without Ray.")
            raise InternalError(
                f"Ray's control store ended, and with it what starts processes again; start anew. "
                f"Ray's logs are in {self._home.log_directory}"
            )
        finally:
            watching.cancel()

    def _say_ray(self, reachable: bool) -> None:
        assert self._home is not None
        if reachable:
            self._ray_lost.clear()
            self._reporter.line(f"  ray         answers again at {self._home.address}")
            return
        self._ray_lost.set()
        then = (
            f"in {WITHOUT_RAY_S:.0f} s Tandem stops in order"
            if self._local
            else f"if it is not back within {home.RECONNECT_S} s, Ray ends every process"
        )
        self._reporter.line(
            f"  ray         its control store at {self._home.address} does not answer: requests go on, but nothing "
            f"that ends now is started again; {then}",
            style="red",
        )

    def _heard(self, cluster: supervisor_pb2.Cluster, plan: Plan) -> None:
        for line, style in (*self._news.lines(cluster), *self._request_news.lines(cluster)):
            self._reporter.line(line, style)
        if cluster.settled:
            self._broken.clear()
        else:
            self._broken.set()
        if cluster.stopping:  # asked for by `tandem stop`
            self._claim.tell(Stage.STOPPING, "requests under way and its processes to end")
        if self._was_ready:
            return
        if cluster.settled:
            self._reporter.end_steps()
            self._was_ready = True
            self._claim.tell(Stage.READY)
            self._say_ready(cluster, plan)
        elif not cluster.stopping:
            raise_if_hopeless(cluster)

    def _say_ready(self, cluster: supervisor_pb2.Cluster, plan: Plan) -> None:
        url, logs = cluster.router.url, self._where_logs_are(cluster)
        in_background = self._on_ready is not None
        for line in ready_banner(url, self._config.http.port, plan, logs, in_background=in_background):
            self._reporter.line(line)
        if self._on_ready is not None:
            self._on_ready()

    def _where_logs_are(self, cluster: supervisor_pb2.Cluster) -> str:
        assert self._home is not None
        if cluster.log_directory:
            return f"{cluster.log_directory}: supervisor.log, one for each router and worker"
        return f"`tandem logs`; on each node {self._home.log_directory}/decode-0.log and so on"

    # --- stopping ------------------------------------------------------------------------------------------------

    async def _shut_down(self, grace_s: float) -> None:
        """Ask the supervisor. What a local one leaves is left to the clean-up; a joined Ray may go on with it."""
        if self._has_ended or (self._local and not self._control_address):
            return
        try:
            await stop_cluster(self._control_address, grace_s, self._find_address)
        except TandemError as error:
            self._say_not_stopped(error)
        else:
            if self._home is not None and not self._local and not self._ray_lost.is_set():
                # Until Ray knows that it has ended, the next cluster would be refused, and told why.
                await asyncio.to_thread(home.wait_forgotten, SUPERVISOR_NAME, STOP_S)
        self._has_ended = True  # or the user knows that this is not certain

    async def _find_address(self) -> str:
        if self._ray_lost.is_set():
            raise WorkerLostError("the supervisor ended, and Ray, which is lost, cannot start the next one")
        return (await self._find_supervisor()).address

    def _say_not_stopped(self, error: TandemError) -> None:
        if self._local:
            self._reporter.line(f"The supervisor did not stop in order ({error.message}); what is left is killed.")
            return
        self.left_running = True
        self._reporter.line(
            f"Nobody has confirmed that everything stopped: {error.message}. What runs in the joined Ray cluster may "
            f"go on; end it with `tandem stop --now --address {self._address}`.",
            style="red",
        )

    def _say_stopping(self) -> None:
        self._reporter.end_steps()
        if self._was_ready:
            self._reporter.line("Stopping: requests under way finish first; Ctrl-C again stops at once.")
        else:
            self._reporter.line("Stopping what has been started.")

    def _force(self) -> None:
        """The second signal: everything of ours ends now."""
        self._reporter.end_steps()
        num_killed = processes.kill_descendants() if self._starts_ray else 0
        self._claim.release()
        if self._local:
            self._reporter.line(f"Stopped at once: {num_killed} processes were killed, requests under way broke off.")
        else:
            self._reporter.line(
                "Left at once. What runs in the joined Ray cluster may go on; "
                f"end it with `tandem stop --now --address {self._address}`."
            )
        sys.stdout.flush()
        os._exit(130)

    def _say_plan(self, plan: Plan) -> None:
        pools, facts = plan.config.pools, plan.facts
        share, dtype = plan.kv_bytes[Role.DECODE], plan.weights_dtype
        if plan.config.model.engine == "simulated":
            size = f"SIMULATED as {plan.config.model.time_model} says: its answers mean nothing"
        elif facts.quantization is None:
            size = f"{human_bytes(facts.weight_bytes(dtype))} in {dtype}"
        else:
            size = f"{human_bytes(facts.num_bytes)}, {read_scheme(facts.quantization).describe()}"
        self._reporter.line(f"  model       {facts.name} ({facts.architecture}, {size}) from {facts.directory}")
        if draft := plan.config.speculation.draft_model:
            self._reporter.line(f"  draft       {draft}, at each decode worker")
        pages = "KV pages" if plan.config.cache.dtype == "auto" else f"{plan.config.cache.dtype} KV pages"
        self._reporter.line(
            f"  pools       {_sizes(pools.prefill)} prefill, {_sizes(pools.decode)} decode"
            + (f", {pools.routers} routers; " if pools.routers > 1 else "; ")
            + (f"{human_bytes(share)} of {pages} each" if share else "each node decides on KV memory")
        )


def _sizes(pool: PoolConfig) -> str:
    """Workers of a pool, as `--prefill` takes them."""
    return str(PoolSizes(pool.least, pool.most))
