"""The probe lets pass what serves rightly, and names what does not."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

import engine_helpers as helpers
import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig

from tandem.core.errors import UnsupportedModelError
from tandem.engine import paged_model
from tandem.engine.cpu.attention import CPUAttention
from tandem.engine.cpu.kernels import CPUKernels
from tandem.engine.engine import Engine
from tandem.engine.fuse import small_model
from tandem.engine.fuse.small_config import VOCAB_SIZE, shrink_config
from tandem.engine.probe import probe_architecture
from tandem.engine.random_model import ModelSpec, make_config, save
from tandem.engine.text_part import COMPOSITES


def config_of(model_type: str, **options: object) -> PreTrainedConfig:
    return AutoConfig.for_model(model_type, **options)


def rope(kind: str, **options: object) -> dict[str, object]:
    return {"rope_type": kind, "rope_theta": 10_000.0, **options}


LONGROPE = {
    "max_position_embeddings": 131_072,
    "original_max_position_embeddings": 4096,
    "rope_parameters": rope(
        "longrope", short_factor=[1.0] * 48, long_factor=[4.0] * 48, original_max_position_embeddings=4096,
        short_mscale=1.1, long_mscale=1.2,
    ),
}  # fmt: skip

DECODERS = (
    "qwen3", "mistral", "ministral3", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_bigcode", "phi", "gpt_neox", "opt",
    "olmo2", "olmo3", "granite", "glm", "glm4", "smollm3", "cohere", "cohere2", "ernie4_5", "exaone4", "seed_oss",
    "starcoder2", "stablelm", "arcee", "apertus", "helium", "bitnet",
)  # fmt: skip
MIXTURES = (
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "flex_olmo", "phimoe", "granitemoe", "granitemoe_swa", "glm4_moe",
    "ernie4_5_moe", "minimax_m2", "gpt_oss",
)  # fmt: skip

SERVED = {
    "llama": config_of("llama"),
    "llama with a scaled RoPE": config_of(
        "llama",
        max_position_embeddings=131_072,
        rope_parameters=rope(
            "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
        ),
    ),
    "llama with linear RoPE": config_of("llama", rope_parameters=rope("linear", factor=4.0)),
    "llama with dynamic RoPE": config_of("llama", rope_parameters=rope("dynamic", factor=2.0)),
    "olmo": config_of("olmo", clip_qkv=8.0),
    "olmo that clips what is common": config_of("olmo", clip_qkv=0.5),
    "qwen2": config_of("qwen2"),
    "qwen2 with windows": config_of("qwen2", use_sliding_window=True, max_window_layers=20),
    "phi3": config_of("phi3", pad_token_id=0),
    "phi3 with longrope": config_of("phi3", pad_token_id=0, **LONGROPE),
    "experts of some groups": config_of("glm4_moe", n_group=8, topk_group=4),
    "nemotron": config_of("nemotron", num_key_value_heads=8),
    "hunyuan_v1_dense": config_of("hunyuan_v1_dense", head_dim=128),
    "hunyuan_v1_moe": config_of("hunyuan_v1_moe", head_dim=128, num_experts=64, moe_topk=[8] * 32),
    **{name: config_of(name) for name in DECODERS + MIXTURES},
}

REFUSED = {
    "longrope of its own": (config_of("phimoe", **LONGROPE), "phimoe.*'longrope' takes the largest"),
    "a hybrid with convolutions": (
        config_of("lfm2", num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"]),
        "lfm2.*conv layers keep the last inputs of a convolution",
    ),
    "Llama 4": (config_of("llama4_text"), "llama4_text.*chunked attention mask, of 8192 tokens"),
    "bloom": (config_of("bloom"), "bloom.*ALiBi"),
    "mpt": (config_of("mpt"), "mpt.*ALiBi"),
    "falcon with ALiBi": (config_of("falcon", alibi=True), "falcon.*ALiBi"),
    "gptj": (config_of("gptj"), "gptj.*attention does not go through the interface"),
    "deepseek_v2": (config_of("deepseek_v2"), "deepseek_v2.*latent \\(MLA\\)"),
    "deepseek_v3": (config_of("deepseek_v3"), "deepseek_v3.*latent \\(MLA\\)"),
    "qwen3_next": (config_of("qwen3_next"), "qwen3_next.*linear_attention layers keep a matrix"),
    **{
        name: (config_of(name), f"{name}.*state-space model.*no handoff carries")
        for name in ("mamba", "mamba2", "jamba", "bamba", "falcon_h1", "nemotron_h", "zamba2", "granitemoehybrid")
    },
    "recurrent_gemma": (config_of("recurrent_gemma"), "recurrent_gemma.*recurrent state"),
    "composite": (config_of("gemma3"), "gemma3.*several models"),
    "bert": (config_of("bert", is_decoder=False), "bert.*not causal"),
}


@pytest.mark.parametrize("name", SERVED)
def test_probe_passes(name: str) -> None:
    probe_architecture(SERVED[name])


@pytest.mark.parametrize("name", REFUSED)
def test_probe_refuses_by_name(name: str) -> None:
    config, reason = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=reason):
        probe_architecture(config)


def test_the_table_of_architectures_says_what_the_probe_says() -> None:
    text = (helpers.REPOSITORY / "docs" / "checkpoints.md").read_text()
    rows = [
        line.split("|")[1:3] for line in text.split("## Architectures")[1].split("\n## ")[0].splitlines() if "|" in line
    ]
    said: dict[str, set[str]] = {}
    for names, state in rows[2:]:
        said.setdefault(state.strip(), set()).update(re.findall(r"`(\w+)`", names))
    assert said == {
        "served": {config.model_type for config in SERVED.values()},
        "text part": set(COMPOSITES),
        # Others of these two kinds are served.
        "refused": {config.model_type for config, _ in REFUSED.values()} - {"phimoe", "gemma3"},
    }


@pytest.mark.parametrize("arch", helpers.ARCHITECTURES)
def test_probe_passes_the_models_of_the_identity_tests(arch: str) -> None:
    probe_architecture(make_config(ModelSpec(arch=arch, **helpers.ARCHITECTURES[arch])))


def test_probe_is_quick_and_leaves_the_random_numbers_alone() -> None:
    probe_architecture(SERVED["llama"])  # imports and compiles
    state = torch.get_rng_state()
    begin = time.perf_counter()
    probe_architecture(SERVED["llama"])
    assert time.perf_counter() - begin < 5
    assert torch.equal(torch.get_rng_state(), state)


def test_probe_does_not_change_the_config() -> None:
    config = config_of("gemma3_text")
    before = config.to_dict()
    probe_architecture(config)
    assert config.to_dict() == before


def test_load_probes_unless_told_not_to(tmp_path: Path) -> None:
    save(ModelSpec(), tmp_path, config_of("bloom", hidden_size=64, n_layer=1, n_head=4, vocab_size=320))
    with pytest.raises(UnsupportedModelError, match=r"bloom.*ALiBi"):
        Engine.load(tmp_path, num_pages=1, num_threads=1, max_context=64)
    Engine.load(tmp_path, num_pages=1, num_threads=1, max_context=64, probe=False)


@pytest.mark.parametrize("damage", ["zero", "window", "leak"])
def test_probe_sees_damaged_attention(damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Damaged:
        name = "damaged"

        def attend(self, batch, arena, layer, query, params):  # type: ignore[no-untyped-def]
            if damage == "window":
                params = replace(params, window=params.window + 1)
            if damage == "leak":
                batch.block_tables[:] = batch.block_tables[0]
            output = CPUAttention(1).attend(batch, arena, layer, query, params)
            return torch.zeros_like(output) if damage == "zero" else output

    kernels = CPUKernels(1)
    monkeypatch.setattr(kernels, "attention", lambda _: Damaged())
    with pytest.raises(UnsupportedModelError, match="mistral cannot be served: in a paged batch"):
        probe_architecture(SERVED["mistral"], kernels)


def test_probe_refuses_to_be_blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """With weights as small as initial ones, attention decides nothing and a pass would mean nothing."""
    monkeypatch.setattr(small_model, "_WEIGHT_STD", 1e-3)
    with pytest.raises(UnsupportedModelError, match="blind"):
        probe_architecture(SERVED["llama"])


def test_a_model_without_logits_to_keep_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    init = paged_model.PagedModel.__init__

    def without(self, *args, **_):  # type: ignore[no-untyped-def]
        init(self, *args)  # by the model's own forward: a fused decoder selects rows itself
        self._selects_rows = False

    monkeypatch.setattr(paged_model.PagedModel, "__init__", without)
    probe_architecture(SERVED["llama"])


def test_shrinking_keeps_one_layer_of_each_kind() -> None:
    small = shrink_config(SERVED["qwen2 with windows"])
    assert small.num_hidden_layers == 2
    assert list(small.layer_types) == ["full_attention", "sliding_attention"]
    assert small.vocab_size == VOCAB_SIZE
    assert shrink_config(SERVED["llama"]).num_hidden_layers == 2
    lists = config_of("qwen3_moe", num_hidden_layers=6, mlp_only_layers=[4])
    assert shrink_config(lists).mlp_only_layers == [1]


def test_shrinking_keeps_how_heads_share() -> None:
    for heads, kv_heads, expected in ((8, 8, 4), (8, 2, 2), (8, 1, 1)):
        small = shrink_config(config_of("llama", num_attention_heads=heads, num_key_value_heads=kv_heads))
        assert (small.num_attention_heads, small.num_key_value_heads) == (4, expected)
