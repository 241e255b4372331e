"""Finds a running cluster and talks to its supervisor. Blocks; needs Ray only where no state file says where it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import grpc

from tandem.cluster import statefile
from tandem.cluster.spec import NAMESPACE, SUPERVISOR_NAME, SupervisorFace
from tandem.cluster.statefile import ClusterFile, Stage
from tandem.core.config import SecurityConfig
from tandem.core.errors import ConfigError, ForbiddenError, WorkerLostError
from tandem.rpc.channel import host_of, make_blocking_channel
from tandem.rpc.permissions import PeerRole
from tandem.rpc.security import Security
from tandem.rpc.v1 import supervisor_pb2_grpc

TIMEOUT_S = 10.0


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


def find_started(port: int | None, address: str | None) -> Target:
    """As `find_cluster`, but raises `ConfigError` for a cluster that still starts, and says what that waits for."""
    target = find_cluster(port, address)
    if target.file and target.stage is Stage.STARTING:
        raise ConfigError(
            f"the cluster on port {target.file.port} is {target.file.describe()}; try again when it is ready"
        )
    return target


def find_cluster(port: int | None, address: str | None) -> Target:
    """The cluster on HTTP `port` of this host, the one in the Ray at `address`, or the only one there is.

    Raises:
        ConfigError: there is none, or more than one to choose from.
        WorkerLostError: its supervisor takes too long to start, or has ended.
    """
    if address:
        return _ask_ray(address)
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
        raise ConfigError(f"no cluster of this user runs {where}; choose --port {ports}", key="--port")
    raise ConfigError(
        f"no cluster of this user runs {where}; start one with `tandem serve`, or name its Ray cluster with --address"
    )


@contextmanager
def supervisor(target: Target) -> Iterator[supervisor_pb2_grpc.SupervisorControlStub]:
    """A stub. gRPC's errors inside the block become ours.

    Raises:
        WorkerLostError: the supervisor does not answer, or there is none yet.
        ForbiddenError: it does not accept this host's certificate as a client's.
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
            raise WorkerLostError(
                f"the supervisor at {target.control_address} does not answer ({error.code().name}: {error.details()}); "
                "if that stays so, end the cluster with `tandem stop --now`"
            ) from error


def _ask_ray(address: str) -> Target:
    from tandem.cluster.ray.home import join_ray, leave_ray

    join_ray(address, remedy="name the address that `ray status` or `tandem serve` tells, or leave --address out")
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError

    from tandem.cluster.ray.kv_store import recall_face

    try:
        actor = ray.get_actor(SUPERVISOR_NAME, namespace=NAMESPACE)
        face = recall_face()
        if face is None or not statefile.listens(face.address):  # it is being started, perhaps again
            face = cast(SupervisorFace, ray.get(actor.wait_ready.remote(), timeout=TIMEOUT_S))
        return Target(face.address, face.security)
    except GetTimeoutError as error:
        late = f"the supervisor in the Ray cluster at {address} has not started within {TIMEOUT_S:g} s"
        raise WorkerLostError(late) from error
    except RayActorError as error:
        raise WorkerLostError(f"the supervisor in the Ray cluster at {address} has ended") from error
    except ValueError as error:
        raise ConfigError(
            f"no Tandem cluster runs in the Ray cluster at {address}; "
            f"start one with `tandem serve --address {address}`",
            key="--address",
        ) from error
    finally:
        leave_ray()
