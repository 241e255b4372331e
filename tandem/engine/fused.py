"""Where parts of a float32 model on the CPU are replaced by `fused_modules`, and whole layers by `fused_layer`.

A part is found by its structure, and replaced only if its replacement gives on random input what it gives itself, up
to rounding. All else stays as it is.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from tandem.engine.arena import KVArena
from tandem.engine.attention import AttentionBackend, ForwardContext, current_forward
from tandem.engine.attention_cpu import CPUAttention
from tandem.engine.attention_reference import AttentionParams
from tandem.engine.batch import PagedBatch, SequenceInput, build_batch
from tandem.engine.fused_decoder import FusedDecoder
from tandem.engine.fused_kernel import LANES
from tandem.engine.fused_layer import FusedDecoderLayer, Workspace
from tandem.engine.fused_modules import FusedAttention, FusedGatedMLP, FusedRMSNorm
from tandem.engine.layout import KVLayout
from tandem.engine.packed_linear import PackedLinear, can_pack, replace_modules
from tandem.engine.paged_model import PagedModel

_Output = TypeVar("_Output")

_log = logging.getLogger(__name__)

#: Greatest difference to the original, as a share of the greatest number of the same row.
_TOLERANCE = 1e-4
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_HEAD_NORMS = ("q_norm", "k_norm")
_MLP_PARTS = ("gate_proj", "up_proj", "down_proj")
_DECODER_PARTS = {"embed_tokens", "layers", "norm", "rotary_emb"}
# In the order in which they compute.
_LAYER_PARTS: dict[str, type[nn.Module]] = {
    "input_layernorm": FusedRMSNorm,
    "self_attn": FusedAttention,
    "post_attention_layernorm": FusedRMSNorm,
    "mlp": FusedGatedMLP,
}
# Small rows show an epsilon, great ones an activation, the greatest a clamp.
_ROW_SCALES = (1e-3, 0.1, 1.0, 10.0, 1e3)
# Two requests in the midst of their contexts, their pages out of order.
_SEQUENCES = (SequenceInput([0] * 5, 2, (3, 0)), SequenceInput([0], 6, (2, 1)))
_PAGE_SIZE, _NUM_PAGES = 4, 4
# Beyond the contexts of all models.
_GREAT_POSITION = 1 << 24


def fuse(model: PreTrainedModel, layout: KVLayout, num_threads: int) -> str:
    """Replace what can be replaced; say how many parts of which kind that were, for people."""
    if not can_pack(model) or layout.dtype != "float32":  # K and V are written by address
        return "none"
    rotary_dim, workspace = _rotary_dim(model), Workspace()
    attempts: tuple[tuple[str, Callable[[nn.Module], nn.Module | None]], ...] = (
        ("attention", lambda module: fuse_attention(module, layout, rotary_dim, num_threads)),
        ("mlp", lambda module: fuse_gated_mlp(module, num_threads)),
        ("norm", lambda module: fuse_rms_norm(module, num_threads)),
    )
    counts = {kind: replace_modules(model, _Attempt(attempt)) for kind, attempt in attempts}
    counts["layer"] = replace_modules(model, lambda module: fuse_decoder_layer(module, layout, workspace, num_threads))
    return ", ".join(f"{count} {kind}" for kind, count in counts.items() if count) or "none"


class _Attempt:
    """`attempt`, but not of modules like one that was refused: a trial packs their weights, and does so for nothing.

    Where the first of them was fused, each is tried by itself: layers of one class may differ.
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


def fuse_rms_norm(module: nn.Module, num_threads: int) -> FusedRMSNorm | None:
    """The replacement of an RMSNorm, whatever its class; `None` for anything else."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if list(module.state_dict()) != ["weight"] or not isinstance(weight, torch.Tensor) or not isinstance(eps, float):
        return None
    if weight.dim() != 1 or len(weight) % LANES or not _takes_rows_alone(module):
        return None
    rows = _scale_rows(_random(len(_ROW_SCALES), len(weight)).add(0.5))
    for scale in (weight, 1.0 + weight):  # some classes store the difference to one
        fused = FusedRMSNorm(scale, eps, num_threads)
        if _agree(module, lambda part: [part(rows)], fused):
            return fused
    return None


def fuse_gated_mlp(module: nn.Module, num_threads: int) -> FusedGatedMLP | None:
    """The replacement of a gated MLP with SiLU; `None` for anything else."""
    parts = _linear_children(module, _MLP_PARTS)
    if parts is None or set(dict(module.named_children())) - {*_MLP_PARTS, "act_fn"} or not _takes_rows_alone(module):
        return None
    gate, up, down = parts
    if gate.weight.shape != up.weight.shape or (gate.bias is None) != (up.bias is None) or not _may_have_silu(module):
        return None
    rows = _scale_rows(_random(1, len(_ROW_SCALES), gate.in_features))
    fused = FusedGatedMLP(gate, up, down, num_threads)
    return fused if _agree(module, lambda part: [part(rows)], fused) else None


def _may_have_silu(module: nn.Module) -> bool:
    """Whether the activation is SiLU, which is sooner tried than the whole; without an `act_fn` only that tells."""
    activation = getattr(module, "act_fn", None)
    if activation is None:
        return True
    rows = _scale_rows(_random(len(_ROW_SCALES), LANES))
    return _output_of(module, lambda _: _same_rows(nn.functional.silu(rows), activation(rows))) is True


def fuse_attention(
    module: nn.Module, layout: KVLayout, rotary_dim: int | None, num_threads: int
) -> FusedAttention | None:
    """The replacement of an attention with rotary embedding, and maybe norms of heads; `None` for anything else.

    What the original asks of the attention function (scale, window, soft cap) is learnt by calling it.
    """
    parts = _linear_children(module, _PROJECTIONS)
    head_dim = layout.head_dim
    if parts is None or rotary_dim is None or rotary_dim > head_dim or rotary_dim % (2 * LANES) or head_dim % LANES:
        return None
    others = {name: child for name, child in module.named_children() if name not in _PROJECTIONS}
    if set(others) - set(_HEAD_NORMS) or "position_embeddings" not in inspect.signature(module.forward).parameters:
        return None
    query, key, value, _ = parts
    if len({projection.bias is None for projection in (query, key, value)}) != 1 or query.out_features % head_dim:
        return None
    if {key.out_features, value.out_features} != {layout.num_kv_heads * head_dim}:
        return None
    norms = _head_norms(others, head_dim, num_threads)
    if norms is None:
        return None
    trial = _Trial.make(layout, query.in_features, rotary_dim)
    seen = _output_of(module, trial.run)
    if seen is None:
        return None
    fused = FusedAttention(module, seen.params, head_dim, rotary_dim, norms, num_threads)
    return fused if _agree(module, lambda part: trial.run(part).parts, fused) else None


def fuse_decoder_layer(
    module: nn.Module, layout: KVLayout, workspace: Workspace, num_threads: int
) -> FusedDecoderLayer | None:
    """The replacement of a layer of fused parts: norm, attention, sum, norm, MLP, sum; `None` for anything else.

    It takes the parts over: a layer that is not replaced still has them.
    """
    children = dict(module.named_children())
    if {name: type(child) for name, child in children.items()} != _LAYER_PARTS:
        return None
    parts: Any = [children[name] for name in _LAYER_PARTS]
    attention_norm, attention, mlp_norm, mlp = parts
    widths = attention_norm.width, attention.qkv.in_features, attention.o_proj.out_features
    if len({*widths, mlp_norm.width, mlp.in_features, mlp.down.out_features}) != 1:
        return None
    trial = _Trial.make(layout, attention_norm.width, attention.rotary_dim)
    fused = FusedDecoderLayer(attention_norm, attention, mlp_norm, mlp, workspace, num_threads)
    backend = CPUAttention(num_threads)
    return fused if _agree(module, lambda part: trial.run_layer(part, attention.layer_idx, backend), fused) else None


def fuse_decoder(model: PreTrainedModel, layout: KVLayout) -> FusedDecoder | None:
    """The model's way from token ids to logits, if all of its parts are fused or packed; `None` for anything else.

    It must give the same bits as the model's own way over the same parts.
    """
    base = model.base_model
    children, outer = dict(base.named_children()), dict(model.named_children())
    layers, head = children.get("layers"), outer.get("lm_head")
    if set(children) != _DECODER_PARTS or set(outer) != {model.base_model_prefix, "lm_head"}:
        return None
    if not isinstance(layers, nn.ModuleList) or {type(layer) for layer in layers} != {FusedDecoderLayer}:
        return None
    embedding, norm, rotary = (children[name] for name in ("embed_tokens", "norm", "rotary_emb"))
    if type(embedding) is not nn.Embedding or embedding.max_norm is not None:
        return None
    if type(norm) is not FusedRMSNorm or type(head) is not PackedLinear:
        return None
    if not _output_of(rotary, _takes_positions_alone):
        return None
    fused = FusedDecoder(embedding.weight, rotary, list(layers), norm, head)  # type: ignore[arg-type]
    expected = _output_of(model, lambda _: _logits_of(model, layout, None))
    found = _output_of(model, lambda _: _logits_of(model, layout, fused))
    return fused if expected is not None and found is not None and torch.equal(expected, found) else None


def _takes_positions_alone(rotary: nn.Module) -> bool:
    """Whether a position's embedding is the same beside a great one: with some kinds of RoPE it is not."""
    x, near = torch.empty(1, 1, 1, dtype=torch.float32), torch.arange(_PAGE_SIZE)[None]
    positions = near, torch.cat([near, torch.tensor([[_GREAT_POSITION]])], dim=1), near
    cosines = [rotary(x, those)[0][:, :_PAGE_SIZE] for those in positions]
    return all(torch.equal(cosines[0], others) for others in cosines)


def _logits_of(model: PreTrainedModel, layout: KVLayout, decoder: FusedDecoder | None) -> torch.Tensor:
    """Of some rows of random tokens, by the model's own way or by `decoder`."""
    arena = KVArena(replace(layout, page_size=_PAGE_SIZE), _NUM_PAGES)
    arena.tensor.copy_(_random(*arena.tensor.shape))
    vocab_size, context = model.get_input_embeddings().weight.shape[0], _PAGE_SIZE * _NUM_PAGES
    tokens = torch.randint(vocab_size, (context,), generator=torch.Generator().manual_seed(1)).tolist()
    step = [
        replace(sequence, token_ids=tokens[sequence.start : sequence.end], num_logits=num_logits)
        for sequence, num_logits in zip(_SEQUENCES, (3, 1), strict=True)
    ]
    return PagedModel(model, arena, CPUAttention(1), vocab_size, context, decoder=decoder).forward(step)


def _head_norms(
    children: dict[str, nn.Module], head_dim: int, num_threads: int
) -> tuple[FusedRMSNorm, FusedRMSNorm] | tuple[()] | None:
    """Replacements of the norms of a query's and a key's head, or nothing if there are none; `None` if unknown."""
    if not children:
        return ()
    pair = [fuse_rms_norm(children[name], num_threads) if name in children else None for name in _HEAD_NORMS]
    query, key = pair
    if query is None or key is None or query.eps != key.eps or not len(query.weight) == len(key.weight) == head_dim:
        return None
    return query, key


@dataclass(frozen=True)
class _Seen:
    """What an attention module did."""

    parts: list[torch.Tensor]  # its layer's pages, the queries, the output; each of some rows
    params: AttentionParams  # what it asked of the attention


@dataclass(frozen=True)
class _Trial:
    """One call of an attention module, or of a layer with one, on random input and over an arena of its own."""

    layout: KVLayout
    batch: PagedBatch
    hidden: torch.Tensor  # [1, T, hidden_size]
    rotary: tuple[torch.Tensor, torch.Tensor]  # cosines and sines, [1, T, rotary_dim]

    @classmethod
    def make(cls, layout: KVLayout, hidden_size: int, rotary_dim: int) -> _Trial:
        small = replace(layout, page_size=_PAGE_SIZE)
        batch = build_batch(_SEQUENCES, _PAGE_SIZE, torch.device("cpu"))
        # No angles: any pair of numbers must be used in the same way.
        cos, sin = _random(2, 1, batch.num_tokens, rotary_dim)
        return cls(small, batch, _scale_rows(_random(1, batch.num_tokens, hidden_size)), (cos, sin))

    def run(self, module: nn.Module) -> _Seen:
        # No slots but those that it writes may be read or changed.
        recorder, untouched = _Recorder(), torch.tensor(float("nan"))
        (output, _), pages = self._call(module, module.layer_idx, recorder, untouched)  # type: ignore[arg-type]
        query, params = recorder.calls[0]
        return _Seen([pages, query, output], params)

    def run_layer(self, layer: nn.Module, index: int, backend: AttentionBackend) -> list[torch.Tensor]:
        """The output of the decoder layer with this index, and its pages."""
        shape = _NUM_PAGES, 2, _PAGE_SIZE, self.layout.num_kv_heads, self.layout.head_dim
        output, pages = self._call(layer, index, backend, _random(*shape))
        if not isinstance(output, torch.Tensor):
            raise TypeError(f"a layer that gives {type(output).__name__}")
        return [output, pages]

    def _call(
        self, module: nn.Module, index: int, backend: AttentionBackend, content: torch.Tensor
    ) -> tuple[Any, torch.Tensor]:
        arena = KVArena(self.layout, _NUM_PAGES)
        # Only its own layer is touched: memory of the others is never taken.
        pages = arena.layer(index)
        pages.copy_(content)
        token = current_forward.set(ForwardContext(self.batch, arena, backend))
        try:
            output = module(
                hidden_states=self.hidden, position_embeddings=self.rotary, attention_mask=None, past_key_values=None
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


def _agree(original: nn.Module, call: Callable[[nn.Module], list[torch.Tensor]], fused: nn.Module) -> bool:
    """Whether both give the same tensors `[..., features]`, row by row."""
    expected, found = _output_of(original, call), _output_of(fused, call)
    if expected is None or found is None:
        return False
    return all(_same_rows(*pair) for pair in zip(expected, found, strict=True))


def _same_rows(expected: torch.Tensor, found: torch.Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    scale = expected.nan_to_num(0.0).abs().amax(dim=-1, keepdim=True)
    return bool((((found - expected).abs() <= _TOLERANCE * scale) | (found.isnan() & expected.isnan())).all())


def _output_of(module: nn.Module, call: Callable[[nn.Module], _Output]) -> _Output | None:
    """What `call` makes of `module`; `None` if it raises, as a class that only looks familiar may."""
    try:
        with torch.inference_mode():
            return call(module)
    except Exception as error:  # noqa: BLE001 - of any class, since the module may be of any class
        _log.info("%s is left as it is: %s: %s", type(module).__name__, type(error).__name__, error)
        return None


def _rotary_dim(model: PreTrainedModel) -> int | None:
    """How many numbers of a head the model's rotary embeddings turn; `None` if there are none, or they differ."""
    dims = {
        2 * len(module.inv_freq)
        for module in model.modules()
        if isinstance(getattr(module, "inv_freq", None), torch.Tensor)
    }
    return dims.pop() if len(dims) == 1 else None


def _linear_children(module: nn.Module, names: tuple[str, ...]) -> list[nn.Linear] | None:
    children = dict(module.named_children())
    found = [children.get(name) for name in names]
    return found if all(type(child) is nn.Linear for child in found) else None  # type: ignore[return-value]


def _takes_rows_alone(module: nn.Module) -> bool:
    """Whether `forward` has one parameter: with another, optional, a model may ask for more than the trial does."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    return len(parameters) == 1 and parameters[0].kind not in (parameters[0].VAR_POSITIONAL, parameters[0].VAR_KEYWORD)


def _scale_rows(rows: torch.Tensor) -> torch.Tensor:
    """`[..., N, features]`, with the scales in turn."""
    scales = [_ROW_SCALES[index % len(_ROW_SCALES)] for index in range(rows.shape[-2])]
    return rows * torch.tensor(scales, dtype=torch.float32)[:, None]


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
