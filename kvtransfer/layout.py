"""What two workers must agree on before one may write KV pages into the other's memory. Pure."""

from __future__ import annotations

from dataclasses import dataclass, fields

from tandem.core.dtypes import PAGE_DTYPES, kv_head_bytes
from tandem.core.errors import IncompatibleError
from tandem.core.layer_groups import LayerGroups
from tandem.core.pages import pages_for

#: `LayoutId.digest` of pages that nobody checks.
NO_DIGEST = "none"


@dataclass(frozen=True, slots=True)
class LayoutId:
    """The shape and meaning of one extent: `[K|V][slot][kv_head][head_dim]` of one page of one layer.

    Behind each head of whole numbers is its scale.

    Two arenas with equal layouts may differ in their number of pages and in nothing else.

    Attributes:
        weights_sha256: hex digest of the weights (and adapter) that computed the KV.
        dtype: torch's name of the element type, without `torch.`.
        page_size: token slots of a page.
        digest: the algorithm of extent digests; `NO_DIGEST`: none are taken.
        window: tokens that a token sees in each layer, itself included; pages wholly behind that are not kept, and not
            sent. 0: all. Of a mixed model: in the layers with a window.
        num_windowed: of a mixed model the pages of a place for its layers with a window; `num_layers` is then that of a
            page. See `tandem.core.layer_groups`.
    """

    weights_sha256: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    digest: str = "xxh3_64"
    window: int = 0
    num_windowed: int = 0

    @property
    def groups(self) -> LayerGroups:
        return LayerGroups(self.page_size, self.window, self.num_windowed)

    @property
    def extent_bytes(self) -> int:
        """Bytes of one extent: K and V of one page of one layer.

        Raises:
            IncompatibleError: `dtype` is not one whose size is known.
        """
        if self.dtype not in PAGE_DTYPES:
            raise IncompatibleError(f"unknown KV dtype {self.dtype!r}; known: {', '.join(sorted(PAGE_DTYPES))}")
        return 2 * self.page_size * self.num_kv_heads * kv_head_bytes(self.dtype, self.head_dim)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page. Raises as `extent_bytes`."""
        return self.num_layers * self.extent_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in all layers. Raises as `extent_bytes`."""
        return (1 + self.num_windowed) * self.page_bytes // self.page_size

    def num_sent_pages(self, num_tokens: int) -> int:
        """Pages of a prompt of so many tokens that a decode worker needs: those that the next token sees."""
        return self.groups.num_seen(num_tokens) if self.window else pages_for(num_tokens, self.page_size)


def differences(a: LayoutId, b: LayoutId) -> list[str]:
    """Names of the fields in which `a` and `b` differ, in declaration order."""
    return [f.name for f in fields(LayoutId) if getattr(a, f.name) != getattr(b, f.name)]


@dataclass(frozen=True, slots=True)
class KvFormat:
    """What a worker's pages are and how they travel; two workers may serve a request together where these are equal."""

    layout: LayoutId
    transport: str


def mismatch(a: KvFormat, a_name: str, b: KvFormat, b_name: str) -> list[str]:
    """Each field in which two workers differ, with both values, for people; empty where they pair."""
    pairs = [(name, getattr(a.layout, name), getattr(b.layout, name)) for name in differences(a.layout, b.layout)]
    if a.transport != b.transport:
        pairs.append(("transport", a.transport, b.transport))
    return [f"{name}: {a_name} has {ours!r}, {b_name} has {theirs!r}" for name, ours, theirs in pairs]


def check_compatible(a: KvFormat, a_name: str, b: KvFormat, b_name: str) -> None:
    """Let the pair pass when both formats are equal.

    Raises:
        IncompatibleError: naming both sides and every differing field with both values.
    """
    if differing := mismatch(a, a_name, b, b_name):
        raise IncompatibleError(f"{a_name} and {b_name} cannot exchange KV pages: {'; '.join(differing)}")
