"""`tandem logs`: what a cluster's processes have written, wherever they run."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from tandem.cluster.client import TIMEOUT_S, Where, find_started, supervisor
from tandem.cluster.log_files import LogFiles
from tandem.core.errors import ConfigError
from tandem.rpc.v1 import supervisor_pb2

_WAIT_S = 30.0
_NAME_WIDTH = 12


class Logs(Protocol):
    """Of one host or of many."""

    def processes(self) -> list[str]: ...

    def tail(self, num_lines: int) -> Iterable[dict[str, str]]: ...

    def follow(self) -> Iterable[dict[str, str]]: ...


class _HereLogs:
    """Those of a cluster whose processes all run on this host."""

    def __init__(self, directory: Path, process: str, request_id: str) -> None:
        self._files = LogFiles(directory, process, holds=request_id)

    def processes(self) -> list[str]:
        return self._files.processes()

    def tail(self, num_lines: int) -> Iterator[dict[str, str]]:
        texts = self._files.tail(num_lines)
        while texts:
            yield texts
            texts = self._files.tail_on()

    def follow(self) -> Iterator[dict[str, str]]:
        while True:
            yield self._files.more(_WAIT_S)


def logs(where: Where, process: str, *, num_lines: int, follow: bool, request_id: str = "") -> int:
    """Print the last lines of `process`, or of all, and with `follow` what comes; with `request_id` those that name it.

    Raises:
        ConfigError: there is no such cluster, or no such log.
        WorkerLostError: its supervisor does not answer.
    """
    with _open(where, process, request_id) as found:
        there = found.processes()
        if process and process not in there:
            raise ConfigError(f"there is no log of {process}; there are those of {', '.join(there)}", key="WORKER")
        for texts in found.tail(num_lines):
            _print(texts, request_id, named=not process)
        for texts in found.follow() if follow else ():
            _print(texts, request_id, named=not process)
    return 0


@contextmanager
def _open(where: Where, process: str, request_id: str) -> Iterator[Logs]:
    target = find_started(where)
    with supervisor(target) as stub:
        cluster = stub.GetCluster(supervisor_pb2.GetClusterRequest(), timeout=TIMEOUT_S)
    if target.file is not None and target.file.local:
        yield _HereLogs(Path(cluster.log_directory), process, request_id)
        return
    from tandem.cluster.ray.home import join_ray, leave_ray

    join_ray(cluster.ray_address, remedy="run this on a host of the cluster, as its head")
    try:
        from tandem.cluster.ray.node_logs import NodeLogs

        found = NodeLogs(cluster.log_directory, process, request_id)
        for address in found.unread:
            print(f"the logs on {address} cannot be read: the node does not answer", file=sys.stderr)
        yield found
    finally:
        leave_ray()


def _print(texts: dict[str, str], request_id: str, *, named: bool) -> None:
    for process, text in texts.items():
        for line in text.splitlines():
            if request_id not in line:
                continue
            print(f"{process:<{_NAME_WIDTH}}{line}" if named else line)
    sys.stdout.flush()
