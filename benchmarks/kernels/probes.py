"""Fixed probes of what this machine can do: matrix products by three libraries, and reading by two.

They set the limits of the roofline. None of them is Tandem's own kernel, which may be faster than all.
"""

from __future__ import annotations

from collections.abc import Iterator

import numba
import numpy as np
import torch

from benchmarks.kernels.numpy_probe import probe_numpy
from benchmarks.kernels.roofline import Limits, Probe
from benchmarks.timing import timed
from tandem.engine.cpu.atomics import float32s, words
from tandem.engine.cpu.threads import Kernel


def measure_limits(num_threads: int, *, matrix_size: int, stream_bytes: int, budget_s: float) -> Limits:
    """Probe `num_threads` threads; torch keeps that number.

    Args:
        matrix_size: rows and columns of the matrices to multiply.
        stream_bytes: to read in one go; far greater than the caches.
        budget_s: how long to run each probe.
    """
    torch.set_num_threads(num_threads)
    products = (*_probe_torch(matrix_size, budget_s), probe_numpy(num_threads, matrix_size, budget_s))
    return Limits(num_threads, products, tuple(_probe_reads(num_threads, stream_bytes, budget_s)))


def _probe_torch(size: int, budget_s: float) -> Iterator[Probe]:
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(size, size, generator=generator) for _ in range(2))
    output = torch.empty(size, size)
    flop = 2 * size**3
    own = "MKL" if torch.backends.mkl.is_available() else "no MKL"
    yield Probe(f"torch.mm ({own})", flop / timed(lambda: torch.mm(first, second, out=output), budget_s).best_s)
    if torch.backends.mkldnn.is_available():
        # Tensors in oneDNN's own form are multiplied by oneDNN, and by nothing else.
        rows, weight = first.to_mkldnn(), second.to_mkldnn()
        timing = timed(lambda: torch.nn.functional.linear(rows, weight), budget_s)
        yield Probe("torch's oneDNN", flop / timing.best_s)


class ReadStream:
    """`run` reads `num_bytes` of memory in order, a stretch by each of `num_threads` threads."""

    def __init__(self, num_threads: int, num_bytes: int) -> None:
        self.values = np.ones(num_bytes // 4, dtype=np.float32)  # written: untouched memory is one page of zeros
        self.num_bytes = self.values.nbytes
        self._sums = np.empty(num_threads, dtype=np.float32)

    def run(self) -> None:
        values, sums = self.values, self._sums
        _sum_kernel(sums.size, sums.size, values.ctypes.data, values.size, sums.ctypes.data, sums.size)


def _probe_reads(num_threads: int, num_bytes: int, budget_s: float) -> Iterator[Probe]:
    stream = ReadStream(num_threads, num_bytes)
    yield Probe("sum by Numba", stream.num_bytes / timed(stream.run, budget_s).best_s)
    tensor = torch.from_numpy(stream.values)
    yield Probe("sum by torch", stream.num_bytes / timed(tensor.sum, budget_s).best_s)


@numba.njit(nogil=True, fastmath={"reassoc", "contract", "nsz", "arcp"})
def _sum(values):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    total = np.float32(0.0)
    # In this form LLVM sums vectors; over a part of an array, or its values, it does not.
    for index in range(values.size):
        total += values[index]
    return total


def _sum_parts(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """`sums[part]` is of the part's stretch of `values`: one stream for each thread."""
    values_at, size, sums, num_parts = _four_words(arguments)
    for part in range(first, end):
        begin, stop = part * size // num_parts, (part + 1) * size // num_parts
        float32s(sums)[part] = _sum(numba.carray(float32s(values_at + 4 * begin), stop - begin))


_four_words = words(4)
_sum_kernel = Kernel(_sum_parts, "iiii", fast_math=True)
