"""Finds a running cluster and talks to its supervisor. Blocks.

The state files of this host say where a cluster is, or Ray's control store. Any host that reaches that one and has
Ray's token may ask it: it need not be a node of Ray.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from tandem.cluster import statefile
from tandem.cluster.statefile import ClusterFile, Stage
from tandem.core.config import SecurityConfig
from tandem.core.errors import ConfigError, ForbiddenError, IncompatibleError, NotRunningError, WorkerLostError
from tandem.rpc.channel import host_of, make_blocking_channel
from tandem.rpc.permissions import PeerRole
from tandem.rpc.security import Security
from tandem.rpc.v1 import supervisor_pb2_grpc

TIMEOUT_S = 10.0

_START_S = 30.0  # a supervisor that Ray starts again: on a busy host the process alone takes its time
_LOOK_S = 0.2  # again at Ray's control store, for one that starts


@dataclass(frozen=True)
class Where:
    """What the user says about the cluster that is meant.

    Attributes:
        port: its HTTP port, on this host.
        address: of its Ray; `auto`: of this host.
        certificates: the directory with the client's, where it lies elsewhere here than on the cluster's hosts.
    """

    port: int | None = None
    address: str | None = None
    certificates: Path | None = None

    def __str__(self) -> str:
        """As options."""
        given = {"port": self.port, "address": self.address, "certificates": self.certificates}
        return "".join(f" --{name} {value}" for name, value in given.items() if value)


@dataclass(frozen=True)
class Target:
    """A supervisor."""

    control_address: str  # empty only where `file` says that the cluster is starting
    security: SecurityConfig
    file: ClusterFile | None = None  # `None`: it was found through Ray

    @property
    def stage(self) -> Stage | None:
        """How far its `tandem serve` is; `None`: that does not live, or is not known."""
        return self.file.stage if self.file and self.file.serve_process else None


def find_started(where: Where) -> Target:
    """As `find_cluster`, but raises `ConfigError` for a cluster that still starts, and says what that waits for."""
    target = find_cluster(where)
    if target.file and target.stage is Stage.STARTING:
        raise ConfigError(
            f"the cluster on port {target.file.port} is {target.file.describe()}; try again when it is ready"
        )
    return target


def find_cluster(where: Where) -> Target:
    """The cluster on that HTTP port of this host, the one in that Ray, or the only one there is.

    Raises:
        NotRunningError: there is none.
        ConfigError: there is more than one to choose from.
        WorkerLostError: its supervisor takes too long to start, or has ended.
    """
    found = _ask_ray(where.address) if where.address else _on_this_host(where.port)
    if where.certificates is None:
        return found
    path = str(where.certificates.expanduser().absolute())
    return dataclasses.replace(found, security=dataclasses.replace(found.security, certificates=path))


def _on_this_host(port: int | None) -> Target:
    clusters = statefile.running()
    chosen = [cluster for cluster in clusters if port in (None, cluster.port)]
    if len(chosen) == 1:
        file = chosen[0]
        return Target(file.control_address, SecurityConfig(file.tls, file.certificates), file)
    if chosen:
        ports = ", ".join(str(cluster.port) for cluster in chosen)
        raise ConfigError(f"several clusters run here, on ports {ports}; choose one with --port", key="--port")
    where = f"on port {port}" if port else "on this host"
    if clusters:
        ports = " or ".join(str(cluster.port) for cluster in clusters)
        raise NotRunningError(f"no cluster of this user runs {where}; choose --port {ports}", key="--port")
    raise NotRunningError(
        f"no cluster of this user runs {where}; start one with `tandem serve`, or name its Ray cluster with --address"
    )


@contextmanager
def supervisor(target: Target) -> Iterator[supervisor_pb2_grpc.SupervisorControlStub]:
    """A stub. gRPC's errors inside the block become ours.

    Raises:
        WorkerLostError: the supervisor does not answer, or there is none yet.
        ForbiddenError: it does not accept this host's certificate as a client's.
        IncompatibleError: its version does not know what it is asked for.
        ConfigError: it speaks TLS, and there is no certificate of a client here.
    """
    if not target.control_address:
        raise WorkerLostError("its supervisor has not been started")
    security = Security(target.security, PeerRole.CLIENT, host_of(target.control_address))
    with make_blocking_channel(target.control_address, security) as channel:
        try:
            yield supervisor_pb2_grpc.SupervisorControlStub(channel)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.PERMISSION_DENIED:
                raise ForbiddenError(f"the supervisor at {target.control_address}: {error.details()}") from error
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise IncompatibleError(
                    f"the supervisor at {target.control_address} is of a version that does not know this; call the "
                    "`tandem` of the version that started the cluster"
                ) from error
            raise WorkerLostError(
                f"the supervisor at {target.control_address} does not answer ({error.code().name}: {error.details()}); "
                "if that stays so, end the cluster with `tandem stop --now`"
            ) from error


def _ask_ray(address: str) -> Target:
    from tandem.cluster.ray.home import open_store

    remedy = "name the address that `ray status` or `tandem serve` tells, or leave --address out"
    with open_store(address, remedy=remedy):
        from tandem.cluster.ray import kv_store  # imports Ray, which must have been told about its token before

        deadline_s = time.monotonic() + _START_S
        while kept := kv_store.recall():
            face = kv_store.face_of(kept)
            if face is not None and statefile.listens(face.address, TIMEOUT_S):
                return Target(face.address, face.security)
            if time.monotonic() > deadline_s:
                where = f"; it was at {face.address}, which this host may be unable to reach" if face else ""
                raise WorkerLostError(
                    f"the supervisor in the Ray cluster at {address} has not started within {_START_S:g} s{where}"
                )
            time.sleep(_LOOK_S)
    raise NotRunningError(
        f"no Tandem cluster runs in the Ray cluster at {address}; start one with `tandem serve --address {address}`",
        key="--address",
    )
