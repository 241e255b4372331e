"""Where `tandem status`, `scale` and `stop` find the clusters that this user has started on this host.

One small JSON file for each HTTP port, written when a cluster is ready and removed when it ends. A file whose
`tandem serve` has died without removing it is told by its process id and start time.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class ClusterFile:
    """How to reach a cluster.

    Attributes:
        control_address: host:port of SupervisorControl.
        pid, pid_created: of `tandem serve`; the start time tells it from a later process of the same number.
        local: its Ray dies with it.
        tls, certificates: the cluster's `security` section.
    """

    url: str
    port: int
    control_address: str
    ray_address: str
    namespace: str
    pid: int
    pid_created: float
    local: bool
    tls: str
    certificates: str

    @property
    def serve_process(self) -> psutil.Process | None:
        """`tandem serve` itself, while it lives."""
        try:
            process = psutil.Process(self.pid)
            alive = process.create_time() == self.pid_created and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return None
        return process if alive else None

    @property
    def running(self) -> bool:
        """A joined cluster goes on without its `tandem serve`; a local one does not."""
        return not self.local or self.serve_process is not None


def runtime_directory() -> Path:
    """Private to this user: `$XDG_RUNTIME_DIR/tandem`, else `tandem-<uid>` in the temporary directory."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    directory = Path(base) / "tandem" if base else Path(tempfile.gettempdir()) / f"tandem-{os.getuid()}"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory.stat().st_uid != os.getuid():
        raise PermissionError(f"{directory} belongs to another user; remove it or set XDG_RUNTIME_DIR")
    return directory


def write(cluster: ClusterFile) -> Path:
    """Write the file whole or not at all."""
    path = _path(cluster.port)
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(asdict(cluster), indent=2) + "\n")
    draft.replace(path)
    return path


def remove(port: int) -> None:
    _path(port).unlink(missing_ok=True)


def running() -> list[ClusterFile]:
    """The clusters that still run; files of dead ones are removed."""
    found = []
    for path in sorted(runtime_directory().glob("*.json")):
        try:
            cluster = ClusterFile(**json.loads(path.read_text()))
        except (ValueError, TypeError):
            continue  # of another version of Tandem, which alone may judge it
        if cluster.running:
            found.append(cluster)
        else:
            path.unlink(missing_ok=True)
    return found


def _path(port: int) -> Path:
    return runtime_directory() / f"{port}.json"
