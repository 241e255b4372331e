"""The shape of the KV pages."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.dtypes import PAGE_DTYPES, kv_head_bytes
from tandem.core.errors import ConfigError


@dataclass(frozen=True)
class KVLayout:
    """Sizes of one KV page: `[layer][page][K|V][slot][kv_head][head_dim]`; see `kv_numbers` for what a head is.

    Two workers can hand pages to each other only if their layouts are equal. Raises `ConfigError` for sizes below
    one and for an unknown dtype.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int  # token slots of a page
    dtype: str  # one of PAGE_DTYPES

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "page_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"KV layout: {name} must be 1 or more, got {getattr(self, name)}")
        if self.dtype not in PAGE_DTYPES:
            raise ConfigError(f"KV layout: dtype {self.dtype!r} is not one of {', '.join(PAGE_DTYPES)}")

    @property
    def extent_bytes(self) -> int:
        """Bytes of one page of one layer, K and V."""
        return 2 * self.page_size * self.num_kv_heads * kv_head_bytes(self.dtype, self.head_dim)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers."""
        return self.num_layers * self.extent_bytes

    def num_pages_for(self, num_tokens: int) -> int:
        """Return how many pages hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)
