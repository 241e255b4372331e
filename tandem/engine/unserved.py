"""Architectures that keep another state than pages of K and V, or attend in another way: why they are not served."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

#: By the type of layers: what of their state is not in pages.
_STATES = {
    "linear_attention": "a matrix for each head, or a recurrent state, which each token changes",
    "conv": "the last inputs of a convolution",
    "recurrent": "the state of a recurrence",
}
_STATE_SPACES = ("state_size", "ssm_state_size", "mamba_d_state", "mamba_d_ssm")


def why_unserved(config: PreTrainedConfig) -> str:
    """What is missing for this architecture, in words that end a sentence; empty where nothing is known to be."""
    return _latent(config) or _carries_state(config) or _biased(config) or _chunked(config)


def _latent(config: Any) -> str:
    if not _says(config, "kv_lora_rank"):
        return ""
    return (
        "its attention is latent (MLA): a page would hold one compressed vector and one rotary key for each token, "
        "without heads, and there is no such layout and no kernel for it"
    )


def _carries_state(config: Any) -> str:
    layers = set(getattr(config, "layer_types", None) or ())
    if any(_says(config, name) for name in _STATE_SPACES):
        kept = "layers of a state-space model keep its state, and the last inputs of a convolution"
    elif kinds := sorted(layers & _STATES.keys()):
        kept = "; ".join(f"{kind} layers keep {_STATES[kind]}" for kind in kinds)
    else:
        return ""
    return f"{kept}: of one size for each request, which pages do not hold and no handoff carries yet"


def _biased(config: Any) -> str:
    attention = getattr(config, "attn_config", None)
    if config.model_type != "bloom" and not getattr(config, "alibi", False) and not getattr(attention, "alibi", False):
        return ""
    return "its scores are biased by distance (ALiBi), which does not reach the attention function"


def _chunked(config: Any) -> str:
    size = getattr(config, "attention_chunk_size", None)
    if not size or "chunked_attention" not in (getattr(config, "layer_types", None) or ()):
        return ""
    return f"its chunked attention mask, of {size} tokens, does not reach the attention function"


def _says(config: Any, name: str) -> bool:
    try:
        return bool(getattr(config, name, None))
    except Exception:  # noqa: BLE001 - of `transformers`' own class: it says so of some layers
        return True
