"""The Ray under a cluster: one of our own that dies with `tandem serve`, or one that runs already.

A local Ray is started by `ray.init()` inside the serving process, not by `ray start`: its processes then carry the
kernel's parent-death signal. Even a SIGKILL of `tandem serve` takes Ray with it: raylet and control store at once,
our actors with their raylet; Ray's own two agents some seconds later, at worst after
a minute (how long Ray lets them try to report the death).
"""

from __future__ import annotations

import logging
import os
import site
import socket
from dataclasses import dataclass
from pathlib import Path

import tandem
from tandem.cluster.spec import NAMESPACE
from tandem.core.errors import ConfigError, InternalError

OBJECT_STORE_BYTES = 100 << 20
"""Neither requests nor pages go through Ray's object store; this is close to the least that Ray accepts."""

CONNECT_TIMEOUT_S = 5.0

_PLENTY = 1_000_000
"""Of the resources `prefill` and `decode` on a local node: memory bounds the pools there, not Ray."""

_LOCAL_SETTINGS = {
    "RAY_worker_niceness": "0",  # Ray's 15 would let any other process on the host slow the workers down
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",  # how long agents outlive a control store that was killed; was 60
}
"""Ray's own settings by environment: unlike `_system_config` it reaches Ray's agents too."""


@dataclass(frozen=True)
class RayHome:
    """Where actors go. `log_directory` is Ray's own on this node."""

    address: str
    node_id: str
    log_directory: str
    local: bool


def start_local_ray() -> RayHome:
    """Start a Ray of our own; call it from the main thread, with which its processes share their fate.

    Raises:
        InternalError: Ray did not start; names its logs.
    """
    _set_environment()
    os.environ.update(_LOCAL_SETTINGS)
    import ray

    try:
        ray.init(
            address="local",
            namespace=NAMESPACE,
            num_cpus=0,  # no idle workers in store; our actors ask for no CPUs
            resources=dict.fromkeys(("prefill", "decode"), _PLENTY),
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (RuntimeError, OSError, ValueError) as error:
        raise InternalError(f"Ray did not start: {error}; its logs are under /tmp/ray/session_latest/logs") from error
    return _home(local=True)


def join_ray(address: str) -> RayHome:
    """Connect to the Ray cluster that runs at `address` (`auto`: the one of this host).

    Raises:
        ConfigError: there is none, or none of its nodes can hold a worker.
    """
    _set_environment()
    if "RAY_AUTH_MODE" not in os.environ and (Path.home() / ".ray" / "auth_token").is_file():
        # A Ray that `tandem serve` or `ray start` has made wants this token; one that wants none ignores it. Ray
        # itself thinks of it for `auto` only.
        os.environ["RAY_AUTH_MODE"] = "token"
    _check_listens(address)
    import ray

    try:
        ray.init(
            address=address,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        if "auth" in f"{error} {error.__cause__}".lower():
            raise ConfigError(
                f"Ray at {address} wants a token; set RAY_AUTH_MODE=token and have its token in ~/.ray/auth_token",
                key="--address",
            ) from error
        raise ConfigError(
            f"cannot join Ray at {address} ({str(error).strip().splitlines()[0]}); start one with `ray start --head "
            """--resources='{"prefill": 1, "decode": 1}'`, or leave --address out for a Ray of its own""",
            key="--address",
        ) from error
    return _home(local=False)


def _check_listens(address: str) -> None:
    """Ray itself would try for minutes. Raises `ConfigError` when nothing listens at `host:port`."""
    host, colon, port = address.rpartition(":")
    if not colon:
        return  # `auto`: Ray knows where it runs
    try:
        socket.create_connection((host.removeprefix("ray://"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"nothing answers at {address} ({error}); name the address that `ray status` or `tandem serve` tells, "
            "or `auto` for the Ray of this host",
            key="--address",
        ) from error


def leave_ray() -> None:
    """Disconnect; ends a local Ray."""
    import ray

    ray.shutdown()


def _home(*, local: bool) -> RayHome:
    import ray
    from ray._private.worker import global_worker

    # Ray prints every process that ends as an error on our standard output; the reporter tells that in its own words.
    # This is the switch that Ray's debugger uses; there is no public one.
    ray._private.worker._worker_logs_enabled = False
    context = ray.get_runtime_context()
    return RayHome(
        address=str(context.gcs_address),
        node_id=context.get_node_id(),
        log_directory=str(global_worker.node.get_logs_dir_path()),
        local=local,
    )


def _set_environment() -> None:
    """Before Ray is imported; what the user has set himself stays."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray's coming default; else it warns
    package_root = str(Path(tandem.__file__).resolve().parent.parent)
    if package_root not in site.getsitepackages():
        # A checkout that is not installed: Ray's processes find it where this one did.
        paths = [package_root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    logging.getLogger("ray").setLevel(logging.ERROR)
