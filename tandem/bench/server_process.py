"""Servers that a measurement starts: each runs in processes of its own, is ready when it answers, and is ended."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tandem.bench.child_process import log_tail, start_child, stop_child
from tandem.bench.load.http_client import get
from tandem.core.errors import ConfigError, TandemError

_START_S = 600.0  # an engine may compile its kernels first
_LOOK_S = 0.5  # between two questions whether a server is ready
_ASK_S = 5.0
_OK = 200


@dataclass(frozen=True)
class Command:
    """One process of a server. It is ready when `port` answers `GET /health` with 200."""

    name: str
    argv: tuple[str, ...]
    port: int
    env: Mapping[str, str] = field(default_factory=dict)  # over the environment of this process


@contextlib.asynccontextmanager
async def running(commands: Sequence[Command], directory: Path) -> AsyncIterator[None]:
    """Inside, all `commands` run and are ready; each writes to `directory`/NAME.log. After it none runs.

    Raises:
        ConfigError: something else listens on one of their ports.
        TandemError: one of them ended, or was not ready in time.
    """
    for command in commands:
        _check_free(command.port)
    started: list[asyncio.subprocess.Process] = []
    try:
        for command in commands:
            started.append(await start_child(command.argv, directory / f"{command.name}.log", command.env))
        for command, process in zip(commands, started, strict=True):
            await _wait_ready(command, process, directory / f"{command.name}.log")
        yield
    finally:
        await asyncio.gather(*map(stop_child, started))


async def _wait_ready(command: Command, process: asyncio.subprocess.Process, log: Path) -> None:
    exited = asyncio.create_task(process.wait())
    try:
        async with asyncio.timeout(_START_S):
            while not await _is_healthy(command.port):
                await asyncio.wait([exited], timeout=_LOOK_S)
                if exited.done():
                    how = f"{command.name} ended with {exited.result()} before it was ready"
                    raise TandemError(f"{how}; {log_tail(log)}")
    except TimeoutError:
        raise TandemError(f"{command.name} was not ready after {_START_S:.0f} s; {log_tail(log)}") from None
    finally:
        exited.cancel()


async def _is_healthy(port: int) -> bool:
    return (await get(f"http://127.0.0.1:{port}", "/health", timeout_s=_ASK_S)).status == _OK


def _check_free(port: int) -> None:
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise ConfigError(f"something listens on port {port} already: name another with --port", key="--port")
