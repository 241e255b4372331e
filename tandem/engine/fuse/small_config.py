"""Make a config small enough to probe, without losing what makes the architecture what it is."""

from __future__ import annotations

import copy
import itertools
from typing import Any

from transformers import PreTrainedConfig

from tandem.core.errors import UnsupportedModelError

# All limits lie below the lengths that the probe runs: 75 and 21 tokens.
WINDOW = 12
CHUNK = 16
ROPE_LIMIT = 32
ORIGINAL_ROPE_LIMIT = 24
NO_LIMIT = 128

HIDDEN_SIZE = 64
VOCAB_SIZE = 97
_MIN_LAYERS = 2
_NUM_HEADS = 4

# Widths that only have to be small, and counts that only have to be few.
_WIDTHS = {
    "intermediate_size": 96,
    "intermediate_size_mlp": 96,
    "ffn_dim": 96,
    "ffn_hidden_size": 96,
    "n_inner": 96,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 48,
}
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok")


def shrink_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a small copy of the decoder's config: each kind of layer once, every limit within the probe's reach.

    Raises `UnsupportedModelError` for a config of several models: the small copy would be of one of them only.
    """
    if config.get_text_config(decoder=True) is not config:
        raise UnsupportedModelError("it is composed of several models")
    small = copy.deepcopy(config)
    _keep_each_layer_kind(small)
    head_dim = _shrink_heads(small)
    for name, width in _WIDTHS.items():
        if getattr(small, name, None) is not None:
            setattr(small, name, width)
    for name in _COUNTS:
        value = getattr(small, name, None)
        if isinstance(value, int):
            setattr(small, name, min(value, 2 if name == "num_experts_per_tok" else 4))
    if (most := getattr(small, "moe_topk", None)) is not None:
        small.moe_topk = [min(each, 2) for each in most] if isinstance(most, list) else min(most, 2)
    if getattr(small, "n_group", None) is not None:  # groups of experts: a token has its own from some of them
        takes_all = small.topk_group == small.n_group
        small.n_group = min(2, small.n_group)
        small.topk_group = small.n_group if takes_all else 1
    if getattr(small, "word_embed_proj_dim", None) is not None:
        small.word_embed_proj_dim = HIDDEN_SIZE
    small.vocab_size = VOCAB_SIZE
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(small, name, None)
    _shrink_limits(small, head_dim)
    return small


def _keep_each_layer_kind(small: PreTrainedConfig) -> None:
    """Keep the first layer of each kind, in order; a kind is what all lists of the config say of a layer."""
    num_layers = int(small.num_hidden_layers)
    index_lists = {name: value for name, value in vars(small).items() if _lists_layers(name, value, num_layers)}
    value_lists = {
        name: value
        for name, value in vars(small).items()
        if isinstance(value, list | tuple) and len(value) == num_layers and name not in index_lists
    }
    kinds: dict[str, int] = {}
    for layer in range(num_layers):
        says = [value[layer] for value in value_lists.values()] + [layer in value for value in index_lists.values()]
        kinds.setdefault(repr(says), layer)
    kept = sorted(kinds.values())
    # A second layer, where all are alike, shows that each layer finds its own KV.
    kept += [layer for layer in range(num_layers) if layer not in kept][: max(0, _MIN_LAYERS - len(kept))]
    kept.sort()
    small.num_hidden_layers = len(kept)
    for name, value in value_lists.items():
        setattr(small, name, type(value)(value[layer] for layer in kept))
    for name, value in index_lists.items():
        setattr(small, name, type(value)(index for index, layer in enumerate(kept) if layer in value))
    if getattr(small, "first_k_dense_replace", None):
        small.first_k_dense_replace = 1


def _lists_layers(name: str, value: Any, num_layers: int) -> bool:
    """Whether `value` lists indices of layers (`mlp_only_layers`), and not one value for each (`layer_types`)."""
    if not isinstance(value, list | tuple) or not ("layer" in name or "idx" in name):
        return False
    if not all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item < num_layers for item in value):
        return False
    return all(one < other for one, other in itertools.pairwise(value))


def _shrink_heads(small: PreTrainedConfig) -> int:
    """Set heads and widths; keep whether heads share KV and whether heads fill the hidden size. Return head_dim."""
    num_heads = int(small.num_attention_heads)
    num_kv_heads = getattr(small, "num_key_value_heads", None) or num_heads
    own_head_dim = getattr(small, "head_dim", None)
    fills = own_head_dim is None or own_head_dim * num_heads == small.hidden_size
    head_dim = HIDDEN_SIZE // _NUM_HEADS * (1 if fills else 2)
    small.hidden_size = HIDDEN_SIZE
    small.num_attention_heads = _NUM_HEADS
    if getattr(small, "num_key_value_heads", None) is not None:
        shared = 1 if num_kv_heads == 1 else _NUM_HEADS // 2
        small.num_key_value_heads = _NUM_HEADS if num_kv_heads == num_heads else shared
    if own_head_dim is not None:
        small.head_dim = head_dim
    if getattr(small, "query_pre_attn_scalar", None) is not None:
        small.query_pre_attn_scalar = head_dim
    return head_dim


def _shrink_limits(small: PreTrainedConfig, head_dim: int) -> None:
    parameters = getattr(small, "rope_parameters", None)
    scaled = _shrink_rope(parameters, head_dim) if isinstance(parameters, dict) else False
    # Where positions are a table, or RoPE has no limit, the limit must be out of reach.
    if getattr(small, "max_position_embeddings", None) is not None:
        small.max_position_embeddings = ROPE_LIMIT if scaled else NO_LIMIT
    if getattr(small, "original_max_position_embeddings", None) is not None:
        small.original_max_position_embeddings = ORIGINAL_ROPE_LIMIT
    if getattr(small, "sliding_window", None) is not None:
        small.sliding_window = WINDOW
    if getattr(small, "attention_chunk_size", None) is not None:
        small.attention_chunk_size = CHUNK


def _shrink_rope(parameters: dict[str, Any], head_dim: int) -> bool:
    """Shrink the limits of `rope_parameters` in place; return whether any RoPE in it is scaled."""
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    if nested and "rope_type" not in parameters:
        return bool(sum(_shrink_rope(value, head_dim) for value in nested))  # no short cut: all are shrunk
    if parameters.get("original_max_position_embeddings") is not None:
        parameters["original_max_position_embeddings"] = ORIGINAL_ROPE_LIMIT
    num_frequencies = int(head_dim * parameters.get("partial_rotary_factor", 1.0)) // 2
    for name in ("short_factor", "long_factor"):
        if parameters.get(name) is not None:
            values = list(parameters[name])
            parameters[name] = (values * num_frequencies)[:num_frequencies]
    # Within the limit dynamic RoPE is the plain one, and it is not served beyond.
    return str(parameters.get("rope_type", "default")) not in ("default", "dynamic")
