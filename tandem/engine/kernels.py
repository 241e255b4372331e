"""What an engine computes with: attention, fused parts and sampling, one implementation for each kind of device.

`select_kernels.kernels_for` chooses, and is the only one that imports them: `cpu.kernels` needs Numba, `cuda.kernels`
Triton where it is there, `torch_kernels` nothing but torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

import torch
from transformers import PreTrainedModel

from tandem.engine.arena import KVArena
from tandem.engine.attention.interface import AttentionBackend
from tandem.engine.batch import SequenceInput
from tandem.engine.layout import KVLayout
from tandem.engine.loader import Types
from tandem.engine.paged_model import Decoder, PagedModel
from tandem.engine.sampler import Sampler

#: `[(layer, pages)]` → of each, the digests of these pages in that layer, in their order.
TakeDigests: TypeAlias = Callable[[Sequence[tuple[int, Sequence[int]]]], list[tuple[int, ...]]]


class SharedWeights(Protocol):
    """Memory in which other processes have the same weights; to be held as long as others may join."""

    def describe(self) -> str:
        """For people, to be put behind a sentence."""


class DecodeSteps(Protocol):
    """Computes decode steps by a shorter way than `PagedModel.forward`."""

    def takes(self, sequences: Sequence[SequenceInput]) -> bool: ...

    def forward(self, sequences: Sequence[SequenceInput]) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Fused:
    """What of a model is computed by other parts than its own.

    Attributes:
        parts: how many of which kind are replaced; for people.
        linear: whose products of linear layers are in use; see `Engine.linear`.
    """

    parts: str = "none"
    linear: str = "torch"


class Kernels(Protocol):
    """What an engine computes with on its device.

    Attributes:
        can_widen: as `loader.choose_types` asks.
        can_widen_float16: whether weights of this type may stay so in memory too.
    """

    can_widen: bool
    can_widen_float16: bool

    def short_products(self) -> str:
        """As `loader.choose_types` asks."""

    def attention(self, layout: KVLayout, types: Types | None = None, sinks: bool = False) -> AttentionBackend:
        """The kernel for pages of `layout`, of a model of these types, by default all that of the pages; for one that
        has attention sinks where `sinks` says so.

        Raises `ConfigError` where none takes them.
        """

    def compile_attention(self, layout: KVLayout, types: Types) -> None:
        """Compile now what serves such attention, and sampling, where that is compiled once a host."""

    def fuse(self, model: PreTrainedModel, layout: KVLayout, types: Types) -> Fused:
        """Replace parts of `model` by faster ones that give the same."""

    def decoder(self, model: PreTrainedModel, layout: KVLayout, max_context: int) -> Decoder | None:
        """What computes in place of a whole fused model; `None`: the model does."""

    def share(self, model: PreTrainedModel, register: Path, name: str) -> SharedWeights | None:
        """Have the weights of a fused model in memory that other processes have too, by `name`; `None`: they stay."""

    def decode_steps(self, paged: PagedModel, backend: AttentionBackend) -> DecodeSteps | None:
        """A shorter way for decode steps of `paged`, whose decoder and `backend` are of these kernels."""

    def sampler(self, eos_token_ids: Sequence[int]) -> Sampler:
        """What chooses tokens from logits on the device."""

    def digests(self, arena: KVArena) -> TakeDigests | None:
        """Takes xxh3_64 of the extents of `arena` where they lie; `None`: their bytes are read on the host."""
