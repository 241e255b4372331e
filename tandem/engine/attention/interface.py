"""The attention function that Tandem lends to the models of `transformers`.

A model calls it once for each layer with the queries, keys and values of the flat batch `[1, T]`. It writes K and V
to the arena, tells the caller that the layer is there, and attends over the pages.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from tandem.core.errors import UnsupportedModelError
from tandem.engine.arena import KVArena
from tandem.engine.attention.reference import AttentionParams
from tandem.engine.batch import PagedBatch
from tandem.engine.layer_places import LayerPlaces

#: The name under which the function is registered. No mask is registered beside it: `transformers` then builds none.
ATTENTION_NAME = "tandem_paged"

# Arguments that models pass along and that say nothing which the batch does not say.
_REDUNDANT = frozenset(
    {
        "position_ids",
        "position_embeddings",
        "cache_position",
        "past_key_values",
        "past_key_value",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "logits_to_keep",
    }
)


class AttentionBackend(Protocol):
    """Computes attention over pages that hold the K and V of this batch already."""

    name: str

    def attend(
        self, batch: PagedBatch, arena: KVArena, layer: int, query: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Return `[T, heads, head_dim]`, like `query`."""
        ...


@dataclass(slots=True)
class ForwardContext:
    """What the attention function needs and the model cannot hand it; one for each forward."""

    batch: PagedBatch
    arena: KVArena
    backend: AttentionBackend
    layer_written: Callable[[int], None] | None = None
    layers: list[int] = field(default_factory=list)  # the layers that have called, in order
    places: LayerPlaces | None = None  # of a mixed model

    @property
    def num_layers(self) -> int:
        """Of the model."""
        return self.arena.layout.num_layers if self.places is None else len(self.places.of)

    def at(self, layer: int, params: AttentionParams) -> tuple[PagedBatch, int]:
        """The batch with the pages of this layer of the model, and which layer of the arena is its own.

        Raises `UnsupportedModelError` where it would see pages that may be another's.
        """
        if self.places is None:
            return self.batch, layer
        group, place = self.places.of[layer]
        if not group:
            return self.batch, place
        if not 0 < params.window <= self.places.window:
            raise UnsupportedModelError(
                f"layer {layer} sees {params.window or 'all'} tokens, and the config says {self.places.window}"
            )
        return self.batch.windowed[group - 1], place


#: The forward that runs in this thread. A context variable, so that engines in several threads do not meet.
current_forward: ContextVar[ForwardContext] = ContextVar("tandem_forward")


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend over the pages of the running forward, as `transformers` calls its attention functions.

    `query` is `[1, heads, T, head_dim]`, `key` and `value` are `[1, kv_heads, T, head_dim]`; returns
    `[1, T, heads, head_dim]`. Raises `UnsupportedModelError` for anything asked of the attention that it does not do:
    an argument passed over in silence would be a wrong answer.
    """
    context = current_forward.get()
    layer = begin_layer(context, module, attention_mask, dropout, is_causal, kwargs)
    _refuse_shapes(module, query, key, value, context)
    params = AttentionParams(
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=int(sliding_window) if sliding_window else 0,
        softcap=float(softcap) if softcap else 0.0,
        sinks=_sinks(module, query.shape[1], s_aux),
    )
    batch, in_arena = context.at(layer, params)
    place = (batch.write_pages, batch.write_slots)
    context.arena.write(in_arena, place, key[0].transpose(0, 1), value[0].transpose(0, 1))
    return attend_written(context, layer, query[0].transpose(0, 1), params)[None], None


def _sinks(module: torch.nn.Module, num_heads: int, given: torch.Tensor | None) -> torch.Tensor | None:
    """A score for each head that only adds to the sum of its weights, as `transformers` hands it: `[heads]`."""
    if given is None:
        return None
    if tuple(given.shape) != (num_heads,):
        raise UnsupportedModelError(
            f"{type(module).__name__} brings attention sinks of shape {tuple(given.shape)} for {num_heads} heads"
        )
    return given.detach().float().contiguous()


def begin_layer(
    context: ForwardContext,
    module: torch.nn.Module,
    attention_mask: torch.Tensor | None,
    dropout: float,
    is_causal: bool | None,
    kwargs: dict[str, Any],
) -> int:
    """The layer that `module` attends in. Raises `UnsupportedModelError` for what the attention does not do."""
    layer = _layer_of(module, context)
    _refuse_unknown(module, attention_mask, dropout, is_causal, kwargs)
    context.layers.append(layer)
    return layer


def attend_written(context: ForwardContext, layer: int, query: torch.Tensor, params: AttentionParams) -> torch.Tensor:
    """Tell the caller that K and V of `layer` are in the arena, and attend; `query` as for `AttentionBackend`."""
    if context.layer_written is not None:
        context.layer_written(layer)
    batch, in_arena = context.at(layer, params)
    return context.backend.attend(batch, context.arena, in_arena, query, params)


def _layer_of(module: torch.nn.Module, context: ForwardContext) -> int:
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int) or not 0 <= layer < context.num_layers:
        raise UnsupportedModelError(f"{type(module).__name__} has no usable layer index ({layer!r})")
    if layer in context.layers:
        raise UnsupportedModelError(f"{type(module).__name__} attends twice in layer {layer}")
    return layer


def _refuse_unknown(
    module: torch.nn.Module,
    attention_mask: torch.Tensor | None,
    dropout: float,
    is_causal: bool | None,
    kwargs: dict[str, Any],
) -> None:
    name = type(module).__name__
    if attention_mask is not None:
        raise UnsupportedModelError(f"{name} brings an attention mask of its own")
    if dropout:
        raise UnsupportedModelError(f"{name} asks for dropout {dropout}")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModelError(f"{name} is not causal")
    unknown = sorted(
        key for key, value in kwargs.items() if value is not None and value is not False and key not in _REDUNDANT
    )
    if unknown:
        raise UnsupportedModelError(f"{name} asks its attention for {', '.join(unknown)}")


def _refuse_shapes(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context: ForwardContext
) -> None:
    layout = context.arena.layout
    expected = (1, layout.num_kv_heads, context.batch.num_tokens, layout.head_dim)
    for name, tensor in (("keys", key), ("values", value)):
        if tuple(tensor.shape) != expected:
            raise UnsupportedModelError(
                f"{type(module).__name__} makes {name} of shape {tuple(tensor.shape)}, the KV layout has {expected}"
            )
    if query.shape[1] % layout.num_kv_heads or query.shape[2:] != key.shape[2:]:
        raise UnsupportedModelError(
            f"{type(module).__name__} makes queries of shape {tuple(query.shape)} for keys of {expected}"
        )


AttentionInterface.register(ATTENTION_NAME, paged_attention)
