"""The kernels of CPUs, compiled by Numba: for what is computed in float32; the rest is left to torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from tandem.engine import loader
from tandem.engine.arena import KVArena
from tandem.engine.attention.interface import AttentionBackend
from tandem.engine.attention.reference import ReferenceAttention
from tandem.engine.cpu.attention import CPUAttention
from tandem.engine.cpu.attention_kernel import can_attend
from tandem.engine.cpu.attention_short import can_attend_short
from tandem.engine.cpu.decode_programs import DecodePrograms
from tandem.engine.cpu.decoder import FusedDecoder
from tandem.engine.cpu.draw_kernel import compile_draw_kernel
from tandem.engine.cpu.embedding import widen
from tandem.engine.cpu.experts import pack_experts
from tandem.engine.cpu.fusing import fuse, fuse_decoder, multiply_short, share
from tandem.engine.cpu.packed_linear import pack
from tandem.engine.cpu.panels import Rounding
from tandem.engine.cpu.sampler import CompiledSampler
from tandem.engine.cpu.shared_weights import Shared, WeightRegister
from tandem.engine.cpu.vector_ir import has_bfloat16_products, has_bfloat16_tiles, is_fast_here, widens_float16
from tandem.engine.kernels import Fused, TakeDigests
from tandem.engine.layout import KVLayout
from tandem.engine.loader import SHORT, SHORT_IN_TILES, Types
from tandem.engine.paged_model import PagedModel
from tandem.engine.sampler import Sampler


class CPUKernels:
    """Of `num_threads` threads."""

    def __init__(self, num_threads: int, *, tiles: bool = True) -> None:
        """`tiles`: whether they may be used, where this CPU has them."""
        self._num_threads, self._tiles = num_threads, tiles
        self.can_widen = is_fast_here()
        self.can_widen_float16 = widens_float16()

    def short_products(self) -> str:
        if not has_bfloat16_products():
            return ""
        return SHORT_IN_TILES if self._tiles and has_bfloat16_tiles() else SHORT

    def attention(self, layout: KVLayout, types: Types | None = None, _sinks: bool = False) -> AttentionBackend:
        types = types or Types.all_of(layout.dtype)
        if types.computed == "float32" and can_attend(layout):
            return CPUAttention(self._num_threads, types.products if can_attend_short(layout) else "")
        return ReferenceAttention()

    def compile_attention(self, layout: KVLayout, types: Types) -> None:
        attention = self.attention(layout, types)
        if isinstance(attention, CPUAttention):
            attention.kernel(layout).compile()
        compile_draw_kernel()

    def fuse(self, model: PreTrainedModel, layout: KVLayout, types: Types) -> Fused:
        if types.computed != "float32":
            return Fused()
        is_asked = types.quantized and not types.only_stored
        asked = Rounding(loader.QUANTIZED[types.quantized]) if is_asked else None
        parts = fuse(model, layout, self._num_threads, asked)
        if num_experts := pack_experts(model, self._num_threads, asked):
            parts = f"{parts}, {num_experts} experts".removeprefix("none, ")
        linear = pack(model, self._num_threads, asked)
        widen(model)
        if types.quantized:
            linear += f" {types.quantized}"
        if types.multiplies_short:
            multiply_short(model, in_tiles=types.in_tiles)
            linear += f" {types.products}"
        return Fused(parts, linear)

    def decoder(self, model: PreTrainedModel, layout: KVLayout, _max_context: int) -> FusedDecoder | None:
        return fuse_decoder(model, layout)

    def share(self, model: PreTrainedModel, register: Path, name: str) -> Shared | None:
        return share(model, WeightRegister(register), name)

    def decode_steps(self, paged: PagedModel, backend: AttentionBackend) -> DecodePrograms | None:
        if isinstance(paged.decoder, FusedDecoder) and isinstance(backend, CPUAttention):
            return DecodePrograms(paged, paged.decoder, backend)
        return None

    def sampler(self, eos_token_ids: Sequence[int]) -> Sampler:
        return CompiledSampler(eos_token_ids)

    def digests(self, _arena: KVArena) -> TakeDigests | None:
        return None
