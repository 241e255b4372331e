"""The router's control service: the supervisor pushes the membership and asks it to drain."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from router.cluster import Cluster
from tandem.core.errors import ConfigError
from tandem.rpc.channel import bind, make_server
from tandem.rpc.v1.control_pb2 import (
    DrainRouterReply,
    DrainRouterRequest,
    Membership,
    MembershipReply,
)
from tandem.rpc.v1.control_pb2_grpc import RouterControlServicer, add_RouterControlServicer_to_server


class RouterControl(RouterControlServicer):
    """`tandem.v1.RouterControl` on the router's loop."""

    def __init__(self, cluster: Cluster, drain: Callable[[], Awaitable[None]]) -> None:
        self._cluster = cluster
        self._drain = drain

    async def SetMembership(self, request: Membership, _: Any) -> MembershipReply:
        self._cluster.apply(request)
        return MembershipReply()

    async def DrainRouter(self, _request: DrainRouterRequest, _: Any) -> DrainRouterReply:
        await self._drain()
        return DrainRouterReply()


async def serve_control(control: RouterControl, host: str, port: int) -> tuple[grpc.aio.Server, int]:
    """Start the service; returns it and the port it listens on. Raises `ConfigError` where the port is taken."""
    server = make_server()
    add_RouterControlServicer_to_server(control, server)
    try:
        bound = bind(server, host, port)
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"cannot listen on {host}:{port} for control: {error}", key="control_port") from error
    await server.start()
    return server, bound
