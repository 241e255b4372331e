"""Where parts of a float32 model on the CPU are replaced by `fused_modules`.

A part is found by its structure, and replaced only if its replacement gives on random input what it gives itself, up
to rounding. All else stays as it is.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from tandem.engine.arena import KVArena
from tandem.engine.attention import ForwardContext, current_forward
from tandem.engine.attention_reference import AttentionParams
from tandem.engine.batch import PagedBatch, SequenceInput, build_batch
from tandem.engine.fused_modules import FusedAttention, FusedGatedMLP, FusedRMSNorm
from tandem.engine.layout import KVLayout
from tandem.engine.packed_linear import can_pack
from tandem.engine.vector_ir import LANES

_Output = TypeVar("_Output")

_log = logging.getLogger(__name__)

#: Greatest difference to the original, as a share of the greatest number of the same row.
_TOLERANCE = 1e-4
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_HEAD_NORMS = ("q_norm", "k_norm")
_MLP_PARTS = ("gate_proj", "up_proj", "down_proj")
# Small rows show an epsilon, great ones an activation.
_ROW_SCALES = (1e-3, 0.1, 1.0, 10.0)
# Two requests in the midst of their contexts, their pages out of order.
_SEQUENCES = (SequenceInput([0] * 5, 2, (3, 0)), SequenceInput([0], 6, (2, 1)))
_PAGE_SIZE, _NUM_PAGES = 4, 4


def fuse(model: PreTrainedModel, layout: KVLayout, num_threads: int) -> str:
    """Replace what can be replaced; say how many parts of which kind that were, for people."""
    if not can_pack(model):
        return "none"
    rotary_dim = _rotary_dim(model)
    attempts: tuple[tuple[str, Callable[[nn.Module], nn.Module | None]], ...] = (
        ("attention", lambda module: fuse_attention(module, layout, rotary_dim, num_threads)),
        ("mlp", lambda module: fuse_gated_mlp(module, num_threads)),
        ("norm", lambda module: fuse_rms_norm(module, num_threads)),
    )
    replaced: Counter[str] = Counter()
    for kind, attempt in attempts:
        for name, module in list(model.named_modules()):
            fused = attempt(module)
            if fused is not None:
                model.set_submodule(name, fused)
                replaced[kind] += 1
    return ", ".join(f"{count} {kind}" for kind, count in replaced.items()) or "none"


def fuse_rms_norm(module: nn.Module, num_threads: int) -> FusedRMSNorm | None:
    """The replacement of an RMSNorm, whatever its class; `None` for anything else."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if list(module.state_dict()) != ["weight"] or not isinstance(weight, torch.Tensor) or not isinstance(eps, float):
        return None
    if weight.dim() != 1 or len(weight) % LANES or _required_arguments(module) != 1:
        return None
    rows = _random(len(_ROW_SCALES), len(weight)).add(0.5) * torch.tensor(_ROW_SCALES)[:, None]
    for scale in (weight, 1.0 + weight):  # some classes store the difference to one
        fused = FusedRMSNorm(scale, eps, num_threads)
        if _agree(module, lambda part: part(rows), fused):
            return fused
    return None


def fuse_gated_mlp(module: nn.Module, num_threads: int) -> FusedGatedMLP | None:
    """The replacement of a gated MLP with SiLU; `None` for anything else."""
    parts = _linear_children(module, _MLP_PARTS)
    if (
        parts is None
        or set(dict(module.named_children())) - {*_MLP_PARTS, "act_fn"}
        or _required_arguments(module) != 1
    ):
        return None
    gate, up, down = parts
    if gate.weight.shape != up.weight.shape or (gate.bias is None) != (up.bias is None):
        return None
    rows = _random(1, len(_ROW_SCALES), gate.in_features) * torch.tensor(_ROW_SCALES)[:, None]
    fused = FusedGatedMLP(gate, up, down, num_threads)
    return fused if _agree(module, lambda part: part(rows), fused) else None


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
    fused = FusedAttention(module, seen[1], head_dim, rotary_dim, norms, num_threads)
    return fused if _agree(module, lambda part: trial.run(part)[0], fused) else None


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
class _Trial:
    """One call of an attention module on random input, over an arena of its own."""

    layout: KVLayout
    batch: PagedBatch
    hidden: torch.Tensor  # [1, T, hidden_size]
    rotary: tuple[torch.Tensor, torch.Tensor]  # cosines and sines, [1, T, rotary_dim]

    @classmethod
    def make(cls, layout: KVLayout, hidden_size: int, rotary_dim: int) -> _Trial:
        small = KVLayout(layout.num_layers, layout.num_kv_heads, layout.head_dim, _PAGE_SIZE, "float32")
        batch = build_batch(_SEQUENCES, _PAGE_SIZE, torch.device("cpu"))
        # No angles: any pair of numbers must be used in the same way.
        cos, sin = _random(2, 1, batch.num_tokens, rotary_dim)
        return cls(small, batch, _random(1, batch.num_tokens, hidden_size), (cos, sin))

    def run(self, module: nn.Module) -> tuple[torch.Tensor, AttentionParams]:
        """All that `module` gives (keys, values, queries, output) as rows, and what it asks of the attention."""
        arena = KVArena(self.layout, _NUM_PAGES)
        arena.tensor.fill_(float("nan"))  # slots that nobody may write
        recorder = _Recorder()
        token = current_forward.set(ForwardContext(self.batch, arena, recorder))
        try:
            output, _ = module(
                hidden_states=self.hidden, position_embeddings=self.rotary, attention_mask=None, past_key_values=None
            )
        finally:
            current_forward.reset(token)
        query, params = recorder.calls[0]
        rows = [arena.tensor.flatten(0, -2), query.flatten(0, 1), output[0]]
        width = max(part.shape[-1] for part in rows)
        return torch.cat([nn.functional.pad(part, (0, width - part.shape[-1])) for part in rows]), params


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


def _agree(original: nn.Module, call: Callable[[nn.Module], torch.Tensor], fused: nn.Module) -> bool:
    """Whether both give the same `[..., features]`, row by row."""
    expected, found = _output_of(original, call), _output_of(fused, call)
    if expected is None or found is None:
        return False
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


def _required_arguments(module: nn.Module) -> int:
    parameters = inspect.signature(module.forward).parameters.values()
    return sum(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))
