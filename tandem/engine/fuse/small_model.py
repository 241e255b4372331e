"""Small models with random weights, in which a mistake shows."""

from __future__ import annotations

import copy

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tandem.engine.attention.interface import ATTENTION_NAME
from tandem.engine.fuse.small_config import shrink_config

_WEIGHT_STD = 0.25


def draw_twins(config: PreTrainedConfig) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return two models in float32 with the same weights: one with eager attention, one with ours.

    Two and not one, because some models change themselves in a forward (dynamic RoPE).
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        models = [
            AutoModelForCausalLM.from_config(
                copy.deepcopy(config), dtype=torch.float32, attn_implementation=implementation
            ).eval()
            for implementation in ("eager", ATTENTION_NAME)
        ]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in models[0].parameters():
            noise = torch.randn(parameter.shape, generator=generator) * _WEIGHT_STD
            # Norm weights stay near what they are; matrices are drawn wide, so that attention decides the output.
            parameter.copy_(noise if parameter.dim() > 1 else parameter + 0.5 * noise)
    models[1].load_state_dict(models[0].state_dict())
    return models[0], models[1]


def has_sinks(config: PreTrainedConfig) -> bool:
    """Whether layers have attention sinks, by the name that `transformers` gives them."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shrink_config(config))
    return any(name.endswith(".sinks") for name, _ in model.named_parameters())
