"""Memory and CPU time of processes while something else goes on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import psutil

_INTERVAL_S = 0.25


@dataclass
class Usage:
    """One process over one stretch of time; bytes and seconds."""

    rss_before_bytes: int = 0
    rss_max_bytes: int = 0
    rss_after_bytes: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0

    @property
    def cpu_share(self) -> float:
        """CPU seconds for each second: 1 is one core."""
        return self.cpu_s / self.wall_s if self.wall_s else 0.0


@contextlib.asynccontextmanager
async def watched(process: psutil.Process) -> AsyncIterator[Usage]:
    """Inside, `process` is looked at four times a second; the `Usage` is complete after the block."""
    loop = asyncio.get_running_loop()
    began_s, begun_cpu_s = loop.time(), cpu_s(process)
    usage = Usage(rss_before_bytes=_rss(process), rss_max_bytes=_rss(process))

    async def look() -> None:
        while True:
            await asyncio.sleep(_INTERVAL_S)
            usage.rss_max_bytes = max(usage.rss_max_bytes, _rss(process))

    task = asyncio.create_task(look())
    try:
        yield usage
    finally:
        task.cancel()
        await asyncio.wait([task])
        usage.rss_after_bytes = _rss(process)
        usage.rss_max_bytes = max(usage.rss_max_bytes, usage.rss_after_bytes)
        usage.cpu_s, usage.wall_s = cpu_s(process) - begun_cpu_s, loop.time() - began_s


def listener_on(port: int) -> psutil.Process | None:
    """The process of ours that listens on a TCP port of this host; `None` where the system shows none."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            for connection in process.net_connections(kind="tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                    return process
    return None


def _rss(process: psutil.Process) -> int:
    return int(process.memory_info().rss)


def cpu_s(process: psutil.Process) -> float:
    """CPU seconds that it has used."""
    times = process.cpu_times()
    return float(times.user + times.system)
