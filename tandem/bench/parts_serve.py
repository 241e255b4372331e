"""`tandem serve` as a whole: from its start to the first answer, and what its processes cost while nobody asks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

import tandem
from tandem.bench.child_process import free_port, log_tail, start_child, stop_child
from tandem.bench.http_client import LoadClient
from tandem.core.errors import TandemError

_PACKAGE = Path(tandem.__file__).parent
_OK = 200
_START_S = 120.0
_LOOK_S = 0.02  # between two questions whether it answers
_ASK_S = 60.0
_SETTLE_S = 3.0  # from the last answer to the idle time
# Ray names an actor's process by its class; Ray's own (`ray::IDLE`, `ray::DashboardAgent`) are called otherwise.
_RAY_TITLE = re.compile(r"ray::(\w+)")
_OWN_TITLE = re.compile(r"ray::\w+Actor\b")

Tell = Callable[[str], None]


@dataclass(frozen=True)
class ServeSizes:
    """How much is asked.

    Attributes:
        num_starts: of which the first does not count: it reads files that the others find in memory.
        num_requests, num_tokens: the load before the idle time, four at a time.
    """

    num_starts: int = 3
    num_requests: int = 16
    num_tokens: int = 32
    idle_s: float = 30.0


@dataclass(frozen=True)
class Served:
    """Of a whole `tandem serve`.

    Attributes:
        start_s: from the start of the process to the first whole answer, each time.
        own_cpu: of each of Tandem's own processes over the idle time: name, and seconds for each second.
        ray_cpu: the same of Ray's processes, all together.
    """

    start_s: list[float]
    own_cpu: list[tuple[str, float]]
    ray_cpu: float
    num_ray_processes: int


async def measure_serve(directory: Path, model: str, sizes: ServeSizes, tell: Tell) -> Served:
    """Start it `num_starts` times, and leave the last one idle after some load.

    Raises:
        TandemError: it ended, or did not answer in time.
    """
    start_s: list[float] = []
    for number in range(sizes.num_starts - 1):
        tell(f"start {number + 1} of {sizes.num_starts}")
        async with _serving(directory, model) as serve:
            start_s.append(await serve.first_answer_s())
    tell(f"start {sizes.num_starts} of {sizes.num_starts}")
    async with _serving(directory, model) as serve:
        start_s.append(await serve.first_answer_s())
        await serve.load(sizes.num_requests, sizes.num_tokens)
        await asyncio.sleep(_SETTLE_S)
        tell(f"idle for {sizes.idle_s:g} s")
        own, ray = serve.family()
        own_cpu, ray_cpu = await _cpu_shares(own, ray, sizes.idle_s)
    return Served(start_s[1:], own_cpu, sum(share for _, share in ray_cpu), len(ray_cpu))


class _Serve:
    """One `tandem serve` that has just been started."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, log: Path) -> None:
        self._process, self._log = process, log
        self._started_s = time.monotonic()
        self._client = LoadClient(f"http://127.0.0.1:{port}", max_sockets=4, timeout_s=_ASK_S)

    def close(self) -> None:
        self._client.close()

    def _message(self, num_tokens: int) -> bytes:
        body = {"model": "measured", "prompt": "Once upon a time", "max_tokens": num_tokens, "ignore_eos": True}
        return self._client.message("POST", "/v1/completions", json.dumps(body).encode())

    async def first_answer_s(self) -> float:
        """Seconds from its start to the end of the first answer."""
        while (await self._client.request(self._message(1))).status != _OK:
            if self._process.returncode is not None:
                how = f"tandem serve ended with {self._process.returncode} before it answered"
                raise TandemError(f"{how}; {log_tail(self._log)}")
            if time.monotonic() > self._started_s + _START_S:
                raise TandemError(f"tandem serve did not answer within {_START_S:.0f} s; {log_tail(self._log)}")
            await asyncio.sleep(_LOOK_S)
        return time.monotonic() - self._started_s

    async def load(self, num_requests: int, num_tokens: int) -> None:
        """Some requests, four at a time."""
        waiting = iter(range(num_requests))

        async def client() -> None:
            for _ in waiting:
                answer = await self._client.request(self._message(num_tokens))
                if answer.status != _OK:
                    raise TandemError(f"tandem serve answers {answer.status}: {answer.why or answer.body.decode()}")

        async with asyncio.TaskGroup() as clients:
            for _ in range(4):
                clients.create_task(client())

    def family(self) -> tuple[list[psutil.Process], list[psutil.Process]]:
        """Tandem's own processes, itself and its actors among them, and Ray's."""
        serve = psutil.Process(self._process.pid)
        own, ray = [serve], list[psutil.Process]()
        for process in serve.children(recursive=True):
            (own if is_own(process.cmdline()) else ray).append(process)
        return own, ray


def is_own(line: list[str]) -> bool:
    """Whether a command line is of one of Tandem's processes: one of its actors, or a module of the package."""
    return _OWN_TITLE.match(" ".join(line)) is not None or any(map(_is_of_the_package, line))


def _is_of_the_package(part: str) -> bool:
    return part.endswith(".py") and Path(part).is_relative_to(_PACKAGE)


def name_of(line: list[str]) -> str:
    """What a reader knows a process by: `RouterActor`, or the module."""
    if titled := _RAY_TITLE.match(" ".join(line)):
        return titled[1]
    return next((Path(part).stem for part in line if part.endswith(".py")), "tandem serve")


async def _cpu_shares(
    own: Iterable[psutil.Process], ray: Iterable[psutil.Process], idle_s: float
) -> tuple[list[tuple[str, float]], list[tuple[str, float]]]:
    """CPU seconds of each process for each second, over `idle_s`; of those that ended meanwhile nothing is known."""
    families = [[(process, name_of(process.cmdline()), _cpu_s(process)) for process in family] for family in (own, ray)]
    begun_s = time.monotonic()
    await asyncio.sleep(idle_s)
    span_s = time.monotonic() - begun_s
    shares = []
    for family in families:
        alive = [(process, name, before_s) for process, name, before_s in family if process.is_running()]
        shares.append([(name, (_cpu_s(process) - before_s) / span_s) for process, name, before_s in alive])
    return shares[0], shares[1]


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextlib.asynccontextmanager
async def _serving(directory: Path, model: str) -> AsyncIterator[_Serve]:
    """A `tandem serve` on a free port, with a run-time directory of its own, that is being started."""
    port = free_port()
    line = [sys.executable, "-m", "tandem.cli", "serve", "--model", model, "--port", str(port)]
    line += ["--served-model-name", "*"]
    log = directory / "serve.log"
    process = await start_child(line, log, {"XDG_RUNTIME_DIR": str(directory), "PYTHONUNBUFFERED": "1"})
    serve = _Serve(process, port, log)
    try:
        yield serve
    finally:
        serve.close()
        await stop_child(process)
