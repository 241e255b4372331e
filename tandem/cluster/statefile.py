"""Where `tandem status`, `scale` and `stop` find this user's clusters on this host, from their first second.

One small JSON file for each HTTP port. `tandem serve` claims it before anything else starts, so no two of them take one
port; it keeps its stage there, and removes the file when nothing is left. A file whose `tandem serve` has died without
removing it is recognised by process id and start time.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import logging
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import psutil

from tandem.core.addresses import split_address
from tandem.core.errors import ConfigError
from tandem.core.pidfd import started_at

_log = logging.getLogger(__name__)


class Stage(StrEnum):
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"


@dataclass(frozen=True)
class ClusterFile:
    """What `tandem serve` tells of itself, and how to reach its cluster."""

    port: int
    pid: int  # of `tandem serve`
    started: int  # in clock ticks since boot: tells it from a later process of the same number
    local: bool  # its Ray dies with it
    stage: Stage
    since_s: float  # when the stage began, in seconds since the epoch
    waits_for: str = ""  # until the next stage; empty when ready
    control_address: str = ""  # host:port of SupervisorControl; empty as long as none has been asked for
    tls: str = "auto"  # with `certificates` the cluster's `security` section
    certificates: str = ""

    @property
    def serve_process(self) -> psutil.Process | None:
        """`tandem serve` itself, while it lives."""
        try:
            process = psutil.Process(self.pid)
            alive = started_at(self.pid) == self.started and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return None
        return process if alive else None

    @property
    def running(self) -> bool:
        """A joined cluster goes on without its `tandem serve`; a local one does not."""
        return self.serve_process is not None or (not self.local and self.control_address != "")

    def describe(self) -> str:
        """`starting (pid 4711, since 14:03:10, waits for Ray to start)`."""
        if self.serve_process is None:
            return "running on without its `tandem serve`"
        since = time.strftime("%H:%M:%S", time.localtime(self.since_s))
        waits = f", waits for {self.waits_for}" if self.waits_for else ""
        return f"{self.stage} (pid {self.pid}, since {since}{waits})"


class Claim:
    """The file of this `tandem serve`: nobody else writes it as long as this process lives."""

    def __init__(self, port: int, *, local: bool) -> None:
        started = started_at(os.getpid())
        assert started is not None
        self._file = ClusterFile(port, os.getpid(), started, local, Stage.STARTING, time.time())

    def take(self, waits_for: str) -> None:
        """Write the file. Raises `ConfigError` when a cluster of this user has the port."""
        self._file = dataclasses.replace(self._file, waits_for=waits_for)
        with _locked():
            check_free(self._file.port)
            write(self._file)

    def tell(self, stage: Stage, waits_for: str = "", **facts: Any) -> None:
        """Write the stage. Without effect when the file is another's. Where it cannot be written, that is logged: other
        commands do not learn of the stage, and this one goes on."""
        since_s = self._file.since_s if stage is self._file.stage else time.time()
        news = dataclasses.replace(self._file, stage=stage, since_s=since_s, waits_for=waits_for, **facts)
        if news != self._file:
            self._file = news
            self.renew()

    def renew(self) -> None:
        """Write the file as it is, also where it is gone: hosts remove what is old from their temporary directories."""
        try:  # also around the reading, which makes the directory anew
            if _read(_path(self._file.port)) is None or _is_kept(self._file):
                write(self._file)
        except OSError as error:
            _log.warning("the state file %d.json cannot be written: %s", self._file.port, error)

    def release(self) -> None:
        """Take no lock: a signal's handler calls it, perhaps while this very thread holds the lock."""
        if _is_kept(self._file):
            _path(self._file.port).unlink()


def check_free(port: int) -> None:
    """Raises `ConfigError` when another process's cluster of this user has the HTTP port, or is about to take it."""
    holder = _read(_path(port))
    if holder is None or holder.pid == os.getpid() or not holder.running:
        return
    is_served = holder.serve_process is not None
    if not is_served and not listens(holder.control_address):
        return  # it was in a joined Ray, and has ended since
    if is_served and holder.stage is Stage.STOPPING:
        remedy = f"start again when it has ended (`tandem stop --port {port}` waits for that)"
    else:
        remedy = f"end it with `tandem stop --port {port}`"
    raise ConfigError(
        f"http.port {port} is taken by a Tandem cluster of yours, {holder.describe()}; {remedy}, "
        "or choose another with --port",
        key="http.port",
    )


def running() -> list[ClusterFile]:
    """The clusters that still run, those that start or stop included; files of dead ones are removed."""
    found = []
    with _locked() as directory:
        for path in sorted(directory.glob("*.json")):
            cluster = _read(path)
            if cluster is None:
                continue
            if cluster.running:
                found.append(cluster)
            else:
                path.unlink()
    return found


def forget(cluster: ClusterFile) -> None:
    """Remove its file, for one that has ended; not that of another which has taken its port."""
    with _locked():
        if _is_kept(cluster):
            _path(cluster.port).unlink()


def runtime_directory() -> Path:
    """Private to this user: `$XDG_RUNTIME_DIR/tandem`, else `tandem-<uid>` in the temporary directory.

    Not in the login manager's, which it removes when the user's last session ends: a cluster may go on.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and Path(base) != Path(f"/run/user/{os.getuid()}"):
        directory = Path(base) / "tandem"
    else:
        directory = Path(tempfile.gettempdir()) / f"tandem-{os.getuid()}"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory.stat().st_uid != os.getuid():
        raise PermissionError(f"{directory} belongs to another user; remove it or set XDG_RUNTIME_DIR")
    return directory


def listens(address: str, timeout_s: float = 5.0) -> bool:
    """Whether something accepts connections at host:port within `timeout_s`; it need not answer."""
    try:
        socket.create_connection(split_address(address), timeout_s).close()
    except OSError:
        return False
    return True


@contextmanager
def _locked() -> Iterator[Path]:
    """Only one process at a time may look and then write or remove. The kernel ends the lock of a process that dies."""
    directory = runtime_directory()
    lock = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield directory
    finally:
        os.close(lock)


def _read(path: Path) -> ClusterFile | None:
    """`None`: there is none, or it is of another version of Tandem, which alone may judge it."""
    try:
        kept = json.loads(path.read_text())
        return ClusterFile(**{**kept, "stage": Stage(kept["stage"])})
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None


def _is_kept(cluster: ClusterFile) -> bool:
    """Whether its port's file is its own."""
    found = _read(_path(cluster.port))
    return found is not None and (found.pid, found.started) == (cluster.pid, cluster.started)


def write(cluster: ClusterFile) -> None:
    """Write the file whole or not at all."""
    path = _path(cluster.port)
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(asdict(cluster), indent=2) + "\n")
    draft.replace(path)


def _path(port: int) -> Path:
    return runtime_directory() / f"{port}.json"
