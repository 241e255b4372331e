"""Tokens a second with guesses and without: `python -m benchmarks speculation`.

One decode worker for each way of guessing, all in this process, and one request or several at a time. Requests of all
ways are the same and take turns, so that what else the machine does falls on all alike. Outputs are compared too.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.kernels.measure import DEFAULT_MODEL
from benchmarks.origin import origin
from benchmarks.speculation.section import FORMAT, section
from decode_worker.worker import DecodeWorker
from router.openai.grammar import of_choices
from tandem.bench.report import json_file
from tandem.core.config import LimitsConfig, from_dict
from tandem.core.sampling import SamplingParams
from tandem.core.tokenizer import Tokenizer
from tandem.engine.random_model import save
from tandem.rpc.channel import make_channel
from tandem.rpc.convert import sampling_to_proto
from tandem.rpc.v1 import decode_pb2 as decode_pb
from tandem.rpc.v1.decode_pb2_grpc import DecodeServiceStub
from tandem.worker.parts import WorkerPlace
from tandem.worker.process import WorkerProcess

_PROMPT = 128  # tokens
_KV_BYTES = 512 << 20
_LETTERS = "abcdefghijklmnopqrstuvwxyz "


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
        rounds: of each load, behind one that warms up.
        output: tokens of each request.
        threads: of each worker.
        lookup_tokens, draft_tokens: the most guesses of a step.
        quantize: how the draft's weights are rounded.
    """

    rounds: int = 8
    output: int = 400
    threads: int = 1
    lookup_tokens: int = 8
    draft_tokens: int = 4
    quantize: str = "int8"


@dataclass(frozen=True)
class Load:
    """What is asked for.

    Attributes:
        num_streams: requests at a time.
        copies: the output is forced to a text of which every other piece stands in the prompt.
    """

    name: str
    num_streams: int
    temperature: float
    copies: bool = False


LOADS = (
    Load("1 stream, greedy", 1, 0.0),
    Load("1 stream, temperature 0.8", 1, 0.8),
    Load("1 stream, half of it copied", 1, 0.8, copies=True),
    Load("4 streams, temperature 0.8", 4, 0.8),
    Load("16 streams, temperature 0.8", 16, 0.8),
)


def request_of(load: Load, tokenizer: Tokenizer, seed: int, num_output: int) -> tuple[list[int], SamplingParams]:
    """A prompt that no other begins with, and how its output is chosen."""
    random = np.random.default_rng(seed)
    prompt = [int(token) for token in random.integers(10, min(250, tokenizer.vocab_size), _PROMPT)]
    grammar = ""
    if load.copies:
        pieces = ["".join(random.choice(list(_LETTERS), 24)) for _ in range(max(2, num_output // 24))]
        prompt = [token for piece in pieces for token in tokenizer.encode(piece)][: 4 * _PROMPT]
        others = ["".join(random.choice(list(_LETTERS), 24)) for _ in pieces]
        both = enumerate(zip(pieces, others, strict=True))
        text = "".join(piece if index % 2 else other for index, (piece, other) in both)
        grammar = of_choices([text], "choice", LimitsConfig()).text
    params = SamplingParams(
        temperature=load.temperature, seed=seed, max_tokens=num_output, ignore_eos=not load.copies, grammar=grammar
    )
    return prompt, params


class Session:
    """A session with a worker, as a router has it."""

    def __init__(self, address: str) -> None:
        self._channel = make_channel(address)
        stub: Any = DecodeServiceStub(self._channel)
        self._call = stub.Session()
        self._tokens: dict[str, list[int]] = defaultdict(list)
        self._ended: dict[str, asyncio.Future[None]] = {}
        self._writing = asyncio.Lock()
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._call:
            for event in message.events:
                match event.WhichOneof("event"):
                    case "token":
                        self._tokens[event.token.request_id].append(event.token.token_id)
                        if event.token.finish_reason:
                            self._ended.pop(event.token.request_id).set_result(None)
                    case "failed":
                        error = RuntimeError(event.failed.error.message)
                        self._ended.pop(event.failed.request_id).set_exception(error)

    async def generate(self, name: str, prompt: list[int], params: SamplingParams) -> list[int]:
        ended = self._ended[name] = asyncio.get_running_loop().create_future()
        reserve = decode_pb.Reserve(
            request_id=name, attempt=1, prompt_ids=prompt, sampling=sampling_to_proto(params),
            max_local_tokens=len(prompt),
        )  # fmt: skip
        async with self._writing:  # a stream takes one at a time
            await self._call.write(decode_pb.DecodeCommand(reserve=reserve))
        await ended
        return self._tokens.pop(name)

    async def close(self) -> None:
        self._reading.cancel()
        await self._channel.close(grace=None)


@dataclass
class Way:
    """One way of guessing, and what was seen of it."""

    name: str
    worker: WorkerProcess[DecodeWorker]

    def counts(self) -> dict[str, int]:
        counters = self.worker.parts.counters
        return {
            "guesses": counters.num_guesses,
            "right_guesses": counters.num_right_guesses,
            "drafts": counters.num_drafts,
            "right_drafts": counters.num_right_drafts,
        }

    async def run(self, load: Load, requests: list[tuple[list[int], SamplingParams]]) -> tuple[float, list[list[int]]]:
        """Tokens a second from the first request to the last token, and the outputs."""
        session = Session(self.worker.info.address)
        began_s = time.perf_counter()
        names = [f"{load.name} {number} {began_s}" for number in range(len(requests))]
        outputs = await asyncio.gather(*(session.generate(n, *each) for n, each in zip(names, requests, strict=True)))
        took_s = time.perf_counter() - began_s
        await session.close()
        return sum(len(output) for output in outputs) / took_s, outputs


@contextmanager
def _ways(model: Path, draft: str, sizes: Sizes) -> Iterator[list[Way]]:
    drafted = {"draft_model": draft, "draft_quantize": sizes.quantize, "draft_tokens": sizes.draft_tokens}
    lookup = {"lookup_tokens": sizes.lookup_tokens}
    ways = {"none": {}, "lookup": lookup, "draft": drafted, "lookup and draft": lookup | drafted}
    with ExitStack() as stack:
        made = []
        for index, (name, speculation) in enumerate(ways.items()):
            place = WorkerPlace(f"decode-{index}", f"decode-{index}-measured", model, _KV_BYTES, sizes.threads)
            worker = WorkerProcess(DecodeWorker, from_dict({"speculation": speculation}), place)
            stack.callback(worker.stop)
            worker.start()
            made.append(Way(name, worker))
        yield made


async def measure(ways: list[Way], model: Path, sizes: Sizes, console: Console) -> list[dict[str, Any]]:
    """Plain data, a row for each load and way; said as they come."""
    tokenizer, rows = Tokenizer.from_dir(model), []
    for load in LOADS:
        seen: dict[str, list[float]] = defaultdict(list)
        before = {way.name: way.counts() for way in ways}
        num_other = dict.fromkeys((way.name for way in ways), 0)
        for number in range(sizes.rounds + 1):
            seeds = range(1000 * number, 1000 * number + load.num_streams)
            requests = [request_of(load, tokenizer, seed, sizes.output) for seed in seeds]
            expected: list[list[int]] = []
            first = number % len(ways)
            for way in (*ways[first:], *ways[:first]):
                rate, outputs = await way.run(load, requests)
                expected = expected or outputs
                num_other[way.name] += outputs != expected
                if number:  # the first round warms up
                    seen[way.name].append(rate)
        for way in ways:
            ratio = median(a / b for a, b in zip(seen[way.name], seen["none"], strict=True))
            counts = {key: count - before[way.name][key] for key, count in way.counts().items()}
            rate = median(seen[way.name])
            rows.append({"load": load.name, "copies": load.copies, "way": way.name, "tokens_per_s": rate,
                         "ratio": ratio, **counts, "rounds_with_other_outputs": num_other[way.name]})  # fmt: skip
            console.print(f"{load.name}, {way.name}: {rate:.1f} tokens/s, {ratio:.2f} x", highlight=False)
    for way in ways:
        await asyncio.to_thread(way.worker.stop)  # while there is a loop for what its gRPC still has to say here
    return rows


def run(json: Path | None, sizes: Sizes, *, model: Path | None = None, draft: str = "") -> None:
    """Print the table, and write it to `json`.

    Args:
        model: a checkpoint; by default a random Llama of 82 M weights.
        draft: the draft's checkpoint; by default the model's own.

    Raises `ConfigError` where `json` cannot be written.
    """
    with tempfile.TemporaryDirectory() as folder:
        target = model or save(DEFAULT_MODEL, Path(folder) / "model")
        with _ways(target, draft or str(target), sizes) as ways:
            rows = asyncio.run(measure(ways, target, sizes, Console(stderr=True)))
    content = {"format": FORMAT, **origin(), "settings": {**asdict(sizes), "draft": draft}, "rows": rows}
    Console(soft_wrap=True).print("\n".join(section(content)).strip(), highlight=False, markup=False)
    if json is not None:
        json_file.write(json, content)
