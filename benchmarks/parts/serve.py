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
from tandem.bench.child_process import log_tail, start_child, stop_child
from tandem.bench.load.http_client import LoadClient
from tandem.bench.process_watch import cpu_s
from tandem.core.errors import TandemError
from tandem.core.ports import free_port

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
class Idle:
    """CPU of a `tandem serve` that nobody asks, in seconds for each second.

    Attributes:
        own_cpu: of each of Tandem's own processes, with its name.
        ray_cpu: of Ray's processes that lived through all of it, all together.
    """

    own_cpu: list[tuple[str, float]]
    ray_cpu: float
    num_ray_processes: int


async def measure_serve(
    directory: Path, model: str, sizes: ServeSizes, tell: Tell, *, with_starts: bool = True, with_idle: bool = True
) -> tuple[list[float] | None, Idle | None]:
    """Start it `num_starts` times, and leave the last one idle after some load; `None` for what is not wanted.

    Returns:
        Seconds from the start of the process to the first whole answer, each time but the first; and the idle time.

    Raises:
        TandemError: it ended, or did not answer in time, or its processes changed in the idle time.
    """
    start_s: list[float] = []
    idle = None
    num_starts = sizes.num_starts if with_starts else 1
    for number in range(1, num_starts + 1):
        tell(f"start {number} of {num_starts}")
        async with _serving(directory, model) as serve:
            start_s.append(await serve.first_answer_s())
            if with_idle and number == num_starts:
                await serve.load(sizes.num_requests, sizes.num_tokens)
                await asyncio.sleep(_SETTLE_S)
                tell(f"idle for {sizes.idle_s:g} s")
                idle = await measure_idle(serve.pid, sizes.idle_s)
    return start_s[1:] if with_starts else None, idle


class _Serve:
    """One `tandem serve` that has just been started."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, log: Path) -> None:
        self._process, self._log = process, log
        self._started_s = time.monotonic()
        self._client = LoadClient(f"http://127.0.0.1:{port}", max_sockets=4, timeout_s=_ASK_S)

    @property
    def pid(self) -> int:
        return self._process.pid

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

        try:
            async with asyncio.TaskGroup() as clients:
                for _ in range(4):
                    clients.create_task(client())
        except ExceptionGroup as group:
            raise group.exceptions[0] from group


# --- processes --------------------------------------------------------------------------------------------------------

_Names = dict[psutil.Process, str]


async def measure_idle(pid: int, idle_s: float) -> Idle:
    """What process `pid` and all below it use over `idle_s`. Of Ray's that end meanwhile nothing is known.

    Raises:
        TandemError: one of Tandem's own began or ended meanwhile.
    """
    own, ray = _family(pid)
    before, begun_s = _cpu_s((*own, *ray)), time.monotonic()
    await asyncio.sleep(idle_s)
    after, span_s = _cpu_s((*own, *ray)), time.monotonic() - begun_s
    _check_same(own, _family(pid)[0])
    shares = {process: (after[process] - before[process]) / span_s for process in before.keys() & after.keys()}
    if lost := [name for process, name in own.items() if process not in shares]:
        raise TandemError(f"ended in the idle time: {', '.join(lost)}")
    ray_cpu = [shares[process] for process in ray if process in shares]
    return Idle([(name, shares[process]) for process, name in own.items()], sum(ray_cpu), len(ray_cpu))


def _family(pid: int) -> tuple[_Names, _Names]:
    """Tandem's own processes, `pid` and its actors among them, and Ray's; each with its name.

    Raises:
        TandemError: `pid` has ended.
    """
    try:
        serve = psutil.Process(pid)
        own: _Names = {serve: name_of(serve.cmdline())}
        children = serve.children(recursive=True)
    except psutil.NoSuchProcess:
        raise TandemError(f"process {pid} has ended") from None
    ray: _Names = {}
    for process in children:
        with contextlib.suppress(psutil.NoSuchProcess):  # ended since: Ray's come and go, ours are checked
            line = process.cmdline()
            (own if is_own(line) else ray)[process] = name_of(line)
    return own, ray


def _check_same(before: _Names, after: _Names) -> None:
    changes = {
        "ended": [before[process] for process in before.keys() - after.keys()],
        "began": [after[process] for process in after.keys() - before.keys()],
    }
    found = [f"{', '.join(sorted(names))} {what}" for what, names in changes.items() if names]
    if found:
        raise TandemError(f"Tandem's own processes changed in the idle time: {'; '.join(found)}")


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


def _cpu_s(processes: Iterable[psutil.Process]) -> dict[psutil.Process, float]:
    """CPU seconds of each that has not ended."""
    found: dict[psutil.Process, float] = {}
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found[process] = cpu_s(process)
    return found


# --- starting ---------------------------------------------------------------------------------------------------------


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
