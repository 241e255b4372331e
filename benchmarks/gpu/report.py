"""`python -m benchmarks gpu`: how near prefill and decode on one GPU come to what it was measured to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from benchmarks.gpu import measure as gpu_measure
from benchmarks.kernels.roofline import FLOAT_BYTES, ModelShape, Work, decode_step, prefill
from tandem.bench.machine import machine, now, versions
from tandem.engine.engine import Engine

FORMAT = "tandem-gpu/1"

_DTYPE, _DTYPE_BYTES = "bfloat16", 2
_PAGE_SIZE = 256  # every kernel takes it
_PROMPT_TOKENS = 4096
_CONTEXT = 512
_BATCHES = (1, 64)
_NUM_PREFILLS = 10
_NUM_DECODE_STEPS = 128

_COMMON = {"vocab_size": 128_256, "num_key_value_heads": 8, "max_position_embeddings": 2 * _PROMPT_TOKENS}
#: Shapes of Llama 3, as the config of `transformers` calls their sizes.
SIZES: dict[str, dict[str, Any]] = {
    "1b": _COMMON | {
        "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "head_dim": 64,
        "intermediate_size": 8192, "tie_word_embeddings": True,
    },
    "8b": _COMMON | {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "head_dim": 128,
        "intermediate_size": 14_336, "tie_word_embeddings": False,
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GpuLimits:
    """What a GPU was measured to do."""

    flop_per_s: float  # matrix product
    bytes_per_s: float  # memory

    def seconds(self, work: Work) -> float:
        """The least time of work that is counted in float32 and done in 16 bits."""
        num_bytes = work.num_bytes * _DTYPE_BYTES / FLOAT_BYTES
        return max(num_bytes / self.bytes_per_s, work.flop / self.flop_per_s)


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured step against its limit."""

    model: str
    work: str
    tokens: int  # that one step computes
    seconds: float
    least_s: float
    goal: float  # share of the limit

    @property
    def share(self) -> float:
        """Of the limit; 1 is as fast as the measured machine allows."""
        return self.least_s / self.seconds

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"share": self.share, "is_met": self.share >= self.goal}


@dataclass(frozen=True, slots=True)
class Report:
    """All figures of one GPU.

    Attributes:
        attention, fused: of each model the kernel, and which parts are fused.
    """

    device: dict[str, Any]
    limits: GpuLimits
    attention: dict[str, str]
    fused: dict[str, str]
    figures: tuple[Figure, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "date": now(),
            "machine": machine(),
            "versions": versions(),
            "device": self.device,
            "limits": asdict(self.limits),
            "attention": self.attention,
            "fused": self.fused,
            "figures": [figure.as_json() for figure in self.figures],
        }


def measure(device_name: str, names: Sequence[str]) -> Report:
    """Measure the limits, then each model of `SIZES`.

    Raises `ConfigError` without such a GPU, or where a model does not fit.
    """
    device = gpu_measure.find_device(device_name)
    limits = GpuLimits(gpu_measure.matrix_rate(device, _DTYPE), gpu_measure.memory_bandwidth(device))
    figures: list[Figure] = []
    attention: dict[str, str] = {}
    fused: dict[str, str] = {}
    for name in names:
        engine = gpu_measure.random_engine(
            SIZES[name], device, dtype=_DTYPE, page_size=_PAGE_SIZE, num_pages=_num_pages(),
            max_num_seqs=max(_BATCHES),
        )  # fmt: skip
        attention[name], fused[name] = engine.attention, engine.fused
        figures += _figures(name, engine, limits)
        del engine  # before the next one needs the memory
    return Report(gpu_measure.describe(device), limits, attention, fused, tuple(figures))


def _figures(name: str, engine: Engine, limits: GpuLimits) -> Iterator[Figure]:
    shape = shape_of(SIZES[name])
    seconds = gpu_measure.prefill_s(engine, _PROMPT_TOKENS, num_repeats=_NUM_PREFILLS)
    least_s = limits.seconds(prefill(shape, _PROMPT_TOKENS))
    yield Figure(name, f"prefill of {_PROMPT_TOKENS:,} tokens", _PROMPT_TOKENS, seconds, least_s, 0.5)
    for batch in _BATCHES:
        seconds = gpu_measure.decode_s(engine, batch, _CONTEXT, num_steps=_NUM_DECODE_STEPS)
        least_s = limits.seconds(decode_step(shape, batch, _CONTEXT))
        yield Figure(name, f"decode, batch {batch}, context {_CONTEXT}", batch, seconds, least_s, 0.6)


def _num_pages() -> int:
    """For the longest prompt, and for the greatest batch with the tokens that it makes; and one for the engine."""
    of_batch = max(_BATCHES) * -(-(_CONTEXT + _NUM_DECODE_STEPS) // _PAGE_SIZE)
    return max(of_batch, -(-_PROMPT_TOKENS // _PAGE_SIZE)) + 1


def shape_of(sizes: dict[str, Any]) -> ModelShape:
    """What counts of a model of these sizes."""
    hidden, intermediate, head_dim = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    attention = 2 * hidden * head_dim * (heads + kv_heads)
    return ModelShape(
        layer_weights=sizes["num_hidden_layers"] * (attention + 3 * hidden * intermediate),
        head_weights=hidden * sizes["vocab_size"],
        largest_linear=(hidden, intermediate),
        num_layers=sizes["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=sizes["vocab_size"],
    )


def table(report: Report) -> Table:
    """One line a figure: what was reached, what the GPU allows, and whether that meets the goal."""
    shown = Table("model", "step", "ms", "least ms", "of the limit", "goal", "", "tokens/s", box=None)
    for column in (*shown.columns[2:6], shown.columns[7]):
        column.justify = "right"
    for figure in report.figures:
        shown.add_row(
            figure.model,
            figure.work,
            f"{figure.seconds * 1e3:,.2f}",
            f"{figure.least_s * 1e3:,.2f}",
            f"{figure.share:.0%}",
            f"{figure.goal:.0%}",
            "met" if figure.share >= figure.goal else "missed",
            f"{figure.tokens / figure.seconds:,.0f}",
        )
    return shown


def heading(report: Report) -> str:
    """What was measured, and its limits."""
    limits = (
        f"{report.device['name']}: {report.limits.flop_per_s / 1e12:,.0f} TFLOP/s in {_DTYPE}, "
        f"{report.limits.bytes_per_s / 1e9:,.0f} GB/s"
    )
    models = [f"{name}: {report.attention[name]} attention, fused: {report.fused[name]}" for name in report.fused]
    return "; ".join([limits, *models])
