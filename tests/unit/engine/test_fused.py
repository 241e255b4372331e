"""Fused parts against the modules that they stand for; what is not known to be the same stays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from weakref import ref

import engine_helpers as helpers
import pytest
import torch
from engine_helpers import randomize, small_config
from odd_models import (
    AnotherMLP,
    AnotherOutput,
    ClampedMLP,
    MLPThatMayBeScaled,
    NegatedKeys,
    NormOfAnotherKind,
    NormThatMayBeGated,
    Raises,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM, OlmoConfig, PreTrainedModel
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm
from transformers.models.olmo.modeling_olmo import OlmoAttention, OlmoMLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from tandem.engine import loader
from tandem.engine.arena import KVArena
from tandem.engine.attention.interface import ATTENTION_NAME
from tandem.engine.batch import SequenceInput
from tandem.engine.cpu import fusing as fusing
from tandem.engine.cpu.fusing import CPUKit, fuse
from tandem.engine.cpu.modules import FusedAttention, FusedGatedMLP, FusedRMSNorm
from tandem.engine.cpu.packed_linear import pack
from tandem.engine.fuse.recognise import fuse_attention, fuse_gated_mlp, fuse_rms_norm
from tandem.engine.layout import KVLayout
from tandem.engine.paged_model import PagedModel
from tandem.engine.select_kernels import kernels_for

CPU = torch.device("cpu")
ROWS = (1, 2, 3, 8, 65)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_rows_stand_alone(module: nn.Module, x: torch.Tensor) -> None:
    """A row's bits depend on no other row, and what is not finite stays in its row."""
    together = module(x)
    for index, row in enumerate(x):
        assert torch.equal(module(row[None])[0], together[index]), f"row {index} of {len(x)}"
    for bad in (float("nan"), float("inf"), -float("inf")):
        spoilt = x.clone()
        spoilt[0, 3] = bad
        found = module(spoilt)
        assert not found[0].isfinite().all()
        assert torch.equal(found[1:], together[1:])


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("width", [8, 64, 200])
@pytest.mark.parametrize("make", [LlamaRMSNorm, Qwen3RMSNorm, Gemma2RMSNorm])
def test_norms_are_those_of_torch(make: type[nn.Module], width: int, num_threads: int) -> None:
    norm = randomize(make(width, eps=1e-5))
    fused = fuse_rms_norm(norm, CPUKit(num_threads))
    assert type(fused) is FusedRMSNorm
    with torch.inference_mode():
        for rows in ROWS:
            for scale in (1e-3, 1.0, 1e3):
                x = draw(rows, width, seed=rows) * scale
                torch.testing.assert_close(fused(x), norm(x), rtol=1e-5, atol=1e-6)
        assert_rows_stand_alone(fused, draw(65, width))
        x = draw(width, 2, 3).permute(1, 2, 0)  # neither flat nor contiguous
        torch.testing.assert_close(fused(x), norm(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "module",
    [
        nn.LayerNorm(64),
        nn.LayerNorm(64, bias=False),
        nn.RMSNorm(64),  # its epsilon is not known
        LlamaRMSNorm(12),
        NormOfAnotherKind(64),
        NormThatMayBeGated(64),
        nn.Linear(8, 8),
    ],
    ids=lambda module: type(module).__name__,
)
def test_other_norms_are_left_alone(module: nn.Module) -> None:
    assert fuse_rms_norm(module, CPUKit(1)) is None


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("hidden", "inner", "bias"), [(64, 96, False), (40, 50, True), (32, 8, False)])
def test_gated_mlps_are_those_of_torch(hidden: int, inner: int, bias: bool, num_threads: int) -> None:
    mlp = randomize(LlamaMLP(small_config(hidden_size=hidden, intermediate_size=inner, mlp_bias=bias)))
    fused = fuse_gated_mlp(mlp, CPUKit(num_threads))
    assert type(fused) is FusedGatedMLP
    with torch.inference_mode():
        for rows in ROWS:
            for scale in (0.01, 1.0, 100.0):  # to both ends of the activation
                x = draw(1, rows, hidden, seed=rows) * scale
                torch.testing.assert_close(fused(x), mlp(x), rtol=1e-4, atol=1e-5 * scale**2 + 1e-5)
        assert_rows_stand_alone(fused, draw(65, hidden))


def test_other_mlps_are_left_alone() -> None:
    for activation in ("gelu", "gelu_pytorch_tanh", "relu"):
        assert fuse_gated_mlp(randomize(LlamaMLP(small_config(hidden_act=activation))), CPUKit(1)) is None
    for make in (AnotherMLP, ClampedMLP, MLPThatMayBeScaled):
        assert fuse_gated_mlp(randomize(make(small_config())), CPUKit(1)) is None, make.__name__
    extended = randomize(LlamaMLP(small_config()))
    extended.gate_norm = nn.Identity()
    assert fuse_gated_mlp(extended, CPUKit(1)) is None


def test_other_attentions_are_left_alone() -> None:
    config, layout = small_config(), KVLayout(2, 2, 16, 16, "float32")
    assert type(fuse_attention(randomize(LlamaAttention(config, 1)), layout, 16, CPUKit(1))) is FusedAttention
    for make in (NegatedKeys, AnotherOutput, Raises):
        assert fuse_attention(randomize(make(config, 1)), layout, 16, CPUKit(1)) is None, make.__name__
    assert fuse_attention(randomize(LlamaAttention(config, 1)), layout, None, CPUKit(1)) is None
    narrow = LlamaAttention(small_config(hidden_size=32), 1)  # heads of 8: half of one is no whole vector
    assert fuse_attention(randomize(narrow), KVLayout(2, 2, 8, 16, "float32"), 8, CPUKit(1)) is None
    biased = randomize(LlamaAttention(config, 1))
    biased.get_submodule("q_proj").bias = nn.Parameter(torch.zeros(64))
    assert fuse_attention(biased, layout, 16, CPUKit(1)) is None


def test_attentions_that_clip_are_left_alone() -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
    layout = KVLayout(2, 2, 16, 16, "float32")
    for clip, fits in ((None, True), (64.0, False)):  # a few times what rows of a norm reach
        config = OlmoConfig(clip_qkv=clip, **sizes)
        config._attn_implementation = ATTENTION_NAME
        attention = fuse_attention(randomize(OlmoAttention(config, 0)), layout, 16, CPUKit(1))
        assert (attention is not None) == fits, f"clip_qkv={clip}"
        assert fuse_gated_mlp(randomize(OlmoMLP(config)), CPUKit(1)) is not None


class _WrittenElements(TorchDispatchMode):
    """How many numbers all operations write, but for views."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        alias = [returned.alias_info for returned in func._schema.returns]
        if isinstance(result, torch.Tensor) and (alias[0] is None or alias[0].is_write):
            self.total += result.numel()
        return result


def test_a_trial_costs_the_same_in_a_model_of_many_layers() -> None:
    totals = []
    for num_layers in (2, 200):
        layout = KVLayout(num_layers, 2, 16, 16, "float32")
        with _WrittenElements() as written:
            assert fuse_attention(randomize(LlamaAttention(small_config(), 1)), layout, 16, CPUKit(1)) is not None
        totals.append(written.total)
    assert totals[0] == totals[1]


def small_model(**options: object) -> LlamaForCausalLM:
    model = LlamaForCausalLM(small_config(num_hidden_layers=3, vocab_size=320, **options))
    randomize(model)
    return model


LAYOUT = KVLayout(3, 2, 16, 16, "float32")


def test_pages_of_another_type_keep_the_models_own_parts() -> None:
    assert fuse(small_model(), KVLayout(3, 2, 16, 16, "float16"), 1) == "none"
    assert fuse(small_model(), LAYOUT, 1) == FUSED["llama"]
    assert fuse(small_model(), KVLayout(3, 2, 16, 16, "int8"), 1) == FUSED["llama"]


def test_the_default_type_of_the_process_is_not_taken() -> None:
    model = small_model()
    expected = _run(small_model(), LAYOUT, 1)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert fuse(model, LAYOUT, 1) == FUSED["llama"]
        pack(model, 1)
        found = _run(model, LAYOUT, 1)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_originals_are_dropped_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    originals = [ref(module) for module in model.modules() if type(module) is LlamaMLP]
    alive: list[int] = []

    class Counting(FusedGatedMLP):
        def __init__(self, *args: object) -> None:
            alive.append(sum(original() is not None for original in originals))
            super().__init__(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(fusing, "FusedGatedMLP", Counting)
    assert fuse(model, LAYOUT, 1) == "3 attention, 3 mlp, 7 norm"  # not layers: this MLP is no part of them
    assert alive == [3, 2, 1]


def test_what_cannot_be_fused_is_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial packs all weights of a part, so one of a class must do."""
    attempts: list[str] = []

    def counting(kind: type[nn.Module]) -> type[nn.Module]:
        class Counting(kind):  # type: ignore[misc, valid-type]
            def __init__(self, *args: object) -> None:
                attempts.append(kind.__name__)
                super().__init__(*args)

        return Counting

    for kind in (FusedAttention, FusedGatedMLP):
        monkeypatch.setattr(fusing, kind.__name__, counting(kind))
    model = small_model(hidden_act="gelu")
    for layer in model.model.layers:
        layer.self_attn.__class__ = AnotherOutput
    assert fuse(model, LAYOUT, 1) == "7 norm"
    assert attempts == ["FusedAttention"]


#: What of each architecture is fused.
FUSED = {
    "llama": "3 attention, 3 mlp, 7 norm, 3 layer",
    "qwen2": "3 attention, 3 mlp, 7 norm, 3 layer",
    "qwen3": "3 attention, 3 mlp, 7 norm, 3 layer",
    "mistral": "3 attention, 3 mlp, 7 norm, 3 layer",
    "gemma2": "4 attention, 17 norm",
    "gpt2": "none",
    "phi": "none",
}


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("arch", FUSED)
def test_fused_models_give_what_their_own_parts_give(arch: str, num_threads: int, tmp_path: Path) -> None:
    model_dir = helpers.save_model(arch, tmp_path / arch)
    config = loader.load_config(model_dir)
    layout = loader.derive_layout(config, helpers.PAGE_SIZE, "float32")
    own, fused = (loader.load_model(model_dir, config, "float32", CPU) for _ in range(2))
    assert fuse(fused, layout, num_threads) == FUSED[arch]
    expected, found = (_run(model, layout, num_threads) for model in (own, fused))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def _run(model: PreTrainedModel, layout: KVLayout, num_threads: int) -> torch.Tensor:
    """Logits of a prompt in two chunks, the second beside another prompt, in pages out of order."""
    arena = KVArena(layout, 10)
    arena.tensor.fill_(float("nan"))
    paged = PagedModel(model, arena, kernels_for(CPU, num_threads).attention(layout), 320, 512)
    long, short = (helpers.make_prompt(length, 1) for length in (90, 20))
    steps: Sequence[Sequence[SequenceInput]] = (
        [SequenceInput(long[:70], 0, (7, 1, 4, 0, 9, 3), 70)],
        [SequenceInput(long[70:], 70, (7, 1, 4, 0, 9, 3), 20), SequenceInput(short, 0, (8, 2), 20)],
    )
    return torch.cat([paged.forward(step) for step in steps])


def test_other_types_keep_their_own_parts(tmp_path: Path) -> None:
    model_dir = helpers.save_model("llama", tmp_path / "llama")
    engine = helpers.load_engine(model_dir, dtype="float16", num_pages=4)
    assert engine.fused == "none"
    assert helpers.load_engine(model_dir, num_pages=4).fused == f"{FUSED['llama']}, decoder"
