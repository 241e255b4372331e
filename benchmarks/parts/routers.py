"""What routers that share a port stream together, and what a token costs them, before workers that answer at once."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.parts.processes import Child, Processes, start_router, tell_router
from benchmarks.parts.router import RouterSizes, Streamed, stream_all
from tandem.bench.load.http_client import LoadClient
from tandem.core.errors import TandemError

NUM_ROUTERS = (1, 2, 4)

_KNOWN_S = 30.0
_LOOK_S = 0.05
_KNOWS_DECODE = re.compile(rb'tandem_running_requests\{role="decode",router="(router-\d+)"')


async def measure_sharing(
    directory: Path, model_dir: Path, sizes: RouterSizes, num_rounds: int, num_routers: int
) -> list[Streamed]:
    """As `measure_streaming`, at `num_routers` routers on one port, each with scripted workers of its own: they are to
    be no bottleneck, and routers share nothing but the port. Raises `TandemError`."""
    here = directory / f"routers-{num_routers}"
    here.mkdir()
    async with Processes(here) as processes:
        routers, workers, port = dict[str, Child](), dict[str, Child](), 0
        for name in (f"router-{number}" for number in range(num_routers)):
            workers[name], routers[name] = await _start(processes, model_dir, name, port)
            port = int(routers[name].facts["http"].rpartition(":")[2])
        for name, router in routers.items():
            others = {other: it for other, it in routers.items() if other != name}
            await tell_router(router, workers[name].facts.items(), others)
        url, pids = routers["router-0"].facts["http"], [router.pid for router in routers.values()]
        await _until_all_know_their_workers(url, num_routers)
        rounds = [await stream_all(url, pids, sizes) for _ in range(1 + num_rounds)]
    return rounds[1:]


async def _start(processes: Processes, model_dir: Path, name: str, port: int) -> tuple[Child, Child]:
    """Workers, and a router that has yet to be told of them."""
    line = ("--model-dir", str(model_dir))
    workers = await (await processes.start(f"workers-of-{name}", "benchmarks.parts.workers", *line)).ready()
    sharing = ("--name", name, "--siblings", str(processes.directory / "siblings"))
    return workers, await start_router(processes, model_dir, *sharing, name=name, port=port)


async def _until_all_know_their_workers(url: str, num_routers: int) -> None:
    """Whichever router answers, it tells the figures of all."""
    client, known = LoadClient(url, max_sockets=1), set[bytes]()
    try:
        async with asyncio.timeout(_KNOWN_S):
            while len(known) < num_routers:
                known = set(_KNOWS_DECODE.findall((await client.ask("GET", "/metrics")).body))
                await asyncio.sleep(_LOOK_S)  # another process can only be asked
    except TimeoutError:
        raise TandemError(f"{len(known)} of {num_routers} routers found their workers in {_KNOWN_S:.0f} s") from None
    finally:
        client.close()


def token_cpu_s(rounds: Sequence[Streamed]) -> float:
    """Of the round in which a token cost least: what others take of the cores only adds to it."""
    return min(streamed.token_cpu_s for streamed in rounds)
