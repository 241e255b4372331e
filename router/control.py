"""The router's control service: the supervisor pushes the membership, asks for the status, lets it drain or stop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from router.lifecycle.context import RouterContext
from router.workers.other_routers import OtherRouters
from tandem.core.addresses import join_address
from tandem.core.errors import ConfigError
from tandem.rpc import security
from tandem.rpc.channel import bind, make_server
from tandem.rpc.guard import RoleGuard
from tandem.rpc.v1 import control_pb2 as pb
from tandem.rpc.v1.control_pb2_grpc import RouterControlServicer, add_RouterControlServicer_to_server


class RouterControl(RouterControlServicer):
    """`tandem.v1.RouterControl` on the router's loop.

    Args:
        told: called whenever a membership has come.
        stop: begins to stop the router; called with the seconds that requests under way get.
        leave: lets others take new connections; returns when those that it has have ended. May be called again.
    """

    def __init__(
        self,
        context: RouterContext,
        others: OtherRouters,
        told: Callable[[], object],
        stop: Callable[[float], None],
        leave: Callable[[], Awaitable[None]],
    ) -> None:
        self._context, self._others = context, others
        self._told, self._stop, self._leave = told, stop, leave

    async def SetMembership(self, request: pb.Membership, _: Any) -> pb.MembershipReply:
        if self._context.workers.apply(request):
            self._others.apply(request.other_routers)
        self._told()
        return pb.MembershipReply()

    async def DrainRouter(self, request: pb.DrainRouterRequest, _: Any) -> pb.DrainRouterReply:
        if request.others_serve:
            await self._leave()
            await self._context.open_exchanges.wait_none()
        else:
            await self._context.drain()
        return pb.DrainRouterReply()

    async def StopRouter(self, request: pb.StopRouterRequest, _: Any) -> pb.StopRouterReply:
        self._stop(request.drain_s)
        return pb.StopRouterReply()

    async def RouterStatus(self, _request: pb.RouterStatusRequest, _: Any) -> pb.RouterStatusReply:
        """Answered on the loop that serves clients: if that stands still, so does this."""
        context = self._context
        return pb.RouterStatusReply(
            num_under_way=context.open_exchanges.num,
            num_waiting=context.admission.num_waiting,
            suspected_writers=[pb.SuspectedWriter(**key._asdict()) for key in sorted(context.workers.suspected)],
            errors=context.errors.to_wire(),
            load=context.load.to_wire(context.turns),
            certificate_expires=security.current().certificate_expires,
        )

    async def AskRouter(self, request: pb.RouterQuestion, _: Any) -> pb.RouterAnswer:
        return pb.RouterAnswer(text=self._others.answer(request))


async def serve_control(control: RouterControl, guard: RoleGuard, host: str, port: int) -> tuple[grpc.aio.Server, int]:
    """Start the service; returns it and the port it listens on. Raises `ConfigError` where the port is taken."""
    server = make_server(guard)
    add_RouterControlServicer_to_server(control, server)
    try:
        bound = bind(server, host, port)
    except (OSError, RuntimeError) as error:
        where = join_address(host, port)
        raise ConfigError(f"cannot listen on {where} for control: {error}", key="control_port") from error
    await server.start()
    return server, bound
