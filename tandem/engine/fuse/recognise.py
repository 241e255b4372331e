"""Finds parts of a model that can be replaced by ones with fewer passes over memory, for any device.

A part is recognised by its structure. It is replaced only if the replacement gives the same on random input, up to
rounding. Every other part stays as it is. A `Kit` makes the replacements for its device.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from tandem.engine.arena import TORCH_DTYPES, KVArena
from tandem.engine.attention.interface import AttentionBackend
from tandem.engine.attention.reference import AttentionParams
from tandem.engine.fuse.trial import (
    NUM_PAGES,
    NUM_ROW_SCALES,
    PAGE_SIZE,
    SEQUENCES,
    AttentionTrial,
    attempted,
    in_type,
    proved,
    random,
    same_rows,
    scale_rows,
)
from tandem.engine.layout import KVLayout
from tandem.engine.paged_model import Decoder, PagedModel
from tandem.engine.quantized.stored_linear import StoredLinear

#: Layers that compute `x @ weight.T + bias` and nothing else; subclasses may do more.
LINEAR = (nn.Linear, StoredLinear)

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_HEAD_NORMS = ("q_norm", "k_norm")
_MLP_PARTS = ("gate_proj", "up_proj", "down_proj")
_DECODER_PARTS = {"embed_tokens", "layers", "norm", "rotary_emb"}
# Beyond the contexts of all models.
_GREAT_POSITION = 1 << 24


class Kit(Protocol):
    """Makes the replacements for models of one type on one device, as modules that are called like the originals."""

    dtype: torch.dtype
    device: torch.device
    #: The children of a layer that `layer` takes, in the order in which they compute.
    layer_parts: Mapping[str, type[nn.Module]]
    #: With which layers are tried.
    attention_backend: AttentionBackend

    def takes_rows(self, num_features: int) -> bool:
        """Whether `norm` can be of rows of so many features."""
        ...

    def takes_heads(self, head_dim: int, rotary_dim: int) -> bool:
        """Whether `attention` can be of such heads."""
        ...

    def norm(self, scale: torch.Tensor, eps: float) -> Any:
        """An RMSNorm; it has a `width` and an `eps`."""
        ...

    def gated_mlp(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> Any:
        """An MLP with SiLU; it has `in_features` and `down`."""
        ...

    def attention(
        self, original: Any, params: AttentionParams, head_dim: int, rotary_dim: int, norms: tuple[Any, ...]
    ) -> Any:
        """A rotary attention; it has `qkv`, `o_proj`, `layer_idx` and `rotary_dim`. `norms` are none or two."""
        ...

    def layer(self, attention_norm: Any, attention: Any, mlp_norm: Any, mlp: Any) -> Any:
        """A decoder layer of these parts, which it takes over."""
        ...

    def settle(self, part: nn.Module, original: nn.Module) -> None:
        """Called with each attention and MLP that was proved, before the next original is looked at."""
        ...


def fuse_parts(model: PreTrainedModel, layout: KVLayout, kit: Kit) -> str:
    """Replace all parts that can be replaced; return for people how many of each kind."""
    rotary_dim = _rotary_dim(model)
    attempts: tuple[tuple[str, Callable[[nn.Module], nn.Module | None]], ...] = (
        ("attention", lambda module: _settled(fuse_attention(module, layout, rotary_dim, kit), module, kit)),
        ("mlp", lambda module: _settled(fuse_gated_mlp(module, kit), module, kit)),
        ("norm", lambda module: fuse_rms_norm(module, kit)),
    )
    counts = {kind: replace_modules(model, _Attempt(attempt)) for kind, attempt in attempts}
    counts["layer"] = replace_modules(model, lambda module: fuse_decoder_layer(module, layout, kit))
    return ", ".join(f"{count} {kind}" for kind, count in counts.items() if count) or "none"


def _settled(part: Any, original: nn.Module, kit: Kit) -> Any:
    if part is not None:
        kit.settle(part, original)
    return part


def replace_modules(model: nn.Module, attempt: Callable[[nn.Module], nn.Module | None]) -> int:
    """Replace each part of `model` for which `attempt` returns a module, parents first; return how many.

    Each original is dropped before the next one is tried, so at most one of them is in memory more than once.
    """
    done: list[str] = []
    for name in [name for name, _ in model.named_modules() if name]:
        if done and name.startswith(f"{done[-1]}."):
            continue  # it went with its parent
        replacement = attempt(model.get_submodule(name))
        if replacement is not None:
            model.set_submodule(name, replacement)
            done.append(name)
    return len(done)


class _Attempt:
    """Calls `attempt`, but not for modules like one that was refused: each trial copies the weights.

    Where the first module of a kind was replaced, each further one is tried by itself: layers of one class may differ.
    """

    def __init__(self, attempt: Callable[[nn.Module], nn.Module | None]) -> None:
        self._attempt = attempt
        self._first_was_fused: dict[tuple[type, tuple[torch.Size, ...]], bool] = {}

    def __call__(self, module: nn.Module) -> nn.Module | None:
        kind = type(module), tuple(parameter.shape for parameter in module.parameters())
        if not self._first_was_fused.get(kind, True):
            return None
        fused = self._attempt(module)
        self._first_was_fused.setdefault(kind, fused is not None)
        return fused


def fuse_rms_norm(module: nn.Module, kit: Kit) -> Any:
    """The replacement of an RMSNorm, whatever its class; `None` for anything else."""
    if list(module.state_dict()) != ["weight"]:
        return None
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, torch.Tensor) or not isinstance(eps, float):
        return None
    if weight.dim() != 1 or not kit.takes_rows(len(weight)) or not _takes_rows_alone(module):
        return None
    rows = scale_rows(random(NUM_ROW_SCALES, len(weight)).add(0.5)).to(kit.device, kit.dtype)

    def call(part: nn.Module, dtype: torch.dtype) -> list[torch.Tensor]:
        return [part(rows.to(dtype))]

    # Some classes store the difference to one.
    return proved(module, lambda part: kit.norm(part.weight.float(), eps), call, kit.dtype) or proved(
        module, lambda part: kit.norm(1.0 + part.weight.float(), eps), call, kit.dtype
    )


def fuse_gated_mlp(module: nn.Module, kit: Kit) -> Any:
    """The replacement of a gated MLP with SiLU; `None` for anything else."""
    parts = _linear_children(module, _MLP_PARTS)
    if parts is None or set(dict(module.named_children())) - {*_MLP_PARTS, "act_fn"} or not _takes_rows_alone(module):
        return None
    gate, up, _ = parts
    if (gate.in_features, gate.out_features, gate.bias is None) != (up.in_features, up.out_features, up.bias is None):
        return None
    if not _may_have_silu(module, kit):
        return None
    rows = scale_rows(random(1, NUM_ROW_SCALES, gate.in_features)).to(kit.device, kit.dtype)
    return proved(
        module,
        lambda part: kit.gated_mlp(*(getattr(part, name) for name in _MLP_PARTS)),
        lambda part, dtype: [part(rows.to(dtype))],
        kit.dtype,
    )


def _may_have_silu(module: nn.Module, kit: Kit) -> bool:
    """Whether the activation may be SiLU. This saves a trial of the whole; without an `act_fn` only the trial tells."""
    activation = getattr(module, "act_fn", None)
    if activation is None:
        return True
    rows = scale_rows(random(NUM_ROW_SCALES, 8)).to(kit.device)

    def is_silu() -> bool:
        with torch.inference_mode():
            return same_rows(nn.functional.silu(rows), activation(rows))

    return attempted(module, is_silu) is True


def fuse_attention(module: nn.Module, layout: KVLayout, rotary_dim: int | None, kit: Kit) -> Any:
    """The replacement of an attention with rotary embedding, and maybe norms of heads; `None` for anything else.

    One call of the original shows what it asks of the attention function (scale, window, soft cap).
    """
    parts = _linear_children(module, _PROJECTIONS)
    head_dim = layout.head_dim
    if parts is None or rotary_dim is None or rotary_dim > head_dim or not kit.takes_heads(head_dim, rotary_dim):
        return None
    others = {name: child for name, child in module.named_children() if name not in _PROJECTIONS}
    if set(others) - set(_HEAD_NORMS) or "position_embeddings" not in inspect.signature(module.forward).parameters:
        return None
    query, key, value, _ = parts
    if len({projection.bias is None for projection in (query, key, value)}) != 1 or query.out_features % head_dim:
        return None
    if {key.out_features, value.out_features} != {layout.num_kv_heads * head_dim}:
        return None
    norms = _head_norms(others, head_dim, kit)
    if norms is None:
        return None
    trial = AttentionTrial.make(layout, query.in_features, rotary_dim, kit.device)

    def params_asked() -> AttentionParams:
        with torch.inference_mode():
            return trial.run(in_type(module, kit.dtype), kit.dtype).params

    params = attempted(module, params_asked)
    if params is None:
        return None
    return proved(
        module,
        lambda part: kit.attention(part, params, head_dim, rotary_dim, norms),
        lambda part, dtype: trial.run(part, dtype).parts,
        kit.dtype,
    )


def _head_norms(children: dict[str, nn.Module], head_dim: int, kit: Kit) -> tuple[Any, ...] | None:
    """Replacements of the norms of query and key heads; empty if there are no norms, `None` if they are unknown."""
    if not children:
        return ()
    query, key = (fuse_rms_norm(children[name], kit) if name in children else None for name in _HEAD_NORMS)
    if query is None or key is None or query.eps != key.eps or not query.width == key.width == head_dim:
        return None
    return query, key


def fuse_decoder_layer(module: nn.Module, layout: KVLayout, kit: Kit) -> Any:
    """The replacement of a layer of fused parts: norm, attention, sum, norm, MLP, sum; `None` for anything else.

    It takes over the parts. A layer that is not replaced keeps them.
    """
    if {name: type(child) for name, child in module.named_children()} != kit.layer_parts:
        return None
    attention_norm, attention, mlp_norm, mlp = _parts_of(module, kit)
    widths = attention_norm.width, attention.qkv.in_features, attention.o_proj.out_features
    if len({*widths, mlp_norm.width, mlp.in_features, mlp.down.out_features}) != 1:
        return None
    trial = AttentionTrial.make(layout, attention_norm.width, attention.rotary_dim, kit.device)
    return proved(
        module,
        lambda part: kit.layer(*_parts_of(part, kit)),
        lambda part, dtype: trial.run_layer(part, attention.layer_idx, kit.attention_backend, dtype),
        kit.dtype,
    )


def _parts_of(layer: nn.Module, kit: Kit) -> list[Any]:
    children = dict(layer.named_children())
    return [children[name] for name in kit.layer_parts]


@dataclass(frozen=True, slots=True)
class DecoderParts:
    """What a decoder is made of, and nothing else."""

    embedding: nn.Embedding
    rotary: nn.Module  # a position's numbers depend on nothing else
    layers: list[Any]
    norm: Any
    head: Any


def decoder_parts(
    model: PreTrainedModel, embeddings: tuple[type, ...], layer: type, norm: type, head: type
) -> DecoderParts | None:
    """The parts of a model whose embedding, layers, last norm and head are of these types; `None` for anything else.

    The caller must still show that the model computes these parts one after the other, and nothing else.
    """
    base = model.base_model
    children, outer = dict(base.named_children()), dict(model.named_children())
    layers = children.get("layers")
    if set(children) != _DECODER_PARTS or set(outer) != {model.base_model_prefix, "lm_head"}:
        return None
    if not isinstance(layers, nn.ModuleList) or {type(part) for part in layers} != {layer}:
        return None
    embedding, rotary = children["embed_tokens"], children["rotary_emb"]
    if type(embedding) not in embeddings or getattr(embedding, "max_norm", None) is not None:
        return None
    if type(children["norm"]) is not norm or type(outer["lm_head"]) is not head:
        return None
    if not attempted(rotary, lambda: _takes_positions_alone(rotary, model.device)):
        return None
    return DecoderParts(embedding, rotary, list(layers), children["norm"], outer["lm_head"])


def _takes_positions_alone(rotary: nn.Module, device: torch.device) -> bool:
    """Whether a position's embedding does not depend on the other positions; with some kinds of RoPE it does."""
    x, near = torch.empty(1, 1, 1, dtype=torch.float32, device=device), torch.arange(PAGE_SIZE, device=device)[None]
    great = torch.tensor([[_GREAT_POSITION]], device=device)
    positions = near, torch.cat([near, great], dim=1), near
    with torch.inference_mode():
        cosines = [rotary(x, those)[0][:, :PAGE_SIZE] for those in positions]
    return all(torch.equal(cosines[0], others) for others in cosines)


def logits_of(
    model: PreTrainedModel, layout: KVLayout, backend: AttentionBackend, decoder: Decoder | None
) -> torch.Tensor | None:
    """Logits of some random tokens, by the model itself or by `decoder`; `None` if it raises."""

    def compute() -> torch.Tensor:
        arena = KVArena(replace(layout, page_size=PAGE_SIZE), NUM_PAGES, model.device)
        for layer in range(layout.num_layers):
            arena.fill(layer, random(NUM_PAGES, 2, PAGE_SIZE, layout.num_kv_heads, layout.head_dim))
        vocab_size, context = model.get_input_embeddings().weight.shape[0], PAGE_SIZE * NUM_PAGES
        tokens = torch.randint(vocab_size, (context,), generator=torch.Generator().manual_seed(1)).tolist()
        step = [
            replace(sequence, token_ids=tokens[sequence.start : sequence.end], num_logits=num_logits)
            for sequence, num_logits in zip(SEQUENCES, (3, 1), strict=True)
        ]
        return PagedModel(model, arena, backend, vocab_size, context, decoder=decoder).forward(step)

    return attempted(model, compute)


def has_type_of(model: PreTrainedModel, layout: KVLayout) -> bool:
    """Whether K and V have the model's type: the fused parts write them as they are."""
    return TORCH_DTYPES[layout.dtype] is model.dtype


def _rotary_dim(model: PreTrainedModel) -> int | None:
    """How many numbers of a head the model's rotary embeddings turn; `None` if there are none, or they differ."""
    found = [module for module in model.modules() if isinstance(getattr(module, "inv_freq", None), torch.Tensor)]
    dims = {2 * len(module.inv_freq) for module in found}
    if len(dims) != 1:
        return None
    x, positions = torch.empty(1, 1, 1, device=model.device), torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    for module in found:
        width = attempted(module, functools.partial(_width_of, module, x, positions))
        if width is not None and {width} != dims:  # each number once, for both of a pair
            return None
    return dims.pop()


def _width_of(rotary: nn.Module, x: torch.Tensor, positions: torch.Tensor) -> int:
    return int(rotary(x, positions)[0].shape[-1])


def _linear_children(module: nn.Module, names: tuple[str, ...]) -> list[nn.Linear] | None:
    children = dict(module.named_children())
    found = [children.get(name) for name in names]
    kinds = {type(child) for child in found}
    # Products that come quantised and such that do not are not put together, nor rounded alike.
    return found if len(kinds) == 1 and kinds <= set(LINEAR) else None  # type: ignore[return-value]


def _takes_rows_alone(module: nn.Module) -> bool:
    """Whether `forward` has one parameter only. By another one a model may ask for more than the trial does."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    return len(parameters) == 1 and parameters[0].kind not in (parameters[0].VAR_POSITIONAL, parameters[0].VAR_KEYWORD)
