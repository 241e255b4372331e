"""The Ray under a cluster: one of our own that dies with `tandem serve`, or one that runs already.

A local Ray is started by `ray.init()` inside the serving process, not by `ray start`: its processes then carry the
kernel's parent-death signal. Even a SIGKILL of `tandem serve` takes Ray with it: raylet and control store at once, our
actors with their raylet, and Ray's own two agents by `tandem.cluster.serve.orphan_guard`.
"""

from __future__ import annotations

import logging
import os
import site
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tandem
from tandem.cluster.ray.probe import asks_for_token
from tandem.cluster.spec import NAMESPACE
from tandem.core.addresses import split_address
from tandem.core.errors import ConfigError, InternalError, NotRunningError
from tandem.core.identity import WORKER_ROLES
from tandem.rpc.security import is_loopback

OBJECT_STORE_BYTES = 100 << 20
"""Neither requests nor pages go through Ray's object store; this is close to the least that Ray accepts."""

_PLENTY = 1_000_000
"""Of the resources `prefill` and `decode` on a local node: memory bounds the pools there, not Ray."""

RECONNECT_S = 600
"""How long every Ray process, `tandem serve` included, waits for a control store that is lost before it ends itself.
Requests need no Ray, so they go on that long. Ray's own 60 s would end them in the middle."""

_LOOK_EVERY_S = 0.2

_RECONNECT_SETTING = "RAY_gcs_rpc_server_reconnect_timeout_s"

_LOCAL_SETTINGS = {
    "RAY_worker_niceness": "0",  # Ray's 15 would let any other process on the host slow the workers down
    _RECONNECT_SETTING: str(RECONNECT_S),
}
"""Ray's own settings by environment: unlike `_system_config` it reaches Ray's agents too."""

_UNWATCHED_SETTINGS = {
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",  # 0: tasks are not recorded
    "RAY_event_stats": "0",
    "RAY_report_worker_backlog_interval_ms": "60000",  # of tasks that wait; ours are actors, and all of them run
}
"""What Ray would measure of itself in every process of ours. Nobody looks at it in a local Ray, which has no dashboard,
and it wakes idle processes all the time. What the user has set himself stays."""


@dataclass(frozen=True)
class RayHome:
    """Where actors go. `log_directory` is Ray's own on this node."""

    address: str
    node_id: str
    log_directory: str


def start_local_ray() -> RayHome:
    """Start a Ray of our own; call it from the main thread, with which its processes share their fate.

    Raises:
        InternalError: Ray did not start; names its logs.
    """
    _set_environment()
    os.environ.update(local_environment(os.environ))
    import ray

    try:
        ray.init(
            address="local",
            namespace=NAMESPACE,
            num_cpus=0,  # no idle workers in store; our actors ask for no CPUs
            resources={role.value: _PLENTY for role in WORKER_ROLES},
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except Exception as error:  # Ray raises plain ones too, as where the host is too busy to start it in time
        from ray._common.utils import get_default_ray_temp_dir

        logs = Path(get_default_ray_temp_dir()) / "session_latest" / "logs"
        raise InternalError(f"Ray did not start: {error}; its logs are under {logs}") from error
    return _home()


def local_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What the processes of a Ray of our own get, made from what the user has set."""
    return {**_UNWATCHED_SETTINGS, **environment, **_LOCAL_SETTINGS}


def join_ray(address: str, *, remedy: str) -> RayHome:
    """Connect to the Ray cluster that runs at `address` (`auto`: the one of this host).

    Args:
        remedy: what the user may do when there is none.

    Raises:
        ConfigError: there is none, or it does not let us in.
    """
    _set_environment()
    _use_token_if_there()
    if address != "auto":
        _check_answers(address, remedy)
    import ray

    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _not_joined(address, error, remedy) from error
    return _home()


@contextmanager
def open_store(address: str, *, remedy: str) -> Iterator[None]:
    """Inside the block `tandem.cluster.ray.kv_store` reads what the Ray at `address` keeps. Nothing is joined, so this
    host need not be a node of it.

    Raises:
        NotRunningError: no Ray runs on this host, which `auto` means.
        ConfigError: as `join_ray`, also for a store that is lost within the block.
    """
    _set_environment()
    _use_token_if_there()
    if address != "auto":
        _check_answers(address, remedy)
    from ray.exceptions import RayError
    from ray.experimental import internal_kv

    try:
        where = _address_here(remedy) if address == "auto" else address
        internal_kv._initialize_internal_kv(internal_kv.GcsClient(address=where))
        yield
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        raise _not_joined(address, error, remedy) from error
    finally:
        internal_kv._internal_kv_reset()


def _address_here(remedy: str) -> str:
    """Of the Ray of this host. Raises `NotRunningError`: there is none; one that crashed may have left its address."""
    from ray._private.services import canonicalize_bootstrap_address, find_gcs_addresses

    try:
        where = str(canonicalize_bootstrap_address("auto"))
    except ConnectionError as error:
        raise NotRunningError(f"no Ray runs on this host; {remedy}", key="--address") from error
    if not find_gcs_addresses():
        try:
            asks_for_token(where, remedy=remedy)
        except ConfigError as error:
            raise NotRunningError(error.message, key="--address") from error
    return where


def _not_joined(address: str, error: Exception, remedy: str) -> ConfigError:
    if "auth" in f"{error} {error.__cause__}".lower():
        return _wants_token(address)
    reason = str(error).strip().splitlines()[0]
    return ConfigError(f"cannot join Ray at {address} ({reason}); {remedy}", key="--address")


def _use_token_if_there() -> None:
    """A Ray that `tandem serve` or `ray start` has made wants this user's token; one that wants none ignores it. Ray
    itself looks for it with `auto` only."""
    if "RAY_AUTH_MODE" not in os.environ and (Path.home() / ".ray" / "auth_token").is_file():
        os.environ["RAY_AUTH_MODE"] = "token"


def check_reachable() -> None:
    """Whether the nodes of the Ray that was joined can reach this one.

    Raises:
        ConfigError: they know it by an address that leads nowhere from there.
    """
    import ray

    own = str(ray.util.get_node_ip_address())
    others = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
    if is_loopback(own) and not all(map(is_loopback, others)):
        raise unreachable(own)


def unreachable(own: str) -> ConfigError:
    """What is said of a node that others cannot reach."""
    return ConfigError(
        f"this host is in Ray as {own}, which on every other host means that host itself (Debian gives 127.0.1.1 to a "
        "host's own name); start Ray here with --node-ip-address=ADDRESS, as the files for its launcher do",
        key="--address",
    )


def _check_answers(address: str, remedy: str) -> None:
    """Ray itself would try for half a minute, and say so in its own words. Raises `ConfigError`."""
    try:
        split_address(address)
    except ValueError as error:
        raise ConfigError(
            f"{address} is no address of a Ray head; give host:port (6379 as a rule), or `auto` for the Ray of this "
            "host",
            key="--address",
        ) from error
    if asks_for_token(address, remedy=remedy) and os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        raise _wants_token(address)


def _wants_token(address: str) -> ConfigError:
    return ConfigError(
        f"Ray at {address} wants a token; set RAY_AUTH_MODE=token and have its token in ~/.ray/auth_token",
        key="--address",
    )


def session_directory() -> Path:
    """Ray's own directory for this cluster on this node."""
    from ray._private.worker import global_worker

    return Path(global_worker.node.get_session_dir_path())


def wait_forgotten(name: str, timeout_s: float) -> bool:
    """Until the joined Ray has no actor of this name any more: one that has ended is known for a while. Whether it is
    so within the time."""
    import ray

    deadline_s = time.monotonic() + timeout_s
    while name in ray.util.list_named_actors():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_LOOK_EVERY_S)
    return True


def leave_ray() -> None:
    """Disconnect; ends a local Ray."""
    import ray

    ray.shutdown()


def _home() -> RayHome:
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
    )


def _set_environment() -> None:
    """Before Ray is imported; what the user has set himself stays."""
    os.environ.setdefault(_RECONNECT_SETTING, str(RECONNECT_S))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray's coming default; else it warns
    package_root = str(Path(tandem.__file__).resolve().parent.parent)
    if package_root not in site.getsitepackages():
        # A checkout that is not installed: Ray's processes find it where this one did.
        paths = [package_root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    logging.getLogger("ray").setLevel(logging.ERROR)
