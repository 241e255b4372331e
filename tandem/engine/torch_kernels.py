"""Kernels of torch alone: any device, no compiler. Slower; what the others are held against."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from tandem.engine.arena import KVArena
from tandem.engine.attention.interface import AttentionBackend
from tandem.engine.attention.reference import ReferenceAttention
from tandem.engine.kernels import DecodeSteps, Fused, SharedWeights, TakeDigests
from tandem.engine.layout import KVLayout
from tandem.engine.loader import Types
from tandem.engine.paged_model import Decoder, PagedModel
from tandem.engine.sampler import Sampler
from tandem.engine.torch_sampler import TorchSampler


class TorchKernels:
    """`model.kernels: torch`."""

    can_widen = can_widen_float16 = False

    def attention(self, _layout: KVLayout, _types: Types | None = None, _sinks: bool = False) -> AttentionBackend:
        return ReferenceAttention()

    def compile_attention(self, _layout: KVLayout, _types: Types) -> None: ...

    def fuse(self, _model: PreTrainedModel, _layout: KVLayout, _types: Types) -> Fused:
        return Fused()

    def decoder(self, _model: PreTrainedModel, _layout: KVLayout, _max_context: int) -> Decoder | None:
        return None

    def share(self, _model: PreTrainedModel, _register: Path, _name: str) -> SharedWeights | None:
        return None

    def decode_steps(self, _paged: PagedModel, _backend: AttentionBackend) -> DecodeSteps | None:
        return None

    def sampler(self, eos_token_ids: Sequence[int]) -> Sampler:
        return TorchSampler(eos_token_ids)

    def short_products(self) -> str:
        return ""

    def digests(self, _arena: KVArena) -> TakeDigests | None:
        return None
