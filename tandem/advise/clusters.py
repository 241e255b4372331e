"""The clusters that are compared. Pure."""

from __future__ import annotations

from typing import NamedTuple


class Cluster(NamedTuple):
    """Workers of both roles. Without prefill workers it is colocated: decode workers compute prompts too."""

    num_prefill: int
    num_decode: int

    @property
    def is_colocated(self) -> bool:
        return not self.num_prefill

    @property
    def num_workers(self) -> int:
        return self.num_prefill + self.num_decode

    def __str__(self) -> str:
        return f"{self.num_prefill}+{self.num_decode}"


def clusters_of(num_workers: int) -> tuple[Cluster, ...]:
    """The colocated one, then all splits: 0+3, 1+2, 2+1."""
    return tuple(Cluster(num, num_workers - num) for num in range(num_workers))
