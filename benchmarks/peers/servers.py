"""The servers of a comparison: how each is started, when it is ready, and how it is ended."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.child_process import log_tail, start_child, stop_child
from tandem.bench.load.http_client import get
from tandem.core.errors import ConfigError, TandemError

_START_S = 600.0  # an engine may compile its kernels first
_LOOK_S = 0.5  # between two questions whether a server is ready
_ASK_S = 5.0
_OK = 200


@dataclass(frozen=True)
class Place:
    """What all servers are started with."""

    model: Path  # a checkpoint directory
    port: int  # the one that is asked; those above it are for what stands behind
    cores: Sequence[int]  # by their numbers in the system
    directory: Path  # for configuration and logs; it exists
    peer_venv: Path | None = None
    split_router: Path | None = None  # the program that joins the peer's two engines
    dtype: str = "float32"  # of the checkpoint; the peer is told, Tandem looks


@dataclass(frozen=True)
class Command:
    """One process of a server. It is ready when `port` answers `GET /health` with 200."""

    name: str
    argv: tuple[str, ...]
    port: int
    env: Mapping[str, str] = field(default_factory=dict)  # over the environment of this process

    def line(self, place: Place) -> str:
        """As one would type it, with names for the directories of this machine."""
        text = shlex.join([*(f"{name}={value}" for name, value in self.env.items()), *self.argv])
        for path, name in (
            (place.model, "MODEL"),
            (place.directory, "LOGS"),
            (place.peer_venv, "PEER_VENV"),
            (place.split_router and place.split_router.parent, "TOOLS"),
            (Path(sys.executable).parent, "BIN"),
        ):
            text = text if path is None else text.replace(str(path), name)
        return text


@dataclass(frozen=True)
class Contestant:
    """One of the servers that can be compared."""

    name: str
    title: str
    commands: Callable[[Place], list[Command]]
    is_peer: bool = False


# --- how each is started ----------------------------------------------------------------------------------------------


def _tandem(place: Place, *options: str) -> list[Command]:
    program = str(Path(sys.executable).with_name("tandem"))
    argv = (program, "serve", "--model", str(place.model), "--port", str(place.port), *options)
    return [Command("tandem", argv, place.port)]


def _strict(place: Place) -> list[Command]:
    config = place.directory / "tandem.yaml"
    config.write_text("scheduling:\n  mixed_pool: false\n")
    return _tandem(place, "--config", str(config))


def _colocated(place: Place) -> list[Command]:
    return [_engine(place, "engine", place.port, place.cores)]


def _split(place: Place) -> list[Command]:
    """One engine on each half of the cores, decode on the greater one; pages go from one to the other over NIXL."""
    half = max(1, len(place.cores) // 2)
    decode_cores = place.cores[half:] or place.cores  # of one core both have it
    engines = []
    for number, (name, cores) in enumerate((("prefill", place.cores[:half]), ("decode", decode_cores)), 1):
        connector = '{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_buffer_device":"cpu"}'
        side_channel = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(place.port + 10 + number)}
        options = ("--kv-transfer-config", connector)
        engines.append(_engine(place, name, place.port + number, cores, options, side_channel))
    urls = [f"http://127.0.0.1:{engine.port}" for engine in engines]
    argv = (str(_venv(place) / "bin/python"), str(place.split_router), str(place.port), *urls)
    return [*engines, Command("router", argv, place.port)]


def _engine(
    place: Place,
    name: str,
    port: int,
    cores: Sequence[int],
    options: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Command:
    argv = (
        str(_venv(place) / "bin/vllm"), "serve", str(place.model), "--host", "127.0.0.1", "--port", str(port),
        "--dtype", place.dtype, *options,
    )  # fmt: skip
    common = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return Command(name, argv, port, {**common, **(env or {})})


def _venv(place: Place) -> Path:
    if place.peer_venv is None:
        raise ConfigError("the peer's virtual environment is not known: give --peer-venv", key="--peer-venv")
    return place.peer_venv


CONTESTANTS = (
    Contestant("tandem", "Tandem", _tandem),
    Contestant("tandem-strict", "Tandem, strict split", _strict),
    Contestant("peer-colocated", "vLLM, one engine", _colocated, is_peer=True),
    Contestant("peer-split", "vLLM, split over NIXL", _split, is_peer=True),
)


def chosen_contestants(names: Sequence[str], peer_venv: Path | None) -> tuple[list[Contestant], list[str]]:
    """Those that can be started here, and a message for each that cannot.

    Raises:
        ConfigError: there is no contestant of such a name, or none that is left.
    """
    known = {contestant.name: contestant for contestant in CONTESTANTS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"no server is called {', '.join(unknown)}; there are {', '.join(known)}", key="--servers")
    wanted = [contestant for contestant in CONTESTANTS if contestant.name in names]
    why = _why_no_peer(peer_venv)
    left = [contestant for contestant in wanted if not (contestant.is_peer and why)]
    messages = [f"{contestant.name} is left out: {why}" for contestant in wanted if contestant not in left]
    if not left:
        raise ConfigError("; ".join(messages) or "no server is named", key="--servers")
    return left, messages


def _why_no_peer(peer_venv: Path | None) -> str:
    if peer_venv is None:
        return "name the virtual environment of vLLM with --peer-venv or PEER_VENV (tools/setup_peer.sh makes one)"
    if not (peer_venv / "bin/vllm").is_file():
        return f"{peer_venv} holds no vLLM (tools/setup_peer.sh installs it)"
    return ""


# --- from start to end ------------------------------------------------------------------------------------------------


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
