"""Trials: whether a replacement gives on random input what the original part of a model gives.

In float32 both must give the same, up to rounding; for the original, weights of fewer bits are widened. In 16 bits
roundings are as large as small mistakes, so a part is tried twice. First, float32 copies of both must give the same:
this shows that the computation is right. Then both run in their own type, and the replacement must be about as near to
the float32 result as the original is: this shows that its precision is right.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from tandem.core.errors import UnsupportedModelError
from tandem.engine.arena import TORCH_DTYPES, KVArena
from tandem.engine.attention.interface import AttentionBackend, ForwardContext, current_forward
from tandem.engine.attention.reference import AttentionParams
from tandem.engine.batch import PagedBatch, SequenceInput, build_batch
from tandem.engine.layout import KVLayout

_Output = TypeVar("_Output")
_Fused = TypeVar("_Fused", bound=nn.Module)
#: Calls a part on random input of a type: tensors `[..., features]`.
Call = Callable[[nn.Module, torch.dtype], list[torch.Tensor]]

_log = logging.getLogger(__name__)

#: Greatest difference in float32, as a share of the greatest number of the same row.
_TOLERANCE = 1e-4
#: In 16 bits: by how much a replacement's greatest error in a row may exceed the original's, which are both of chance;
#: and what it may be beside that, in roundings of the greatest number of the row.
_ERROR_RATIO, _ROUNDINGS = 2.0, 1.0
# Small rows show an epsilon, great ones an activation, the greatest a clamp.
_ROW_SCALES = (1e-3, 0.1, 1.0, 10.0, 1e3)
NUM_ROW_SCALES = len(_ROW_SCALES)
#: Two requests in the midst of their contexts, their pages out of order.
SEQUENCES = (SequenceInput([0] * 5, 2, (3, 0)), SequenceInput([0], 6, (2, 1)))
PAGE_SIZE, NUM_PAGES = 4, 4
#: What modules raise that are called like those that can be replaced, and are not like them. All else should not be:
#: memory that is not enough, a compiler that is not there.
_OF_OTHER_CLASSES = (TypeError, AttributeError, LookupError, ValueError, NotImplementedError, UnsupportedModelError)


def proved(module: nn.Module, make: Callable[[Any], _Fused], call: Call, dtype: torch.dtype) -> _Fused | None:
    """`make(module)`, if that gives what `module` gives; `None` if it does not, or if either raises.

    Args:
        module: has weights of the type `dtype`, or of fewer bits where that is float32.
        make: what it makes in 16 bits has all its weights as parameters and buffers.
        call: makes the same input each time, but for its type, whose numbers `dtype` can hold.
    """

    def attempt() -> _Fused | None:
        expected = _called(call, in_type(module, dtype), dtype)
        if dtype is torch.float32:
            fused = make(module)
            is_same = _all_of(same_rows, expected, _called(call, fused, dtype))
        else:
            exact = _called_in_float32(call, module)
            fused = make(module)
            is_same = _all_of(same_rows, exact, _called_in_float32(call, fused))
            is_same = is_same and _all_of(_no_worse_rows, exact, expected, _called(call, fused, dtype))
        if not is_same:
            _log.info("%s is not replaced by %s: the numbers differ", type(module).__name__, type(fused).__name__)
            return None
        return fused

    return attempted(module, attempt)


def in_type(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The module, or a float32 copy of one that is to compute in float32 and has weights of 16 bits."""
    is_wide = dtype is not torch.float32 or all(weight.dtype is dtype for weight in module.parameters())
    return module if is_wide else copy.deepcopy(module).float()


def _called_in_float32(call: Call, module: nn.Module) -> list[torch.Tensor]:
    """The result of a float32 copy of the module; the copy is dropped afterwards."""
    return _called(call, copy.deepcopy(module).float(), torch.float32)


def _called(call: Call, module: nn.Module, dtype: torch.dtype) -> list[torch.Tensor]:
    with torch.inference_mode():
        return call(module, dtype)


def _all_of(compare: Callable[..., bool], *outputs: list[torch.Tensor]) -> bool:
    return all(compare(*tensors) for tensors in zip(*outputs, strict=True))


def same_rows(expected: torch.Tensor, found: torch.Tensor) -> bool:
    """Whether two tensors `[..., features]` are the same in float32, row by row."""
    if found.shape != expected.shape:
        return False
    scale = expected.nan_to_num(0.0).abs().amax(dim=-1, keepdim=True)
    return bool((((found - expected).abs() <= _TOLERANCE * scale) | (found.isnan() & expected.isnan())).all())


def _no_worse_rows(exact: torch.Tensor, original: torch.Tensor, found: torch.Tensor) -> bool:
    """Whether `found` is about as near to `exact` as `original` is, row by row.

    Where the original overflows its type, the replacement may give anything.
    """
    if found.shape != exact.shape or found.dtype != original.dtype:
        return False
    if not torch.equal(exact.isnan(), found.isnan() & exact.isnan()):
        return False
    is_bound = exact.isfinite() & original.isfinite()
    allowed, error = (torch.where(is_bound, part.float() - exact, 0.0).abs().amax(dim=-1) for part in (original, found))
    scale = torch.where(is_bound, exact, 0.0).abs().amax(dim=-1)
    return bool((error <= _ERROR_RATIO * allowed + _ROUNDINGS * torch.finfo(found.dtype).eps * scale).all())


def attempted(module: nn.Module, attempt: Callable[[], _Output]) -> _Output | None:
    """What `attempt` makes of `module`; `None` if it raises, as it may for a class that only looks familiar."""
    try:
        return attempt()
    except Exception as error:  # noqa: BLE001 - of any class, since the module may be of any class
        level = logging.INFO if isinstance(error, _OF_OTHER_CLASSES) else logging.WARNING
        _log.log(level, "%s is left as it is: %s: %s", type(module).__name__, type(error).__name__, error)
        return None


@dataclass(frozen=True)
class Seen:
    """What an attention module did."""

    parts: list[torch.Tensor]  # its layer's pages, the queries, the output; each of some rows
    params: AttentionParams  # what it asked of the attention


@dataclass(frozen=True)
class AttentionTrial:
    """One call of an attention module, or of a layer with one, on random input and over an arena of its own."""

    layout: KVLayout  # of the model's type
    device: torch.device
    batch: PagedBatch
    hidden: torch.Tensor  # [1, T, hidden_size]
    rotary: tuple[torch.Tensor, torch.Tensor]  # cosines and sines, [1, T, rotary_dim]

    @classmethod
    def make(cls, layout: KVLayout, hidden_size: int, rotary_dim: int, device: torch.device) -> AttentionTrial:
        small = replace(layout, page_size=PAGE_SIZE)
        batch = build_batch(SEQUENCES, PAGE_SIZE, device)
        hidden = scale_rows(random(1, batch.num_tokens, hidden_size))
        # No angles: any pair of numbers must be used in the same way.
        numbers = hidden, *random(2, 1, batch.num_tokens, rotary_dim)
        hidden, cos, sin = (number.to(device, TORCH_DTYPES[layout.dtype]) for number in numbers)
        return cls(small, device, batch, hidden, (cos, sin))

    def run(self, module: nn.Module, dtype: torch.dtype) -> Seen:
        """What the attention module of this type does."""
        # No slots but those that it writes may be read or changed.
        recorder, untouched = _Recorder(), torch.tensor(float("nan"))
        (output, _), pages = self._call(module, module.layer_idx, recorder, untouched, dtype)  # type: ignore[arg-type]
        query, params = recorder.calls[0]
        return Seen([pages, query, output], params)

    def run_layer(
        self, layer: nn.Module, index: int, backend: AttentionBackend, dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """The output of the decoder layer with this index and of this type, and its pages."""
        content = random(NUM_PAGES, 2, PAGE_SIZE, self.layout.num_kv_heads, self.layout.head_dim)
        content = content.to(TORCH_DTYPES[self.layout.dtype])
        output, pages = self._call(layer, index, backend, content, dtype)
        if not isinstance(output, torch.Tensor):
            raise TypeError(f"a layer that gives {type(output).__name__}")
        return [output, pages]

    def _call(
        self, module: nn.Module, index: int, backend: AttentionBackend, content: torch.Tensor, dtype: torch.dtype
    ) -> tuple[Any, torch.Tensor]:
        arena = KVArena(replace(self.layout, dtype=str(dtype).removeprefix("torch.")), NUM_PAGES, self.device)
        # Only its own layer is touched: on a CPU memory of the others is never taken.
        pages = arena.layer(index)
        pages.copy_(content)
        cos, sin = self.rotary
        token = current_forward.set(ForwardContext(self.batch, arena, backend))
        try:
            output = module(
                hidden_states=self.hidden.to(dtype),
                position_embeddings=(cos.to(dtype), sin.to(dtype)),
                attention_mask=None,
                past_key_values=None,
            )
        finally:
            current_forward.reset(token)
        return output, pages


class _Recorder:
    """An attention that hands the queries through."""

    name = "recorder"

    def __init__(self) -> None:
        self.calls: list[tuple[torch.Tensor, AttentionParams]] = []

    def attend(
        self, _batch: PagedBatch, _arena: KVArena, _layer: int, query: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        self.calls.append((query.clone(), params))
        return query.contiguous()


def scale_rows(rows: torch.Tensor) -> torch.Tensor:
    """`[..., N, features]`, with small and great scales in turn."""
    scales = [_ROW_SCALES[index % len(_ROW_SCALES)] for index in range(rows.shape[-2])]
    return rows * torch.tensor(scales, dtype=torch.float32)[:, None]


def random(*shape: int) -> torch.Tensor:
    """Standard normal float32 on the CPU, each time the same."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
