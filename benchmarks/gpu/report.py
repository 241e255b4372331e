"""`python -m benchmarks gpu`: how near prefill and decode on one GPU come to what it was measured to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.gpu import measure as gpu_measure
from benchmarks.kernels.roofline import FLOAT_BYTES, ModelShape, Work, decode_step, prefill
from tandem.bench.machine import machine, now, versions
from tandem.engine.engine import Engine

FORMAT = "tandem-gpu/3"

_DTYPE, _DTYPE_BYTES = "bfloat16", 2
_PAGE_SIZE = 256  # every kernel takes it
_PROMPT_TOKENS = 4096
#: Sequences and tokens before each; the largest first, so that a run that is cut off has said the most.
_STEPS = tuple((batch, context) for context in (8192, 1024) for batch in (256, 64, 16, 1))
_NUM_PREFILLS = 5
_NUM_DECODE_STEPS = 24

_COMMON = {"vocab_size": 128_256, "num_key_value_heads": 8, "max_position_embeddings": 4 * _PROMPT_TOKENS}
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
    "tiny": {
        "vocab_size": 320, "num_key_value_heads": 1, "max_position_embeddings": 512, "hidden_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32, "intermediate_size": 128,
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
class Load:
    """What is asked of a model.

    Attributes:
        steps: of decode, sequences and tokens before each.
    """

    prompt_tokens: int = _PROMPT_TOKENS
    num_prefills: int = _NUM_PREFILLS
    steps: tuple[tuple[int, int], ...] = _STEPS
    num_decode_steps: int = _NUM_DECODE_STEPS

    @property
    def num_pages(self) -> int:
        """For the longest prompt, and for the greatest step with the tokens that it makes; and one for the engine."""
        of_steps = (batch * -(-(context + self.num_decode_steps) // _PAGE_SIZE) for batch, context in self.steps)
        return max(*of_steps, -(-self.prompt_tokens // _PAGE_SIZE)) + 1


#: For the model "tiny": a matter of seconds on a CPU.
_SMALL_LOAD = Load(40, 1, ((4, 96), (1, 24)), 4)


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured step against its limit.

    Attributes:
        tokens: that one step computes.
        least_s: what the device's limits allow.
        goal: share of the limit.
        forward_s, sampling_s, host_s: parts of `seconds` of a decode step, see `measure.DecodeTimes`.
        has_own_pages: else sequences share pages, as memory does not do.
    """

    model: str
    work: str
    tokens: int
    seconds: float
    least_s: float
    goal: float
    forward_s: float | None = None
    sampling_s: float | None = None
    host_s: float | None = None
    has_own_pages: bool = True

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
        digests: of each model bytes a second of digests of its pages, on the device and on the host.
        failed: of each model that could not be measured, why.
    """

    device: dict[str, Any]
    limits: GpuLimits
    attention: dict[str, str]
    fused: dict[str, str]
    digests: dict[str, dict[str, float]]
    figures: tuple[Figure, ...]
    failed: dict[str, str]

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
            "digests": self.digests,
            "figures": [figure.as_json() for figure in self.figures],
            "failed": self.failed,
        }


def measure(
    device_name: str, names: Sequence[str], note: Callable[[Report, Figure | None], None] = lambda *_: None
) -> Report:
    """Measure the limits, then each model of `SIZES`. What fails for one model is told, and the next one goes on.

    Args:
        note: called with each figure, and all so far.

    Raises `ConfigError` without such a GPU.
    """
    device = gpu_measure.find_device(device_name)
    limits = GpuLimits(gpu_measure.matrix_rate(device, _DTYPE), gpu_measure.memory_bandwidth(device))
    report = Report(gpu_measure.describe(device), limits, {}, {}, {}, (), {})
    note(report, None)
    for name in names:
        load = _SMALL_LOAD if name == "tiny" else Load()
        engine: Engine | None = None
        try:
            engine = gpu_measure.random_engine(
                SIZES[name], device, dtype=_DTYPE, page_size=_PAGE_SIZE, num_pages=load.num_pages,
                max_num_seqs=max(batch for batch, _ in load.steps),
            )  # fmt: skip
            report.attention[name], report.fused[name] = engine.attention, engine.fused
            for figure in _figures(name, engine, limits, load):
                report = replace(report, figures=(*report.figures, figure))
                note(report, figure)
            report.digests[name] = gpu_measure.digest_rates(engine)
            note(report, None)
        except Exception as error:  # noqa: BLE001 - a card that is short of memory, a kernel that fails: told with the rest
            report.failed[name] = f"{type(error).__name__}: {error}"
            note(report, None)
        del engine  # before the next one needs the memory
    return report


def _figures(name: str, engine: Engine, limits: GpuLimits, load: Load) -> Iterator[Figure]:
    shape = shape_of(SIZES[name])
    seconds = gpu_measure.prefill_s(engine, load.prompt_tokens, num_repeats=load.num_prefills)
    least_s = limits.seconds(prefill(shape, load.prompt_tokens))
    yield Figure(name, f"prefill of {load.prompt_tokens:,} tokens", load.prompt_tokens, seconds, least_s, 0.5)
    for batch, context in load.steps:
        times = gpu_measure.decode_times(engine, batch, context, num_steps=load.num_decode_steps)
        least_s = limits.seconds(decode_step(shape, batch, context))
        work = f"decode, batch {batch}, context {context:,}"
        yield Figure(
            name, work, batch, times.step_s, least_s, 0.6, times.forward_s, times.sampling_s, times.host_s,
            times.has_own_pages,
        )  # fmt: skip


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


_COLUMNS = (
    "model", "step", "ms", "least ms", "of the limit", "goal", "", "model ms", "sampling ms", "host ms", "tokens/s",
)  # fmt: skip


def line(figure: Figure) -> tuple[str, ...]:
    """Of the table: what was reached, what the GPU allows, whether that meets the goal, and its parts."""
    parts = (figure.forward_s, figure.sampling_s, figure.host_s)
    return (
        figure.model,
        figure.work + ("" if figure.has_own_pages else " (shared pages)"),
        f"{figure.seconds * 1e3:,.2f}",
        f"{figure.least_s * 1e3:,.2f}",
        f"{figure.share:.0%}",
        f"{figure.goal:.0%}",
        "met" if figure.share >= figure.goal else "missed",
        *("" if part is None else f"{part * 1e3:,.2f}" for part in parts),
        f"{figure.tokens / figure.seconds:,.0f}",
    )


def table(figures: Sequence[Figure]) -> str:
    """One line a figure."""
    rows = [_COLUMNS, *map(line, figures)]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    made = []
    for row in rows:
        cells = (
            cell.ljust(width) if place < 2 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        made.append("  ".join(cells).rstrip())
    return "\n".join(made)


def heading(report: Report) -> str:
    """What was measured, and its limits."""
    limits = (
        f"{report.device['name']}: {report.limits.flop_per_s / 1e12:,.0f} TFLOP/s in {_DTYPE}, "
        f"{report.limits.bytes_per_s / 1e9:,.0f} GB/s"
    )
    models = [f"{name}: {report.attention[name]} attention, fused: {report.fused[name]}" for name in report.fused]
    digests = [
        f"{name}: digests of pages " + ", ".join(f"{rate / 1e9:,.1f} GB/s on the {way}" for way, rate in rates.items())
        for name, rates in report.digests.items()
    ]
    return "; ".join([limits, *models, *digests])
