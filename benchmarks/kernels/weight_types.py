"""Products of linear layers with each type of weights that ships, against multiply-adds and reads.

Few rows are a decode step's, many a prompt's. The limits (multiply-adds that find all in registers, and the sum of a
stream) run in turn with the products, so that what slows this machine meets all of them.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from benchmarks.kernels import roofline as cost
from benchmarks.kernels.multiply_adds import MultiplyAdds
from benchmarks.kernels.probes import ReadStream
from benchmarks.kernels.roofline import Limits, Probe, Work
from benchmarks.timing import rates_in_turn
from tandem.bench.other_load import OtherLoad
from tandem.engine.cpu.packed_linear import PackedLinear
from tandem.engine.cpu.panels import Rounding
from tandem.engine.cpu.vector_ir import has_bfloat16_products, has_bfloat16_tiles, is_fast_here, widens_float16
from tandem.engine.huge_pages import weight_memory

BY_TWO, IN_TILES = "bfloat16, by two", "bfloat16, in tiles"
WHOLE_BY_TWO = {8: "int8, by two", 4: "int4, by two"}
_SHORT = (BY_TWO, IN_TILES, *WHOLE_BY_TWO.values())

#: The project's own goals for weights of 16 bits, by number of rows, as shares of the limit.
GOALS = {1: 0.8, 8: 0.65, 512: 0.9}
_GOALS_ARE_FOR = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """What is measured: one layer's product, for several numbers of rows."""

    in_features: int = 4096
    out_features: int = 4096
    rows: tuple[int, ...] = (1, 8, 32, 512)
    cold_bytes: int = 256 << 20  # of weights, and of the stream: nothing may come from a cache
    rounds: int = 5
    limit_steps: int = 1_000_000  # of one run of the multiply-adds


@dataclass(frozen=True, slots=True)
class WeightRun:
    """One type of weights and number of rows; `seconds` are of one product, in the best round."""

    weights: str
    num_rows: int
    work: Work
    seconds: float
    limits: Limits
    other_load: float  # cores that others used meanwhile

    @property
    def goal(self) -> float | None:
        """The share of the limit that the project strives for."""
        return GOALS.get(self.num_rows) if self.weights in _GOALS_ARE_FOR else None

    @property
    def bound(self) -> str:
        """What the product could be limited by."""
        return "reads" if self.limits.is_memory_bound(self.work) else "multiply-adds"

    @property
    def share(self) -> float:
        """Of the limit: of that which binds."""
        return self.limits.seconds(self.work) / self.seconds

    @property
    def share_of_reads(self) -> float:
        return self.work.num_bytes / self.seconds / self.limits.read_rate

    @property
    def share_of_multiply_adds(self) -> float:
        return self.work.flop / self.seconds / self.limits.product_rate


def weight_types() -> dict[str, Callable[[torch.Tensor, int], PackedLinear]]:
    """What makes a layer of weights `[N, K]` float32 and of a number of threads, by type; those that this CPU has."""
    if not is_fast_here():
        return {}
    made: dict[str, Callable[[torch.Tensor, int], PackedLinear]] = {
        "float32": lambda weight, threads: PackedLinear(weight, None, threads),
        "bfloat16": lambda weight, threads: PackedLinear(weight.bfloat16(), None, threads),
    }
    if widens_float16():
        made["float16"] = lambda weight, threads: PackedLinear(weight.half(), None, threads)
    if has_bfloat16_products():
        made[BY_TWO] = _short
        if has_bfloat16_tiles():
            made[IN_TILES] = functools.partial(_short, in_tiles=True)
    for bits in (8, 4):
        made[f"int{bits}"] = functools.partial(_rounded, bits=bits)
        if has_bfloat16_products():
            made[WHOLE_BY_TWO[bits]] = functools.partial(_rounded, bits=bits, short=True)
    return made


def count_weights() -> int:
    """How many types `measure_weights` measures on this CPU."""
    return len(weight_types())


def measure_weights(num_threads: int, sizes: WeightSizes, tell: Callable[[str], None]) -> Iterator[WeightRun]:
    """One type after the other; `tell` hears what comes next."""
    weight = torch.randn(sizes.out_features, sizes.in_features, generator=torch.Generator().manual_seed(0))
    for name, make in weight_types().items():
        tell(f"weights of {name}")
        yield from _measure(name, make(weight, num_threads), num_threads, sizes)


def _measure(name: str, layer: PackedLinear, num_threads: int, sizes: WeightSizes) -> Iterator[WeightRun]:
    weight_bytes = _weight_bytes(layer)
    layers = [layer, *(_copy(layer) for _ in range(-(-sizes.cold_bytes // weight_bytes) - 1))]
    adds = MultiplyAdds(num_threads, sizes.limit_steps, by_two=name in _SHORT)
    stream = ReadStream(num_threads, sizes.cold_bytes)
    turns = itertools.cycle(layers)  # so the weights of none are in a cache
    products = []
    for num_rows in sizes.rows:
        rows = torch.randn(num_rows, sizes.in_features, generator=torch.Generator().manual_seed(1))
        num = max(1, len(layers) // num_rows)  # so that no run is too short for a clock
        products.append((num, functools.partial(_multiply, turns, num, rows)))
    load = OtherLoad()
    add_rate, read_rate, *product_rates = rates_in_turn(
        [(adds.flop, adds.run), (stream.num_bytes, stream.run), *products], sizes.rounds, num_threads
    )
    limits = Limits(num_threads, (Probe("multiply-adds", add_rate),), (Probe("sum by Numba", read_rate),))
    others = load.cores()
    for num_rows, rate in zip(sizes.rows, product_rates, strict=True):
        work = cost.linear(num_rows, sizes.in_features, sizes.out_features, weight_bytes)
        yield WeightRun(name, num_rows, work, 1 / rate, limits, others)


def _multiply(layers: Iterator[PackedLinear], num: int, rows: torch.Tensor) -> None:
    for layer in itertools.islice(layers, num):
        layer.padded(rows)


def _short(weight: torch.Tensor, num_threads: int, *, in_tiles: bool = False) -> PackedLinear:
    layer = PackedLinear(weight.bfloat16(), None, num_threads)
    layer.panels.multiply_short(in_tiles=in_tiles)
    return layer


def _rounded(weight: torch.Tensor, num_threads: int, *, bits: int, short: bool = False) -> PackedLinear:
    layer = PackedLinear(weight, None, num_threads)
    layer.panels.quantize(Rounding(bits))
    if short:
        layer.panels.multiply_short()
    return layer


def _weight_bytes(layer: PackedLinear) -> int:
    scales = layer.panels.scales
    return layer.panels.numbers.nbytes + (0 if scales is None else scales.nbytes)


def _copy(layer: PackedLinear) -> PackedLinear:
    """One with weights of its own."""
    copied, panels = copy.copy(layer), copy.copy(layer.panels)
    panels.place(_copied(panels.numbers), None if panels.scales is None else _copied(panels.scales))
    copied.panels = panels
    return copied


def _copied(numbers: torch.Tensor) -> torch.Tensor:
    return weight_memory.empty(*numbers.shape, dtype=numbers.dtype).copy_(numbers)
