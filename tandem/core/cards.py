"""Processors by their makers' data sheets: dense bfloat16, no sparsity.

Of CPUs, sockets: all cores at their base clock, with the widest instructions that they have for it (AVX-512, AMX), and
a module of 64 GB in each channel of memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.config_tree import did_you_mean
from tandem.core.errors import ConfigError
from tandem.core.step_times import Card

_GIGA, _TERA = 1e9, 1e12


@dataclass(frozen=True, slots=True)
class CardSheet:
    """Attributes:
    tflops: of bfloat16, 10^12 operations a second.
    gb_per_s: of its memory, 10^9 bytes a second.
    memory_gb: 10^9 bytes.
    watts: at full load.
    is_cpu: its workers compute, and keep pages, as those on CPUs do.
    """

    name: str
    tflops: float
    gb_per_s: float
    memory_gb: float
    watts: float
    is_cpu: bool = False

    @property
    def ridge(self) -> float:
        """Operations a byte from which on computing takes longer than reading."""
        return self.tflops * _TERA / (self.gb_per_s * _GIGA)

    def times(self, num: int, flops_share: float, bytes_share: float, overhead_s: float) -> Card:
        """`num` of them as one, which share all work evenly."""
        return Card(num * self.tflops * _TERA, num * self.gb_per_s * _GIGA, flops_share, bytes_share, overhead_s)


CARDS: dict[str, CardSheet] = {
    sheet.name: sheet
    for sheet in (
        CardSheet("a100", 312, 2039, 80, 400),
        CardSheet("h100", 989, 3350, 80, 700),
        CardSheet("h100-pcie", 756, 2000, 80, 350),
        CardSheet("h200", 989, 4800, 141, 700),
        CardSheet("b200", 2250, 8000, 180, 1000),
        CardSheet("l4", 121, 300, 24, 72),
        CardSheet("l40s", 362, 864, 48, 350),
        CardSheet("mi300x", 1307, 5300, 192, 750),
        CardSheet("epyc-9654", 14.7, 460.8, 768, 360, is_cpu=True),  # 96 cores at 2.4 GHz, 12 channels
        CardSheet("xeon-8592", 249, 358.4, 512, 350, is_cpu=True),  # 64 cores at 1.9 GHz, 8 channels
    )
}


def find_card(name: str) -> CardSheet:
    """Raises `ConfigError`, which names those that are known."""
    if name not in CARDS:
        raise ConfigError(
            f"{name} is no card that is known here; {did_you_mean(name, CARDS)}known: {', '.join(CARDS)}", key="--card"
        )
    return CARDS[name]
