"""What `tandem plan` counts of a model is what the model has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tandem.plan.shapes import find_shape

# Those that docs/checkpoints.md says are served; of each the sizes that `transformers` has by default.
SERVED = (
    "llama", "mistral", "ministral3", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "gpt2",
    "gpt_bigcode", "gpt_neox", "opt", "olmo", "olmo2", "olmo3", "granite", "glm", "glm4", "smollm3", "cohere",
    "cohere2", "ernie4_5", "exaone4", "seed_oss", "starcoder2", "stablelm", "nemotron", "arcee", "apertus", "helium",
    "bitnet", "hunyuan_v1_dense", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "flex_olmo", "phimoe", "granitemoe",
    "glm4_moe", "ernie4_5_moe", "minimax_m2", "granitemoe_swa", "gpt_oss",
    "hunyuan_v1_moe",
)  # fmt: skip
# What these types do not have by default.
_OWN = {
    "nemotron": {"num_key_value_heads": 8},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 64, "moe_topk": [8] * 32},
}
# Published configs name their sizes, and leave out much of what is as their type has it.
_SIZES = (
    "hidden_size", "n_embd", "num_hidden_layers", "n_layer", "num_attention_heads", "n_head", "num_key_value_heads",
    "head_dim", "intermediate_size", "n_inner", "ffn_dim", "moe_intermediate_size", "vocab_size", "num_local_experts",
    "num_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok", "moe_k", "moe_topk",
    "word_embed_proj_dim",
    "shared_expert_intermediate_size", "n_shared_experts", "moe_num_shared_experts", "first_k_dense_replace",
    "moe_layer_start_index", "multi_query",
)  # fmt: skip


@pytest.mark.parametrize("kind", SERVED)
def test_parameters_of_each_type_that_is_served_are_counted(kind: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(kind, **_OWN.get(kind, {}))
    all_of_it = config.to_dict()
    published = {name: all_of_it[name] for name in _SIZES if all_of_it.get(name) is not None}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **published}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    num = sum(parameter.numel() for parameter in model.parameters())
    assert find_shape(str(tmp_path)).num_parameters == pytest.approx(num, rel=0.02)
