"""RoPE whose frequencies depend on the longest position of a batch, settled once for all requests.

`transformers` chooses frequencies anew in each forward, by the greatest position in it. In a batch of many requests
that would be another's position, and pages that are written already would not change with it.

- `longrope` has two sets: the short factors for sequences within the length that the model was trained for first, the
  long ones beyond. The engine's greatest context decides which of them holds for all requests, as in vLLM.
- `dynamic` is the plain RoPE within the model's own greatest context, and the engine goes no further.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

#: Of a rotary embedding that is settled: nothing is updated any more.
_SETTLED = "default"


def settle_rope(model: PreTrainedModel, context: int) -> str:
    """Fix the frequencies of a model for sequences of up to `context` tokens; return in words what was chosen, if
    anything.

    The config says it from then on too, so that workers that chose otherwise do not share pages.
    """
    chosen = {_settle(module, context) for module in model.modules()} - {""}
    if not chosen:
        return ""
    said = ", ".join(sorted(chosen))
    model.config.settled_rope = said
    return said


def _settle(module: Any, context: int) -> str:
    kind = getattr(module, "rope_type", None)
    if kind not in ("longrope", "dynamic") or not isinstance(getattr(module, "original_inv_freq", None), torch.Tensor):
        return ""
    if kind == "dynamic":
        if context > module.config.max_position_embeddings:
            return ""  # it would depend on each sequence's length
        _fix(module, module.original_inv_freq)
        return "dynamic RoPE as the plain one"
    original = int(module.config.rope_parameters["original_max_position_embeddings"])
    if context <= original:
        _fix(module, module.original_inv_freq)
        return f"longrope with short factors, for contexts of up to {original} tokens"
    frequencies, _ = ROPE_INIT_FUNCTIONS[kind](module.config, module.inv_freq.device, seq_len=original + 1)
    _fix(module, frequencies)
    return f"longrope with long factors, for contexts beyond {original} tokens"


def _fix(module: Any, frequencies: torch.Tensor) -> None:
    module.inv_freq = nn.Buffer(frequencies.clone(), persistent=False)
    module.rope_type = _SETTLED
