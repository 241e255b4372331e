"""What a GPU can do, and what an engine with random weights does on it: what `benchmarks gpu` measures."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.timing import timed
from kvtransfer.digest import digests_of
from tandem.core.errors import ConfigError
from tandem.core.pages import page_table
from tandem.core.sampling import SampleRow, SamplingParams, SequenceState
from tandem.engine import loader
from tandem.engine.arena import TORCH_DTYPES, KVArena
from tandem.engine.attention.interface import ATTENTION_NAME
from tandem.engine.engine import Engine, SequenceInput
from tandem.engine.select_kernels import kernels_for

#: Large enough that neither launches nor caches show; a CPU's are only to show that this runs.
_MATRIX_ROWS = {"cuda": 8192, "cpu": 256}
_MEMORY_BYTES = {"cuda": 4 << 30, "cpu": 16 << 20}
_NUM_REPEATS = 20
#: Of what is free after the weights, for pages: a prefill and the sampler need some too.
_KV_SHARE = 0.8
_DIGESTED_PAGES = 8
#: Cycles for which the device is kept from what the host queues meanwhile: some 20 ms.
_HOLD_CYCLES = 40_000_000


def find_device(name: str) -> torch.device:
    """Return the device called `name`: "cuda", "cuda:N", or "cpu", which is to show that a measurement runs.

    Raises `ConfigError` where there is none.
    """
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("this torch sees no CUDA device", key="--device")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r}: {error}", key="--device") from error
    index = torch.cuda.current_device() if device.index is None else device.index
    if device.type != "cuda" or index >= torch.cuda.device_count():
        raise ConfigError(f"device {name!r} is none of {torch.cuda.device_count()} GPUs", key="--device")
    return torch.device("cuda", index)


def describe(device: torch.device) -> dict[str, object]:
    """Name, memory and software of a GPU."""
    if device.type == "cpu":
        return {"name": "no GPU"}
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "num_multiprocessors": properties.multi_processor_count,
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
        "cuda": torch.version.cuda,
    }


def matrix_rate(device: torch.device, dtype: str) -> float:
    """FLOP a second of a large product of random matrices: zeros would run faster, as they take less power."""
    rows = _MATRIX_ROWS[device.type]
    left, right = (torch.randn(rows, rows, device=device, dtype=TORCH_DTYPES[dtype]) for _ in range(2))
    output = torch.empty_like(left)
    return 2.0 * rows**3 / _device_s(device, lambda: torch.mm(left, right, out=output))


def memory_bandwidth(device: torch.device) -> float:
    """Bytes a second, the better of a large copy (read and written bytes counted) and a large read."""
    num_bytes = _MEMORY_BYTES[device.type]
    source = torch.randn(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    copy = 2 * num_bytes / _device_s(device, lambda: target.copy_(source))
    read = num_bytes / _device_s(device, lambda: source.sum())
    return max(copy, read)


def _device_s(device: torch.device, work: Callable[[], object]) -> float:
    """Median seconds of `work` by the device's own clock; what the host needs to queue it does not count."""
    if device.type == "cpu":
        return timed(work, 0.0, min_runs=_NUM_REPEATS).median_s
    times: list[float] = []
    with torch.cuda.device(device):
        for _ in range(3):
            work()
        for _ in range(_NUM_REPEATS):
            torch.cuda._sleep(_HOLD_CYCLES)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def random_engine(
    sizes: Mapping[str, Any], device: torch.device, *, dtype: str, page_size: int, num_pages: int, max_num_seqs: int
) -> Engine:
    """Return a warm engine over a Llama whose random weights are drawn on `device`; `sizes` are those of its config.

    It has `num_pages` pages, or as many as there is room for; random numbers stand in all of them.
    Raises `ConfigError` where the memory does not do.
    """
    config = LlamaConfig(**sizes)
    layout = loader.derive_layout(config, page_size, dtype)
    # On a CPU as on a GPU's machine, which has no compiler for CPUs.
    kernels = kernels_for(device, wanted="auto" if device.type == "cuda" else "torch")
    backend = kernels.attention(layout)
    try:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(
                config, dtype=TORCH_DTYPES[dtype], attn_implementation=ATTENTION_NAME
            )
    except torch.cuda.OutOfMemoryError as error:
        raise ConfigError(f"the model does not fit on {device}: {error}") from error

    def make_arena() -> KVArena:
        pages = num_pages
        if device.type == "cuda":
            pages = min(pages, int(torch.cuda.mem_get_info(device)[0] * _KV_SHARE) // layout.page_bytes)
        arena = KVArena(layout, pages, device)
        arena.tensor.normal_()
        return arena

    context = loader.context_of(config, None)
    engine = Engine(model.eval(), layout, make_arena, backend, (), context, kernels)
    engine.warmup(max_num_seqs)
    return engine


def prefill_s(engine: Engine, num_tokens: int, *, num_repeats: int) -> float:
    """Median seconds from a prompt on the host to its first token on the host. One more run comes first, uncounted."""
    prompt = _random_tokens(engine, num_tokens)
    pages = range(engine.layout.num_pages_for(num_tokens))
    step = SequenceInput(prompt, 0, pages)
    return timed(lambda: engine.forward([step]).argmax(dim=-1).tolist(), 0.0, min_runs=num_repeats).median_s


@dataclass(frozen=True, slots=True)
class DecodeTimes:
    """Medians of decode steps, in seconds.

    Attributes:
        step_s: as it is served: pages that sequences get from the host, tokens drawn at temperature 1 and back on the
            host.
        forward_s: of that the model on the device, without the host.
        sampling_s: of that the sampler, from logits on the device to tokens on the host.
        has_own_pages: else there was too little memory for that, and sequences share pages.
    """

    step_s: float
    forward_s: float
    sampling_s: float
    has_own_pages: bool

    @property
    def host_s(self) -> float:
        """In which the device does nothing."""
        return max(0.0, self.step_s - self.forward_s - self.sampling_s)


def decode_times(engine: Engine, batch: int, context: int, *, num_steps: int) -> DecodeTimes:
    """Of a step of `batch` sequences, whose contexts grow by `num_steps` around `context`."""
    first = context - num_steps // 2
    num_pages = engine.layout.num_pages_for(first + num_steps)
    own_pages = [
        [(index * num_pages + page) % engine.num_pages for page in range(num_pages)] for index in range(batch)
    ]
    tables = [page_table() for _ in own_pages]
    sampler = engine.sampler()
    params = [SamplingParams(seed=seed) for seed in range(batch)]
    states = [SequenceState(()) for _ in range(batch)]
    tokens = _random_tokens(engine, batch)

    def inputs(start: int) -> list[SequenceInput]:
        for table, own in zip(tables, own_pages, strict=True):
            table.extend(own[len(table) : engine.layout.num_pages_for(start + 1)])
        return [SequenceInput([token], start, table) for token, table in zip(tokens, tables, strict=True)]

    def rows(position: int) -> list[list[SampleRow]]:
        return [[SampleRow(state, of_row, position=position)] for state, of_row in zip(states, params, strict=True)]

    times = []
    for start in range(first, first + num_steps):
        begin_s = time.perf_counter()
        sampled = sampler(engine.forward(inputs(start)), rows(start))
        times.append(time.perf_counter() - begin_s)
        tokens = [getattr(row[0], "token_id", 0) for row in sampled]
    steps = inputs(first)
    logits = engine.forward(steps).clone()
    return DecodeTimes(
        statistics.median(times),
        _device_s(engine.arena.device, lambda: engine.forward(steps)),
        timed(lambda: sampler(logits, rows(0)), 0.0, min_runs=num_steps).median_s,
        batch * num_pages <= engine.num_pages,
    )


def digest_rates(engine: Engine) -> dict[str, float]:
    """Bytes a second of digests of some pages in all layers: read by the host, and on the device where it can."""
    pages = range(min(_DIGESTED_PAGES, engine.num_pages))
    parts = [(layer, pages) for layer in range(engine.layout.num_layers)]
    num_bytes = len(parts) * len(pages) * engine.layout.extent_bytes
    ways = {"host": digests_of(engine.arena.extent_view)}
    if (on_device := engine.device_digests()) is not None:
        ways["device"] = on_device
    return {name: num_bytes / timed(partial(take, parts), 0.0, min_runs=3).median_s for name, take in ways.items()}


def _random_tokens(engine: Engine, num: int) -> list[int]:
    tokens: list[int] = torch.randint(0, engine.vocab_size, (num,)).tolist()
    return tokens
