"""gRPC face of the supervisor: `tandem.v1.SupervisorControl`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from tandem.cluster.spec import ClusterSpec
from tandem.cluster.supervisor.events import Build
from tandem.cluster.supervisor.supervisor import Supervisor
from tandem.cluster.supervisor.wire import RouterReport, fill_cluster, fill_decisions
from tandem.cluster.waits import check_wait
from tandem.cluster.wheel import check_upgrade, read_wheel
from tandem.core.errors import ConfigError, IncompatibleError
from tandem.core.identity import WORKER_ROLES, Role
from tandem.core.pooling import read_pooling
from tandem.core.version import version
from tandem.rpc import security
from tandem.rpc.v1 import common_pb2, supervisor_pb2, supervisor_pb2_grpc


class SupervisorService(supervisor_pb2_grpc.SupervisorControlServicer):
    """Translates; every decision is the supervisor's."""

    def __init__(self, supervisor: Supervisor, spec: ClusterSpec) -> None:
        self._supervisor = supervisor
        self._spec = spec

    async def GetCluster(self, _request: supervisor_pb2.GetClusterRequest, _context: Any) -> supervisor_pb2.Cluster:
        await self._supervisor.opened.wait()
        return self._cluster()

    async def WatchCluster(
        self, _request: supervisor_pb2.WatchClusterRequest, _context: Any
    ) -> AsyncIterator[supervisor_pb2.Cluster]:
        await self._supervisor.opened.wait()
        async for _ in self._supervisor.changes():
            yield self._cluster()

    async def Scale(self, request: supervisor_pb2.ScaleRequest, _context: Any) -> supervisor_pb2.ScaleReply:
        await self._supervisor.opened.wait()
        sizes = {field.name: workers for field, workers in request.ListFields()}
        wanted = {role: sizes[role] for role in Role if role in sizes}
        most = {role: sizes[f"{role}_most"] for role in WORKER_ROLES if f"{role}_most" in sizes}
        try:
            if wanted.get(Role.PREFILL) == 0:
                await asyncio.to_thread(_check_generates, self._spec)
            await self._supervisor.scale(wanted, most)
        except ConfigError as error:
            return supervisor_pb2.ScaleReply(error=_error(error), cluster=self._cluster())
        return supervisor_pb2.ScaleReply(cluster=self._cluster())

    async def Drain(self, request: supervisor_pb2.DrainRequest, _context: Any) -> supervisor_pb2.DrainReply:
        await self._supervisor.opened.wait()
        try:
            check_wait(request.timeout_s, "--timeout", least_s=1e-3)
            await self._supervisor.drain(
                request.worker_id, replace_first=request.replace_first, timeout_s=request.timeout_s
            )
        except ConfigError as error:
            return supervisor_pb2.DrainReply(error=_error(error), cluster=self._cluster())
        return supervisor_pb2.DrainReply(cluster=self._cluster())

    async def Upgrade(self, request: supervisor_pb2.UpgradeRequest, _context: Any) -> supervisor_pb2.UpgradeReply:
        await self._supervisor.opened.wait()
        try:
            wheel = await asyncio.to_thread(read_wheel, request.wheel)
            await asyncio.to_thread(check_upgrade, wheel)
            await self._supervisor.upgrade(Build(wheel.digest, wheel.version), request.wheel)
        except (ConfigError, IncompatibleError) as error:
            return supervisor_pb2.UpgradeReply(error=_error(error), cluster=self._cluster())
        return supervisor_pb2.UpgradeReply(cluster=self._cluster())

    async def Shutdown(self, request: supervisor_pb2.ShutdownRequest, context: Any) -> supervisor_pb2.ShutdownReply:
        """Answers when everything has stopped. The shutdown goes on when its caller has gone."""
        await self._supervisor.opened.wait()
        try:
            check_wait(request.grace_s, "--grace")
        except ConfigError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
        await self._supervisor.shut_down(request.grace_s)
        return supervisor_pb2.ShutdownReply()

    def _cluster(self) -> supervisor_pb2.Cluster:
        message = supervisor_pb2.Cluster(
            version=version(),
            model=self._spec.model_name,
            log_directory=self._spec.log_directory,
            ray_address=self._spec.ray_address,
            pid=os.getpid(),
            certificate_expires=security.current().certificate_expires,
        )
        supervisor = self._supervisor
        told = {
            router.name: RouterReport(router.num_under_way, router.errors, router.certificate_expires)
            for router in supervisor.routers.values()
        }
        fill_cluster(message, supervisor.cluster, supervisor.loads, told, supervisor.now)
        fill_decisions(message, supervisor.follower.pools, supervisor.now)
        return message


def _check_generates(spec: ClusterSpec) -> None:
    """Raises `ConfigError` where nothing could be served without prefill workers. Of a checkpoint that is not on this
    host the routers say so, request by request."""
    if spec.model_dir and read_pooling(Path(spec.model_dir)) is not None:
        raise ConfigError(
            f"--prefill is 0, but {spec.model_name} gives vectors, which prefill workers alone make", key="prefill"
        )


def _error(error: ConfigError | IncompatibleError) -> common_pb2.Error:
    field = error.key or "" if isinstance(error, ConfigError) else ""
    return common_pb2.Error(code=error.code, message=error.message, field=field)
