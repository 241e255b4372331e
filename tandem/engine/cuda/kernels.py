"""The kernels of a GPU: attention by the first library that computes it right, parts by Triton, sampling by torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from tandem.engine.arena import KVArena
from tandem.engine.attention.interface import AttentionBackend
from tandem.engine.cuda.attention import select_cuda_backend
from tandem.engine.kernels import DecodeSteps, Fused, SharedWeights, TakeDigests
from tandem.engine.layout import KVLayout
from tandem.engine.loader import Types
from tandem.engine.paged_model import Decoder, PagedModel
from tandem.engine.sampler import Sampler
from tandem.engine.torch_sampler import TorchSampler

_log = logging.getLogger(__name__)


class CudaKernels:
    """Of one GPU."""

    can_widen = can_widen_float16 = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def attention(self, layout: KVLayout, _types: Types | None = None, sinks: bool = False) -> AttentionBackend:
        return select_cuda_backend(layout, self._device, sinks=sinks)

    def compile_attention(self, _layout: KVLayout, _types: Types) -> None: ...

    def fuse(self, model: PreTrainedModel, layout: KVLayout, _types: Types) -> Fused:
        try:
            from tandem.engine.cuda import fusing  # imports a compiler
        except ImportError as error:
            _log.warning("the model's own parts serve: fused ones cannot be imported (%s)", error)
            return Fused()
        return Fused(fusing.fuse(model, layout))

    def decoder(self, model: PreTrainedModel, layout: KVLayout, max_context: int) -> Decoder | None:
        try:
            from tandem.engine.cuda import fusing  # imports a compiler
        except ImportError:
            return None  # `fuse` has told of it
        decoder = fusing.fuse_decoder(model, layout, max_context)
        if decoder is None:
            _log.warning("not all of the model is computed in fused parts; a step takes more kernels")
        return decoder

    def share(self, _model: PreTrainedModel, _register: Path, _name: str) -> SharedWeights | None:
        return None

    def decode_steps(self, _paged: PagedModel, _backend: AttentionBackend) -> DecodeSteps | None:
        return None  # graphs are captured when the engine is warmed up

    def sampler(self, eos_token_ids: Sequence[int]) -> Sampler:
        try:
            from tandem.engine.cuda.draw import draw  # imports a compiler
        except ImportError:
            return TorchSampler(eos_token_ids)  # said by `fuse`
        return TorchSampler(eos_token_ids, draw)

    def short_products(self) -> str:
        return ""

    def digests(self, arena: KVArena) -> TakeDigests | None:
        try:
            from tandem.engine.cuda.digests import DeviceDigests  # imports a compiler
        except ImportError:
            return None  # said by `fuse`
        if not DeviceDigests.takes(arena):
            _log.warning("digests are taken on the host: extents of %d bytes are too small", arena.layout.extent_bytes)
            return None
        return DeviceDigests(arena)
