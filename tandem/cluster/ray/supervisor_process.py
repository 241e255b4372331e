"""The supervisor with its gRPC service and its Ray launcher: what `SupervisorActor` runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.request.targets import Targets
from tandem.cluster.checks.host import this_host
from tandem.cluster.checks.preflight import check_room
from tandem.cluster.ray.launcher import RayLauncher
from tandem.cluster.spec import ClusterSpec, SupervisorFace
from tandem.cluster.supervisor.autoscale import Range, Settings
from tandem.cluster.supervisor.load_follower import Law
from tandem.cluster.supervisor.service import SupervisorService
from tandem.cluster.supervisor.slots import Policy
from tandem.cluster.supervisor.supervisor import Supervisor
from tandem.core.config import Config
from tandem.core.identity import Role
from tandem.rpc.channel import bind, host_of, make_server
from tandem.rpc.v1 import supervisor_pb2_grpc


def make_policy(config: Config) -> Policy:
    """How long this cluster's supervisor waits: as long as all else does, and for who loads several heartbeats."""
    transport = config.transport
    return Policy(
        silence_s=transport.lease_s + transport.grace_s,
        router_silence_s=transport.lease_s,
        loading_silence_s=max(Policy.loading_silence_s, 3 * transport.heartbeat_s),
        flexible=config.pools.flexible,
    )


async def serve_supervisor(
    spec: ClusterSpec,
    key_digests: frozenset[bytes],
    face: SupervisorFace,
    on_listening: Callable[[], None],
    cache_secret: bytes,
) -> None:
    """Supervise until a shutdown is complete. Raises `OSError` when the control port is taken."""
    pools, transport = spec.config.pools, spec.config.transport
    workers = {Role.PREFILL: pools.prefill, Role.DECODE: pools.decode}
    launcher = RayLauncher(spec, key_digests)

    def room(added: dict[Role, int]) -> None:
        if spec.local:  # else Ray finds a node with room, or has one added
            check_room(spec.config, this_host(), spec.kv_bytes, added)

    targets = Targets.of(spec.config)
    ranges = {role: Range(pool.least, pool.most) for role, pool in workers.items() if pool.least < pool.most}
    supervisor = Supervisor(
        launcher,
        wanted={**{role: pool.at_first for role, pool in workers.items()}, Role.ROUTER: pools.routers},
        heartbeat_s=transport.heartbeat_s,
        policy=make_policy(spec.config),
        check_room=room,
        cache_secret=cache_secret,
        ranges=ranges,
        law=Law(
            Settings(pools.utilisation, pools.shrink_delay_s),
            ttft_s=targets.ttft_s,
            tpot_s=targets.tpot_s,
            page_size=spec.config.cache.page_size,
        ),
    )
    server = make_server()
    supervisor_pb2_grpc.add_SupervisorControlServicer_to_server(SupervisorService(supervisor, spec), server)
    bind(server, host_of(face.address), spec.control_port)
    await server.start()
    try:
        await asyncio.to_thread(launcher.remember_face, face)
    except BaseException:
        await server.stop(grace=None)  # or the port would be taken for the next start
        raise
    on_listening()
    async with asyncio.TaskGroup() as tasks:
        resting = tasks.create_task(launcher.rest())
        await supervisor.run()
        resting.cancel()
    await server.stop(grace=2.0)  # lets the answer to Shutdown and the last watch go out
    await launcher.end_self()
