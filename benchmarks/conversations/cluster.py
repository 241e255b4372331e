"""A router and several workers of each role, as plain processes of the embedded model, for one measurement."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.parts.processes import Processes, start_cluster
from tandem.bench.load.http_client import LoadClient
from tandem.core.config import EMBEDDED_MODEL
from tandem.core.errors import TandemError
from tandem.core.identity import WORKER_ROLES
from tandem.core.model_path import resolve_model

#: What is run as a router, by the name of its way to place.
ROUTERS = {"prefixes": "router", "load": "benchmarks.conversations.blind_router"}

_READY_S = 60.0
_LOOK_S = 0.05


@dataclass(frozen=True)
class ClusterSpec:
    """How large.

    Attributes:
        num_of_each: prefill workers, and decode workers.
        kv_bytes: of each worker.
    """

    num_of_each: int = 4
    kv_bytes: int = 64 << 20
    transport: str = "ucx"


@contextlib.asynccontextmanager
async def running(directory: Path, spec: ClusterSpec, placement: str) -> AsyncIterator[str]:
    """The router's URL, once all workers can be used; all caches are empty.

    Raises:
        TandemError: a process ended, or was not ready in time.
    """
    model_dir = resolve_model(EMBEDDED_MODEL)
    async with Processes(directory) as processes:
        config = directory / "worker.yaml"
        config.write_text(json.dumps({"transport": {"name": spec.transport}}))  # JSON is YAML
        line = ("--config", str(config), "--kv-bytes", str(spec.kv_bytes))
        router, _ = await start_cluster(processes, model_dir, spec.num_of_each, *line, module=ROUTERS[placement])
        url = router.facts["http"]
        await _until_all_are_ready(url, spec.num_of_each)
        yield url


async def _until_all_are_ready(url: str, num_of_each: int) -> None:
    client = LoadClient(url, max_sockets=1)
    num_ready = 0
    try:
        async with asyncio.timeout(_READY_S):
            while num_ready < num_of_each * len(WORKER_ROLES):
                answer = json.loads((await client.ask("GET", "/v1/cluster")).body)
                num_ready = sum(worker["state"] == "ready" for role in WORKER_ROLES for worker in answer[role.value])
                await asyncio.sleep(_LOOK_S)  # another process can only be asked
    except TimeoutError:
        raise TandemError(f"{num_ready} workers were ready after {_READY_S:.0f} s, of {2 * num_of_each}") from None
    finally:
        client.close()
