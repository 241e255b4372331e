"""`tandem doctor`: the checks of `tandem serve`, and those that only matter to someone who looks for a fault."""

from __future__ import annotations

import os
import socket
import tempfile
from importlib import metadata
from pathlib import Path

import psutil

from tandem.cluster import statefile
from tandem.cluster.checks.finding import Finding
from tandem.cluster.checks.host import human_bytes, this_host
from tandem.cluster.checks.preflight import Preflight
from tandem.cluster.ray.home import OBJECT_STORE_BYTES
from tandem.cluster.ray.probe import asks_for_token, require_token
from tandem.core.config import Config
from tandem.core.errors import ConfigError

PACKAGES = ("torch", "transformers", "ray", "grpcio", "protobuf", "safetensors", "tokenizers", "fastapi", "uvicorn")
_LOG_ROOM_BYTES = 1 << 30


def examine(config: Config, *, address: str | None) -> list[Finding]:
    """Every finding, in the order in which a start would meet them. Starts nothing."""
    return [
        *Preflight(config, this_host(), local=address is None).findings(),
        check_versions(),
        check_ray(),
        *([check_joined_ray(address)] if address not in (None, "auto") else []),
        check_disk(),
        check_clusters(),
    ]


def check_versions() -> Finding:
    versions, missing = [], []
    for name in PACKAGES:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        return Finding("versions", "fail", f"not installed: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    return Finding("versions", "ok", ", ".join(versions))


def check_ray() -> Finding:
    """Whether a Ray of our own could start, and which runs already."""
    shm = Path("/dev/shm")
    if shm.is_dir():
        free = psutil.disk_usage(str(shm)).free
        if free < OBJECT_STORE_BYTES:
            return Finding(
                "ray",
                "fail",
                f"/dev/shm has {human_bytes(free)} free, Ray needs {human_bytes(OBJECT_STORE_BYTES)}",
                "give the container more shared memory (docker run --shm-size=1g)",
            )
    try:
        socket.gethostbyname(socket.gethostname())
    except OSError:
        return Finding("ray", "warn", f"the host name {socket.gethostname()} has no address", "add it to /etc/hosts")
    heads = sum(process.name() == "gcs_server" for process in psutil.process_iter(["name"]))
    running = f"{heads} Ray cluster(s) run here; join with --address auto" if heads else "none runs; one can be started"
    return Finding("ray", "ok", running)


def check_joined_ray(address: str) -> Finding:
    """What `tandem serve --address` looks at before it joins (`auto` is known to Ray alone)."""
    try:
        require_token(address)
        wants = asks_for_token(address, remedy="start it with `ray start`, or name another")
    except ConfigError as error:
        detail, _, remedy = error.message.partition("; ")
        return Finding("token", "fail", detail, remedy)
    return Finding("token", "ok", f"Ray at {address} " + ("wants its token" if wants else "is on loopback"))


def check_disk() -> Finding:
    """Ray keeps its sockets and logs in the temporary directory."""
    directory = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    if not os.access(directory, os.W_OK):
        return Finding("disk", "fail", f"{directory} cannot be written", "set RAY_TMPDIR to a directory of yours")
    free = psutil.disk_usage(str(directory)).free
    if free < _LOG_ROOM_BYTES:
        return Finding("disk", "warn", f"{directory} has {human_bytes(free)} free", "make room for Ray's logs")
    return Finding("disk", "ok", f"{directory} has {human_bytes(free)} free for logs")


def check_clusters() -> Finding:
    clusters = statefile.running()
    if not clusters:
        return Finding("clusters", "ok", "no cluster of this user runs here")
    return Finding("clusters", "ok", "; ".join(f"port {cluster.port}: {cluster.describe()}" for cluster in clusters))
