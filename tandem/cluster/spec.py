"""What a cluster is made from: decided once by `tandem serve`, then carried by the supervisor."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.config import Config, SecurityConfig

NAMESPACE = "tandem"
"""Ray namespace of all actors: one Tandem cluster in one Ray cluster."""

SUPERVISOR_NAME = "supervisor"


@dataclass(frozen=True)
class ClusterSpec:
    """Plain data that travels to every actor.

    Attributes:
        config: the whole configuration; `model.served_names` is never empty.
        model_name: a name that requests may use.
        model_dir: checkpoint on this host; empty when each node resolves `model.path` by itself.
        kv_bytes: of each worker, by role; 0 when the worker's node decides (GPU memory, or several nodes).
        num_threads: CPU threads of each worker, by role; 0 when the worker's node decides.
        local: Ray belongs to `tandem serve`, everything runs on this host and listens on the loopback address.
        control_port: TCP port of the supervisor's gRPC service; stays when the supervisor is started again.
        node_id: Ray's id of the node where router and supervisor live.
        log_directory: where processes write their logs; empty: each node's Ray session directory.
    """

    config: Config
    model_name: str
    model_dir: str
    kv_bytes: dict[str, int]
    num_threads: dict[str, int]
    local: bool
    control_port: int
    node_id: str
    ray_address: str
    log_directory: str


@dataclass(frozen=True)
class SupervisorFace:
    """How to reach a supervisor, and which process it is.

    Attributes:
        address: host:port of SupervisorControl.
        security: how to speak to it.
        pid, started: of its process on the node of `ClusterSpec.node_id`; the start in clock ticks since boot.
    """

    address: str
    security: SecurityConfig
    pid: int
    started: int
