"""How long a grant takes beside generations that step all the time: `python -m benchmarks.reserve_grant`.

One decode worker and its router in one process, a random model. Each reservation is asked for when the last one has
been cancelled, so that there is always room and nothing but the worker itself is waited for.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decode_worker.worker import DecodeWorker
from tandem.bench.report.summary import percentile
from tandem.core.config import from_dict
from tandem.core.sampling import SamplingParams
from tandem.engine.random_model import ModelSpec, save
from tandem.rpc.channel import make_channel
from tandem.rpc.convert import sampling_to_proto
from tandem.rpc.v1 import common_pb2 as pb
from tandem.rpc.v1 import decode_pb2 as decode_pb
from tandem.rpc.v1.decode_pb2_grpc import DecodeServiceStub
from tandem.worker.parts import WorkerPlace
from tandem.worker.process import WorkerProcess

_CONTEXT = 4096
_PROMPT = 64  # tokens, of all requests
_MODEL = ModelSpec(hidden=512, layers=8, heads=8, kv_heads=4, intermediate=1408, vocab=4096, max_positions=_CONTEXT)


class Router:
    """A session with the worker: what it hears, and when."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._waiting: dict[str, asyncio.Future[float]] = {}
        self._numbers = itertools.count()  # no two prompts begin alike
        self.step_s: list[float] = []
        self._last_s = 0.0
        self._most_in_a_step = 0
        self._stepped = asyncio.Event()

    async def until_generating(self, number: int) -> None:
        """Until a step has given tokens to so many requests."""
        while self._most_in_a_step < number:
            self._stepped.clear()
            await self._stepped.wait()

    async def read(self) -> None:
        async for message in self._call:
            now_s = time.perf_counter()
            generating = {event.token.request_id for event in message.events if event.WhichOneof("event") == "token"}
            if generating:
                self.step_s.append(now_s - self._last_s)
                self._last_s = now_s
                self._most_in_a_step = max(self._most_in_a_step, len(generating))
                self._stepped.set()
            for event in message.events:
                kind = event.WhichOneof("event")
                if kind in ("granted", "local"):
                    self._waiting.pop(getattr(event, kind).request_id).set_result(now_s)
                elif kind == "failed":
                    self._waiting.pop(event.failed.request_id).set_exception(RuntimeError(event.failed.error.message))

    async def reserve(self, name: str, num_output: int, max_local_tokens: int) -> float:
        """Seconds until the answer."""
        answer = self._waiting[name] = asyncio.get_running_loop().create_future()
        params = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True)
        reserve = decode_pb.Reserve(
            request_id=name,
            attempt=1,
            prompt_ids=[2 + next(self._numbers) % 4000 for _ in range(_PROMPT)],
            sampling=sampling_to_proto(params),
            max_local_tokens=max_local_tokens,
        )
        began_s = time.perf_counter()
        await self._call.write(decode_pb.DecodeCommand(reserve=reserve))
        answered_s: float = await answer
        return answered_s - began_s

    async def cancel(self, name: str) -> None:
        await self._call.write(decode_pb.DecodeCommand(cancel=pb.Cancel(request_id=name, attempt=1)))


async def measure(address: str, num_running: int, num_reservations: int) -> None:
    """Print the time from each Reserve to its grant, and from step to step meanwhile."""
    channel = make_channel(address)
    router = Router(_stub(channel).Session())
    reading = asyncio.create_task(router.read())
    for number in range(num_running):
        await router.reserve(f"running-{num_running}-{number}", _CONTEXT - _PROMPT - 1, _PROMPT)
    await router.until_generating(num_running)
    router.step_s.clear()
    waited_s = []
    for number in range(num_reservations):
        name = f"asked-{num_running}-{number}"
        waited_s.append(await router.reserve(name, 16, 0))
        await router.cancel(name)
        await asyncio.sleep(0.003 * (number % 7))  # so that they come at all times of a step
    grant, step = _quantiles(waited_s), _quantiles(router.step_s)
    print(f"{num_running} running: from Reserve to grant {grant}; from step to step {step}", flush=True)
    reading.cancel()
    await channel.close(grace=None)


async def measure_all(worker: WorkerProcess[DecodeWorker], nums_running: Sequence[int], num_reservations: int) -> None:
    for num_running in nums_running:
        await measure(worker.info.address, num_running, num_reservations)
    await asyncio.to_thread(worker.stop)  # while there is a loop for what its gRPC still has to say here


def _quantiles(times_s: list[float]) -> str:
    median_ms, tail_ms = (1e3 * percentile(sorted(times_s), percent) for percent in (50, 99))
    return f"p50 {median_ms:.2f} ms, p99 {tail_ms:.2f} ms"


def _stub(channel: Any) -> Any:
    return DecodeServiceStub(channel)  # its types are those of gRPC's other interface


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reservations", type=int, default=400, help="for each number (default: %(default)s)")
    parser.add_argument("--running", type=int, nargs="+", default=[8, 32], help="generations (default: 8 32)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = WorkerPlace(
            worker_id="decode-0",
            incarnation="decode-0-measured",
            model_dir=save(_MODEL, Path(folder) / "model"),
            kv_bytes=3 << 30,
            num_threads=1,
        )
        worker = WorkerProcess(DecodeWorker, from_dict({"scheduling": {"max_num_seqs": 64}}), place)
        worker.start()
        try:
            asyncio.run(measure_all(worker, options.running, options.reservations))
        finally:
            worker.stop()


if __name__ == "__main__":
    main()
