"""Models beyond the usual decoder: mixtures of experts, attention sinks, the text part of composites, RoPE that depends
on the length. Each gives what `transformers` gives."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import engine_helpers as helpers
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

from tandem.core.errors import UnsupportedModelError
from tandem.core.model_path import _DEFAULTS, read_facts, text_config
from tandem.engine import loader
from tandem.engine.cpu.experts import PackedExperts, PackedRouter
from tandem.engine.engine import Engine, SequenceInput
from tandem.engine.random_model import ModelSpec, make_model, make_tokenizer, save
from tandem.engine.rope import settle_rope
from tandem.engine.text_part import COMPOSITES, text_part

WINDOW = 24
NUM_NEW = 12
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": WINDOW},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40},
    "ernie4_5_moe": {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 40, "moe_layer_start_index": 0},
}


def prompts_of(*lengths: int) -> list[list[int]]:
    return [helpers.make_prompt(length, seed=index) for index, length in enumerate(lengths)]


class Mixture:
    """A random mixture of experts, and engines on it."""

    def __init__(self, arch: str, directory: Path) -> None:
        config = AutoConfig.for_model(arch, **SIZES, **EXPERTS[arch])
        self.arch, self.directory = arch, save(ModelSpec(seed=3), directory, config)
        self.engine = helpers.load_engine(self.directory)
        self.prompts = prompts_of(1, 17, 90)


@pytest.fixture(scope="module", params=EXPERTS)
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Mixture:
    return Mixture(request.param, tmp_path_factory.mktemp("mixture") / request.param)


@pytest.mark.long
def test_mixtures_match_generate_however_the_work_is_cut(mixture: Mixture) -> None:
    expected = helpers.eager_greedy(mixture.directory, mixture.prompts, NUM_NEW)
    assert all(len(set(continuation.token_ids)) > NUM_NEW // 2 for continuation in expected)
    together = helpers.drive(mixture.engine, mixture.prompts, chunk=50, num_new=NUM_NEW)
    helpers.assert_identical(together, expected)
    threaded = helpers.load_engine(mixture.directory, num_threads=2)
    for prompt, company in zip(mixture.prompts, together, strict=True):
        for engine, chunk in [(mixture.engine, 7), (threaded, 1000)]:
            (alone,) = helpers.drive(engine, [prompt], chunk=chunk, num_new=NUM_NEW)
            assert torch.equal(alone.logits, company.logits), f"chunks of {chunk}"


@pytest.mark.long
def test_experts_stay_in_the_bits_of_their_checkpoint(mixture: Mixture, tmp_path: Path) -> None:
    """And give the same bits as float32 with these weights."""
    model = make_model(ModelSpec(seed=3), AutoConfig.for_model(mixture.arch, **SIZES, **EXPERTS[mixture.arch]))
    for dtype, name in ((torch.float16, "short"), (torch.float32, "wide")):
        model = model.to(dtype)
        model.save_pretrained(tmp_path / name)
    short, wide = (helpers.load_engine(tmp_path / name, dtype="float32") for name in ("short", "wide"))
    layers = [module for module in short._model.modules() if isinstance(module, PackedExperts)]
    assert len(layers) == SIZES["num_hidden_layers"]
    assert {panels.numbers.dtype for layer in layers for panels in layer.panels()} == {torch.float16}
    assert sum(isinstance(module, PackedRouter) for module in short._model.modules()) == len(layers)
    assert f"{len(layers)} experts" in short.fused
    found, expected = (helpers.drive(e, mixture.prompts[1:], chunk=33, num_new=4) for e in (short, wide))
    for got, want in zip(found, expected, strict=True):
        assert torch.equal(got.logits, want.logits)


def test_experts_are_rounded_as_linear_layers_are(mixture: Mixture) -> None:
    engine = helpers.load_engine(mixture.directory, quantize="int8")
    layers = [module for module in engine._model.modules() if isinstance(module, PackedExperts)]
    assert {panels.numbers.dtype for layer in layers for panels in layer.panels()} == {torch.int8}
    (rounded,), (plain,) = (
        helpers.drive(e, mixture.prompts[2:], chunk=1000, num_new=1) for e in (engine, mixture.engine)
    )
    similarity = torch.cosine_similarity(rounded.logits, plain.logits)
    assert 0.95 < float(similarity.min()) < 1 - 1e-7


def test_experts_of_mxfp4_are_the_numbers_that_they_stand_for(tmp_path: Path) -> None:
    config = AutoConfig.for_model("gpt_oss", **SIZES, **EXPERTS["gpt_oss"])
    plain_dir = tmp_path / "plain"
    generator = torch.Generator().manual_seed(5)
    model = make_model(ModelSpec(seed=3, dtype="bfloat16"), config)
    packed = {}
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for name, tensor in model.state_dict().items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            packed[name] = tensor.clone()
            continue
        num, inputs, outputs = tensor.shape
        fours = torch.randint(0, 16, (num, outputs, inputs // 32, 32), generator=generator)
        scales = torch.randint(122, 126, fours.shape[:3], generator=generator)
        packed[f"{name}_blocks"] = (fours[..., ::2] | (fours[..., 1::2] << 4)).to(torch.uint8)
        packed[f"{name}_scales"] = scales.to(torch.uint8)
        numbers = table[fours % 8] * (1 - 2 * (fours // 8)) * torch.exp2(scales - 127.0)[..., None]
        tensor.copy_(numbers.flatten(2).transpose(1, 2))
    model.save_pretrained(plain_dir)
    packed_dir = tmp_path / "packed"
    packed_dir.mkdir()
    said = json.loads((plain_dir / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (packed_dir / "config.json").write_text(json.dumps(said))
    save_file(packed, packed_dir / "model.safetensors", metadata={"format": "pt"})

    plain, unpacked = (helpers.load_engine(each, dtype="float32") for each in (plain_dir, packed_dir))
    assert plain.weights_sha256 == unpacked.weights_sha256
    prompts = prompts_of(40)
    (expected,), (found,) = (helpers.drive(each, prompts, chunk=1000, num_new=3) for each in (plain, unpacked))
    assert torch.equal(found.logits, expected.logits)
    facts, of_plain = (read_facts(str(each), each) for each in (packed_dir, plain_dir))
    assert (facts.num_parameters, facts.num_bytes) == (of_plain.num_parameters, of_plain.num_bytes)
    assert (facts.tensors_dtype, facts.quantization) == ("bfloat16", None)


def test_sinks_count(tmp_path: Path) -> None:
    """Without them the logits of gpt-oss are others: the tests above would see it."""
    config = AutoConfig.for_model("gpt_oss", **SIZES, **EXPERTS["gpt_oss"])
    model = make_model(ModelSpec(seed=3), config)
    prompt = torch.tensor([helpers.make_prompt(40, seed=0)])
    with torch.inference_mode():
        model.set_attn_implementation("eager")
        before = model(input_ids=prompt).logits
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(-torch.inf)
        difference = (model(input_ids=prompt).logits - before)[0, -1].abs().max()
    assert float(difference) > 100 * helpers.LOGIT_TOLERANCE


VISION: dict[str, dict[str, Any]] = {
    "gemma3": {"model_type": "siglip_vision_model"},
    "llava": {"model_type": "clip_vision_model"},
    "mistral3": {"model_type": "pixtral", "head_dim": 16},
    "qwen2_vl": {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
    "qwen2_5_vl": {"depth": 1, "out_hidden_size": 64, "num_heads": 2, "fullatt_block_indexes": [0]},
    "qwen3_vl": {"depth": 1, "out_hidden_size": 64, "num_heads": 2, "deepstack_visual_indexes": [0]},
}
TEXT = {"gemma3": "gemma3_text", "llava": "llama", "mistral3": "mistral"}


def composite_config(kind: str, **options: Any) -> PreTrainedConfig:
    text = SIZES | {"model_type": TEXT.get(kind, f"{kind}_text")}
    if not kind.startswith("qwen2"):
        text["head_dim"] = 16
    if kind == "gemma3":
        text["sliding_window"] = WINDOW
    if kind.startswith("qwen"):
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    small = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32,
        "patch_size": 16,
    }  # fmt: skip
    tokens = {"image_token_id": 3, "image_token_index": 3, "video_token_id": 4, "vision_start_token_id": 5}
    vision = small | VISION[kind]
    return AutoConfig.for_model(kind, text_config=text, vision_config=vision, **tokens, **options)


def randomize(model: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.copy_(noise if parameter.dim() > 1 else parameter + 0.5 * noise)
    return model.eval()


@pytest.mark.long
@pytest.mark.parametrize("kind", COMPOSITES)
def test_the_text_part_of_a_composite_is_what_the_composite_says_of_text(kind: str, tmp_path: Path) -> None:
    is_tied = kind == "gemma3"
    config = composite_config(kind, tie_word_embeddings=is_tied)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="eager")
    randomize(model).save_pretrained(tmp_path)
    make_tokenizer(SIZES["vocab_size"]).save_pretrained(tmp_path)
    engine = Engine.load(tmp_path, page_size=helpers.PAGE_SIZE, num_pages=24, num_threads=1)
    assert not [name for name in engine._model.state_dict() if "vision" in name or "visual" in name]
    first, second = prompts_of(70, 20)
    pages = range(8), range(8, 16)
    engine.forward([SequenceInput(first[:40], 0, pages[0], 0)])
    found = engine.forward([SequenceInput(first[40:], 40, pages[0], 30), SequenceInput(second, 0, pages[1], 20)])
    with torch.inference_mode():
        expected = [model(input_ids=torch.tensor([ids]), use_cache=False).logits[0] for ids in (first, second)]
    assert float((found - torch.cat([expected[0][40:], expected[1]])).abs().max()) <= helpers.LOGIT_TOLERANCE

    facts = read_facts(str(tmp_path), tmp_path)
    own = sum(parameter.numel() for parameter in loaded(tmp_path).parameters())
    assert facts.num_parameters == own
    assert (facts.num_layers, facts.num_kv_heads, facts.head_dim, facts.max_positions) == (2, 2, 16, 512)


def loaded(directory: Path) -> Any:
    return loader.load_model(directory, loader.load_config(directory), "float32", torch.device("cpu"))


def test_composites_of_older_files_are_read(tmp_path: Path) -> None:
    """All of it in one object, and a RoPE of the type `mrope`."""
    fields = SIZES | {
        "model_type": "qwen2_5_vl", "rope_theta": 1e4, "torch_dtype": "bfloat16", "vision_config": VISION["qwen2_5_vl"],
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "tie_word_embeddings": True, "eos_token_id": 7,
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = loader.load_config(tmp_path)
    assert (config.model_type, config.tie_word_embeddings, config.dtype) == ("qwen2", True, torch.bfloat16)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e4}
    assert config.eos_token_id == 7


def test_other_composites_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"mllama is composed of several models; .* gemma3, llava"):
        text_part(AutoConfig.for_model("mllama"))
    config = composite_config("mistral3")
    config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(UnsupportedModelError, match=r"mistral3 .* quantised"):
        text_part(config)


ORIGINAL = 48


def phi3_config() -> PreTrainedConfig:
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0 + 0.1 * n for n in range(8)],
        "long_factor": [2.0 + 0.5 * n for n in range(8)], "original_max_position_embeddings": ORIGINAL,
    }  # fmt: skip
    return AutoConfig.for_model(
        "phi3", **SIZES, rope_parameters=rope, original_max_position_embeddings=ORIGINAL, sliding_window=None
    )


@pytest.fixture(scope="module")
def longrope_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(ModelSpec(seed=1), tmp_path_factory.mktemp("models") / "phi3", phi3_config())


def test_the_context_decides_which_factors_of_longrope_hold(
    longrope_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    short_prompt, long_prompt = prompts_of(20, 70)
    eager = AutoModelForCausalLM.from_pretrained(longrope_dir, dtype=torch.float32, attn_implementation="eager").eval()

    def expected(prompt: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return eager(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]

    caplog.set_level(logging.INFO, logger="tandem")
    within = Engine.load(longrope_dir, page_size=16, num_pages=16, num_threads=1, max_context=ORIGINAL)
    assert "longrope with short factors" in caplog.text
    found = within.forward([SequenceInput(short_prompt, 0, range(4), 20)])
    assert float((found - expected(short_prompt)).abs().max()) <= helpers.LOGIT_TOLERANCE

    beyond = helpers.load_engine(longrope_dir, num_pages=16)
    assert "longrope with long factors, for contexts beyond 48 tokens" in caplog.text
    assert beyond.weights_sha256 != within.weights_sha256  # their pages are not each other's
    # A sequence that begins short has the factors of what it may become, from its first page on.
    beyond.forward([SequenceInput(long_prompt[:30], 0, range(8), 0)])
    both = [SequenceInput(long_prompt[30:], 30, range(8), 40), SequenceInput(short_prompt, 0, range(8, 12), 20)]
    found = beyond.forward(both)
    assert float((found[:40] - expected(long_prompt)[30:]).abs().max()) <= helpers.LOGIT_TOLERANCE
    assert float((found[40:] - expected(short_prompt)).abs().max()) > 100 * helpers.LOGIT_TOLERANCE
    settle_rope(eager, ORIGINAL + 1)
    assert float((found[40:] - expected(short_prompt)).abs().max()) <= helpers.LOGIT_TOLERANCE


def test_yarn_reaches_as_far_as_its_factor_stretches_what_its_publisher_states(tmp_path: Path) -> None:
    """As Qwen's README has its users write it, beside a `max_position_embeddings` that stays as it is."""
    rope = {"type": "yarn", "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    rope["original_max_position_embeddings"] = 32
    config = AutoConfig.for_model("qwen2", **SIZES | {"max_position_embeddings": 32}, rope_parameters=rope)
    directory = save(ModelSpec(seed=1), tmp_path / "qwen2", config)
    assert read_facts("model", directory).max_positions == 128
    engine = helpers.load_engine(directory, num_pages=16)
    assert engine.max_context == 128
    (prompt,) = prompts_of(100)
    eager = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        expected = eager(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]
    found = engine.forward([SequenceInput(prompt, 0, range(7), 100)])
    assert float((found - expected).abs().max()) <= helpers.LOGIT_TOLERANCE


@pytest.mark.long
def test_dynamic_rope_is_the_plain_one_within_the_models_context(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    config = AutoConfig.for_model("llama", **(SIZES | {"max_position_embeddings": 64, "rope_parameters": rope}))
    directory = save(ModelSpec(seed=1), tmp_path, config)
    engine = Engine.load(directory, page_size=16, num_pages=16, num_threads=1)
    prompts = prompts_of(30, 50)
    found = helpers.drive(engine, prompts, chunk=17, num_new=12)
    helpers.assert_identical(found, helpers.eager_greedy(directory, prompts, 12))
    assert engine.max_context == 64
    assert settle_rope(make_model(ModelSpec(), config), 65) == ""  # beyond it would depend on each length


def test_what_composites_leave_out_is_what_their_text_part_has_by_default() -> None:
    for kind, defaults in _DEFAULTS.items():
        config = AutoConfig.for_model(kind)
        assert {name: getattr(config, name) for name in defaults} == defaults
    merged = text_config({"dtype": "bfloat16", "text_config": {"model_type": "gemma3_text", "hidden_size": 2560}})
    assert (merged["hidden_size"], merged["num_attention_heads"], merged["dtype"]) == (2560, 8, "bfloat16")
