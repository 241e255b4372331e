"""What a cluster is made from: decided once by `tandem serve`, then carried by the supervisor."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.config import Config, SecurityConfig
from tandem.core.identity import Role

NAMESPACE = "tandem"
"""Ray namespace of all actors: one Tandem cluster in one Ray cluster."""

SUPERVISOR_NAME = "supervisor"


@dataclass(frozen=True)
class ClusterSpec:
    """Plain data that travels to every actor, also to those of the version before or after this one.

    So fields are added with a default only, here, in the configuration, in the arguments of actors' constructors and in
    what their methods return; and none changes its meaning.
    """

    config: Config  # `model.served_names` is never empty
    model_name: str  # one that requests may use
    model_dir: str  # checkpoint on this host; empty when each node resolves `model.path` by itself
    kv_bytes: dict[Role, int]  # of each worker; 0 when its node decides (GPU memory, or several nodes)
    num_threads: dict[Role, int]  # of each worker, on CPUs; 0 when its node decides
    local: bool  # Ray belongs to `tandem serve`, everything runs on this host and listens on the loopback address
    control_port: int  # of the supervisor's gRPC service; stays when the supervisor is started again
    node_id: str  # Ray's id of the node where the supervisor lives, and the routers unless other nodes are for them
    ray_address: str
    log_directory: str  # of the processes; empty: each node's Ray session directory


@dataclass(frozen=True)
class SupervisorFace:
    """How to reach a supervisor, and which process it is."""

    address: str  # host:port of SupervisorControl
    security: SecurityConfig  # how to speak to it
    pid: int  # on the node of `ClusterSpec.node_id`
    started: int  # in clock ticks since boot


@dataclass(frozen=True)
class NotStarted:
    """Why a supervisor could not start; it tries again."""

    message: str
    code: str  # of a `TandemError`, which will be the same again; empty: it may pass, as a port that is taken
