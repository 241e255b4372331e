"""What a GPU can do, and what an engine with random weights does on it: what `benchmarks gpu` measures."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.timing import timed
from tandem.core.errors import ConfigError
from tandem.engine import loader
from tandem.engine.arena import TORCH_DTYPES, KVArena
from tandem.engine.attention.interface import ATTENTION_NAME
from tandem.engine.engine import Engine, SequenceInput
from tandem.engine.select_attention import select_backend

#: Large enough that neither launches nor caches show.
_MATRIX_ROWS = 8192
_MEMORY_BYTES = 4 << 30
_NUM_REPEATS = 20


def find_device(name: str) -> torch.device:
    """Return the GPU called `name`, "cuda" or "cuda:N". Raises `ConfigError` where there is none."""
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
    left, right = (torch.randn(_MATRIX_ROWS, _MATRIX_ROWS, device=device, dtype=TORCH_DTYPES[dtype]) for _ in range(2))
    output = torch.empty_like(left)
    return 2.0 * _MATRIX_ROWS**3 / _device_s(device, lambda: torch.mm(left, right, out=output))


def memory_bandwidth(device: torch.device) -> float:
    """Bytes a second, the better of a large copy (read and written bytes counted) and a large read."""
    source = torch.randn(_MEMORY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    copy = 2 * _MEMORY_BYTES / _device_s(device, lambda: target.copy_(source))
    read = _MEMORY_BYTES / _device_s(device, lambda: source.sum())
    return max(copy, read)


def _device_s(device: torch.device, work: Callable[[], object]) -> float:
    """Median seconds of `work` by the device's own clock."""
    times: list[float] = []
    with torch.cuda.device(device):
        for _ in range(3):
            work()
        for _ in range(_NUM_REPEATS):
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

    Raises `ConfigError` where the memory does not do.
    """
    config = LlamaConfig(**sizes)
    layout = loader.derive_layout(config, page_size, dtype)
    backend = select_backend(layout, device, num_threads=1)
    try:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(
                config, dtype=TORCH_DTYPES[dtype], attn_implementation=ATTENTION_NAME
            )
    except torch.cuda.OutOfMemoryError as error:
        raise ConfigError(f"the model does not fit on {device}: {error}") from error
    context = loader.context_of(config, None)
    engine = Engine(
        model.eval(), layout, lambda: KVArena(layout, num_pages, device), backend, (), context, num_threads=1
    )
    engine.warmup(max_num_seqs)
    return engine


def prefill_s(engine: Engine, num_tokens: int, *, num_repeats: int) -> float:
    """Median seconds from a prompt on the host to its first token on the host. One more run comes first, uncounted."""
    prompt = _random_tokens(engine, num_tokens)
    pages = range(engine.layout.num_pages_for(num_tokens))
    step = SequenceInput(prompt, 0, pages)
    return timed(lambda: _greedy(engine, [step]), 0.0, min_runs=num_repeats).median_s


def decode_s(engine: Engine, batch: int, context: int, *, num_steps: int) -> float:
    """Median seconds of a decode step of `batch` sequences, whose contexts grow by `num_steps` around `context`.

    As it is served: block tables from the host, tokens back to the host, before the next step begins.
    """
    first = context - num_steps // 2
    num_pages = engine.layout.num_pages_for(first + num_steps)
    pages = [range(index * num_pages, (index + 1) * num_pages) for index in range(batch)]
    tokens = []
    for own in pages:
        tokens += _greedy(engine, [SequenceInput(_random_tokens(engine, first), 0, own)])
    times = []
    for start in range(first, first + num_steps):
        steps = [SequenceInput([token], start, own) for token, own in zip(tokens, pages, strict=True)]
        begin_s = time.perf_counter()
        tokens = _greedy(engine, steps)
        times.append(time.perf_counter() - begin_s)
    return statistics.median(times)


def _greedy(engine: Engine, steps: list[SequenceInput]) -> list[int]:
    chosen: list[int] = engine.forward(steps).argmax(dim=-1).tolist()  # waits for the device
    return chosen


def _random_tokens(engine: Engine, num: int) -> list[int]:
    tokens: list[int] = torch.randint(0, engine.vocab_size, (num,)).tolist()
    return tokens
