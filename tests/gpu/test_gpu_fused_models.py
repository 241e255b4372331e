"""Fused models of CUDA against the models that they stand for, and what is left alone.

Without a GPU Triton interprets the kernels (`TRITON_INTERPRET=1`). Attention is the reference, which takes all types.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import ref

import engine_helpers as helpers
import odd_models as odd
import pytest
import torch
from torch import nn
from transformers import NemotronConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm
from transformers.models.nemotron.modeling_nemotron import NemotronAttention

from tandem.engine import engine as engine_module
from tandem.engine import loader
from tandem.engine.arena import TORCH_DTYPES, KVArena
from tandem.engine.attention.interface import ATTENTION_NAME, AttentionBackend
from tandem.engine.attention.reference import ReferenceAttention
from tandem.engine.batch import SequenceInput
from tandem.engine.cuda.graphs import DecodeGraphs, run_again
from tandem.engine.fuse import trial as fused_trial
from tandem.engine.fuse.recognise import Kit, fuse_attention, fuse_gated_mlp, fuse_rms_norm
from tandem.engine.layout import KVLayout
from tandem.engine.paged_model import PagedModel

DTYPES = ("float32", "float16", "bfloat16")
NUM_PAGES, MAX_CONTEXT = 32, 512
NUM_LAYERS = 2
LAYOUT = KVLayout(NUM_LAYERS, 2, 16, helpers.PAGE_SIZE, "float32")
WHOLE = f"{NUM_LAYERS} attention, {NUM_LAYERS} mlp, {2 * NUM_LAYERS + 1} norm, {NUM_LAYERS} layer"
#: What of each architecture is fused; where that is the whole, its decoder too.
FUSED = {
    "llama": WHOLE,
    "qwen2": WHOLE,
    "qwen3": WHOLE,
    "mistral": WHOLE,
    "gemma2": f"{NUM_LAYERS} attention, {4 * NUM_LAYERS + 1} norm",
    "phi": "none",
}


def kit(device: torch.device, dtype: str = "float32") -> Kit:
    from tandem.engine.cuda.fusing import CudaKit

    return CudaKit(TORCH_DTYPES[dtype], device)


def paged(
    model: PreTrainedModel, layout: KVLayout = LAYOUT, backend: AttentionBackend | None = None, **options: Any
) -> PagedModel:
    """Over an arena of its own, where a slot that nobody wrote shows."""
    arena = KVArena(layout, NUM_PAGES, model.device)
    arena.tensor.fill_(float("nan"))
    return PagedModel(model, arena, backend or ReferenceAttention(), helpers.SMALL_VOCAB, MAX_CONTEXT, **options)


def fused(model: PreTrainedModel, layout: KVLayout = LAYOUT, backend: AttentionBackend | None = None) -> PagedModel:
    """As the engine does it."""
    from tandem.engine.cuda.fusing import fuse, fuse_decoder

    assert fuse(model, layout) == WHOLE
    decoder = fuse_decoder(model, layout, MAX_CONTEXT)
    assert decoder is not None
    return paged(model, layout, backend, decoder=decoder)


def steps() -> list[list[SequenceInput]]:
    """A prompt in chunks beside another and decode rows, over pages out of order; with no logits, some and all."""
    long, short = helpers.make_prompt(28, 1), helpers.make_prompt(5, 2)  # the one longer than windows are
    pages = (7, 1), (8,)
    return [
        [SequenceInput(long[:14], 0, pages[0], 0)],
        [SequenceInput(long[14:27], 14, pages[0], 3), SequenceInput(short[:4], 0, pages[1], 4)],
        [SequenceInput(long[27:], 27, pages[0]), SequenceInput(short[4:], 4, pages[1])],
    ]


def run(model: PagedModel, on_layer: Callable[[int], None] | None = None) -> torch.Tensor:
    return torch.cat([model.forward(step, on_layer) for step in steps()])


def small_model(device: torch.device, dtype: str = "float32", **options: object) -> PreTrainedModel:
    options = {"num_hidden_layers": NUM_LAYERS} | options
    model: PreTrainedModel = helpers.small_model(**options).to(device, TORCH_DTYPES[dtype])
    return model


def assert_as_near(found: torch.Tensor, own: torch.Tensor, exact: torch.Tensor, dtype: str) -> None:
    """To `exact`, in float32: in 16 bits as `own` is, which has roundings of its own."""
    if dtype == "float32":
        torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-4)
        return
    error, allowed = ((part - exact).abs().mean() for part in (found, own))
    cut_off = exact.device.type == "cpu" and dtype == "bfloat16"  # by Triton's interpreter: twice as far as rounding
    assert error <= (2.5 if cut_off else 1.3) * allowed, f"{error:.1e}, {allowed:.1e}"


#: Interpreting takes seconds: in 16 bits one model stands for all, and others have its biases and windows, but in
#: `make test-faults`, and on a GPU.
TOLD = {*((arch, "float32") for arch in ("llama", "qwen3", "gemma2", "phi")), ("llama", "bfloat16")}
MODELS_AND_DTYPES = [
    pytest.param(arch, dtype, marks=[] if (arch, dtype) in TOLD else pytest.mark.faults)
    for arch in FUSED
    for dtype in DTYPES
]


@pytest.mark.parametrize(("arch", "dtype"), MODELS_AND_DTYPES)
def test_models_give_what_their_own_parts_give(
    triton_device: torch.device, arch: str, dtype: str, tmp_path: Path
) -> None:
    from tandem.engine.cuda.fusing import fuse, fuse_decoder

    model_dir = helpers.save_model(arch, tmp_path / arch, layers=NUM_LAYERS)
    config = loader.load_config(model_dir)
    layout, precise = (loader.derive_layout(config, helpers.PAGE_SIZE, type_) for type_ in (dtype, "float32"))
    own, whole = (loader.load_model(model_dir, config, dtype, triton_device) for _ in range(2))
    assert fuse(whole, layout) == FUSED[arch]
    expected = run(paged(own, layout))
    exact = run(paged(own.float(), precise))
    by_parts = run(paged(whole, layout))
    assert_as_near(by_parts, expected, exact, dtype)
    decoder = fuse_decoder(whole, layout, MAX_CONTEXT)
    assert (decoder is None) == (FUSED[arch] != WHOLE)
    if decoder is not None:
        model = paged(whole, layout, decoder=decoder)
        found = run(model)
        assert found.dtype == torch.float32
        assert_as_near(found, expected, exact, dtype)
        seen: list[int] = []
        assert torch.equal(run(model, seen.append), found)
        assert seen == [*range(NUM_LAYERS)] * len(steps())


@pytest.mark.parametrize(
    "options",
    [
        {"attention_bias": True, "mlp_bias": True},
        {"hidden_size": 192, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 96},
        {
            "hidden_size": 42,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 10,
            "intermediate_size": 50,
        },
        {"tie_word_embeddings": True},
    ],
    ids=["biases", "heads-of-96", "odd-sizes", "tied"],
)
def test_shapes(triton_device: torch.device, options: dict[str, Any]) -> None:
    own, model = (small_model(triton_device, **options) for _ in range(2))
    layout = KVLayout(NUM_LAYERS, own.config.num_key_value_heads, own.config.head_dim, helpers.PAGE_SIZE, "float32")
    torch.testing.assert_close(run(fused(model, layout)), run(paged(own, layout)), rtol=1e-4, atol=1e-4)


def test_a_part_of_each_head_may_be_turned(triton_device: torch.device) -> None:
    config = NemotronConfig(
        hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1,
        head_dim=16, partial_rotary_factor=0.5,
    )  # fmt: skip
    config._attn_implementation = ATTENTION_NAME
    attention = NemotronAttention(config, 0).to(triton_device)
    layout = KVLayout(1, 2, 16, 16, "float32")
    assert fuse_attention(attention, layout, 8, kit(triton_device)) is not None


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_padded_decode_steps(triton_device: torch.device, dtype: str) -> None:
    """Through the fixed buffers of graphs: what is not in them, or moves, would show."""
    from tandem.engine.cuda.attention_triton import TritonAttention

    layout = KVLayout(NUM_LAYERS, 2, 16, helpers.PAGE_SIZE, dtype)
    model = fused(small_model(triton_device, dtype), layout, TritonAttention())
    pages = range(NUM_PAGES - 1)
    graphs = DecodeGraphs(model, max_num_seqs=4, scratch_page=NUM_PAGES - 1, capture=run_again)
    ready = helpers.prefilled(model, pages, (0, 15, 16, 21))
    for num in (4, 1, 3):
        chosen = ready[-num:]
        found = graphs.forward(chosen)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, model.forward(chosen), rtol=1e-2, atol=1e-4 if dtype == "float32" else 1e-2)
    written = ~model.arena.tensor.isnan().flatten(2).all(2)[0]
    assert written[-1], "the padding's"
    assert written.sum() == 1 + sum(len(step.pages) for step in ready)


def test_an_engine_of_fused_parts_gives_transformers_tokens(
    triton_device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks beside decodes, and decodes alone in fixed buffers. Without a GPU all but the graphs is as on one."""
    from tandem.engine.cuda.attention_triton import TritonAttention
    from tandem.engine.cuda.kernels import CudaKernels

    if triton_device.type == "cpu":
        monkeypatch.setattr(CudaKernels, "attention", lambda *_: TritonAttention())
        monkeypatch.setattr(engine_module, "kernels_for", lambda device, *_: CudaKernels(device))
        monkeypatch.setattr(engine_module, "_has_scratch_page", lambda *_: True)
        monkeypatch.setattr(engine_module, "CudaCapture", lambda: run_again)
    model_dir = helpers.save_model("llama", tmp_path / "llama", layers=NUM_LAYERS)
    engine = helpers.load_engine(model_dir, num_pages=12, device=str(triton_device), dtype="float32")
    assert engine.fused == f"{WHOLE}, decoder"
    engine.warmup(2)
    prompts = [helpers.make_prompt(length, seed=length) for length in (1, 17, 21)]
    expected = helpers.eager_greedy(model_dir, prompts, num_new=5)
    found = helpers.drive(engine, prompts, chunk=13, num_new=5)
    for index, (got, want) in enumerate(zip(found, expected, strict=True)):
        assert got.token_ids == want.token_ids, f"request {index}"
        torch.testing.assert_close(got.logits.cpu(), want.logits, rtol=1e-4, atol=1e-4)


def test_only_one_copy_of_the_weights_is_left(triton_device: torch.device) -> None:
    def num_bytes(model: nn.Module) -> int:
        storages = {parameter.untyped_storage() for parameter in model.parameters()}
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    for tie in (False, True):
        model = small_model(triton_device, tie_word_embeddings=tie)
        before = num_bytes(model)
        layer = model.model.layers[0]
        merged = [ref(part) for part in (layer.self_attn, layer.self_attn.q_proj, layer.mlp, layer.mlp.up_proj)]
        del layer
        fused(model)
        assert [part() for part in merged] == [None] * len(merged)
        norms = (2 * NUM_LAYERS + 1) * model.config.hidden_size * 4  # which are no parameters any more
        assert num_bytes(model) == before - norms
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tie


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_parts_are_left_alone(triton_device: torch.device, dtype: str) -> None:
    """In 16 bits as well, where a factor of 1.01 is not greater than roundings."""
    own, config, layout = kit(triton_device, dtype), helpers.small_config(), KVLayout(2, 2, 16, 16, dtype)

    def made(module: nn.Module) -> nn.Module:
        return helpers.randomize(module).to(triton_device, TORCH_DTYPES[dtype])

    assert fuse_rms_norm(made(LlamaRMSNorm(64)), own) is not None
    assert fuse_gated_mlp(made(LlamaMLP(config)), own) is not None
    assert fuse_attention(made(LlamaAttention(config, 1)), layout, 16, own) is not None
    for norm in (nn.LayerNorm(64, bias=False), odd.NormOfAnotherKind(64), odd.NormThatMayBeGated(64)):
        assert fuse_rms_norm(made(norm), own) is None, type(norm).__name__
    for mlp in (odd.AnotherMLP(config), odd.ClampedMLP(config), LlamaMLP(helpers.small_config(hidden_act="gelu"))):
        assert fuse_gated_mlp(made(mlp), own) is None, type(mlp).__name__
    for make in (odd.NegatedKeys, odd.AnotherOutput, odd.Raises):
        assert fuse_attention(made(make(config, 1)), layout, 16, own) is None, make.__name__
    biased = made(LlamaAttention(config, 1))
    biased.get_submodule("q_proj").bias = nn.Parameter(torch.zeros(64).to(own.device, own.dtype))
    assert fuse_attention(biased, layout, 16, own) is None


class _Rough(LlamaRMSNorm):
    """As good as the usual one in float32, and not in 16 bits."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        found = super().forward(hidden_states)
        return found if found.dtype == torch.float32 else found * 1.06


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_replacement_that_is_rough_in_16_bits_is_refused(dtype: str) -> None:
    norm = helpers.randomize(LlamaRMSNorm(64)).to(TORCH_DTYPES[dtype])
    rows = fused_trial.scale_rows(fused_trial.random(5, 64)).to(norm.weight.dtype)

    def replaced(kind: type[LlamaRMSNorm]) -> nn.Module | None:
        def make(original: LlamaRMSNorm) -> nn.Module:
            copied = kind(64).to(original.weight.dtype)
            copied.load_state_dict(original.state_dict())
            return copied

        return fused_trial.proved(norm, make, lambda part, type_: [part(rows.to(type_))], norm.weight.dtype)

    assert replaced(LlamaRMSNorm) is not None
    assert replaced(_Rough) is None


@pytest.mark.parametrize(
    "kind", [odd.HalvedSum, odd.NormsTheOtherWayRound, odd.ParallelParts, odd.NoFirstSum, odd.Tuple]
)
def test_a_layer_that_differs_is_left_alone(triton_device: torch.device, kind: type[nn.Module]) -> None:
    from tandem.engine.cuda.fusing import fuse, fuse_decoder

    model = small_model(triton_device)
    model.model.layers[1].__class__ = kind
    assert fuse(model, LAYOUT).endswith(f"{2 * NUM_LAYERS + 1} norm, {NUM_LAYERS - 1} layer")
    assert type(model.model.layers[1]) is kind
    assert fuse_decoder(model, LAYOUT, MAX_CONTEXT) is None


def soften_logits(model: PreTrainedModel) -> None:
    """So little that other roundings of the layers would show as much."""
    forward = model.forward

    def soft(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits = 1e3 * torch.tanh(output.logits / 1e3)
        return output

    model.forward = soft  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "change",
    [
        odd.scale_logits,
        odd.scale_embedding,
        odd.bound_embedding,
        odd.use_fewer_layers,
        odd.add_a_part,
        odd.add_between_layers,
        soften_logits,
    ],
)
def test_a_decoder_that_does_more_is_left_alone(
    triton_device: torch.device, change: Callable[[PreTrainedModel], None]
) -> None:
    from tandem.engine.cuda.fusing import fuse, fuse_decoder

    model = small_model(triton_device)
    fuse(model, LAYOUT)
    assert fuse_decoder(model, LAYOUT, MAX_CONTEXT) is not None
    change(model)
    assert fuse_decoder(model, LAYOUT, MAX_CONTEXT) is None
    assert len(model.model.layers) == NUM_LAYERS


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float16", marks=pytest.mark.faults), "bfloat16"])
def test_a_way_that_does_slightly_more_has_no_decoder(
    triton_device: torch.device, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 16 bits as well, where that is not greater than roundings: a small copy in float32 shows it."""
    from tandem.engine.cuda.fusing import fuse, fuse_decoder
    from tandem.engine.cuda.modules import CudaDecoderLayer

    model, layout = small_model(triton_device, dtype), replace(LAYOUT, dtype=dtype)
    fuse(model, layout)
    assert fuse_decoder(model, layout, MAX_CONTEXT) is not None
    own = CudaDecoderLayer.forward

    def forward(self: CudaDecoderLayer, *args: Any, **kwargs: Any) -> torch.Tensor:
        return own(self, *args, **kwargs) * (1.01 if self.self_attn.layer_idx == 0 else 1.0)

    monkeypatch.setattr(CudaDecoderLayer, "forward", forward)
    assert fuse_decoder(model, layout, MAX_CONTEXT) is None


def test_behind_the_last_keys_and_values_only_rows_with_logits_go_on(
    triton_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tandem.engine.cuda.fusing import fuse, fuse_decoder
    from tandem.engine.cuda.modules import CudaGatedMLP

    model = small_model(triton_device)
    fuse(model, LAYOUT)
    whole = paged(model, decoder=fuse_decoder(model, LAYOUT, MAX_CONTEXT))
    own, num_rows = CudaGatedMLP.forward, list[int]()

    def forward(self: CudaGatedMLP, x: torch.Tensor) -> torch.Tensor:
        num_rows.append(x.shape[1])
        return own(self, x)

    monkeypatch.setattr(CudaGatedMLP, "forward", forward)
    for step, expected in zip(steps(), ([14, 0], [17, 7], [2, 2]), strict=True):
        num_rows.clear()
        whole.forward(step)
        assert num_rows == expected


@pytest.mark.parametrize("max_context", [1, 4, 7, 20_000])
def test_a_decoder_of_any_context(triton_device: torch.device, max_context: int) -> None:
    """Shorter than its trial; longer than what its table is made of at once."""
    from tandem.engine.cuda.fusing import fuse, fuse_decoder

    model = small_model(triton_device)
    fuse(model, LAYOUT)
    decoder = fuse_decoder(model, LAYOUT, max_context)
    assert decoder is not None
    positions = torch.arange(max_context, device=triton_device)[None]
    cos, sin = model.model.rotary_emb(torch.empty(1, 1, 1, device=triton_device), positions)
    assert torch.equal(decoder._cos[:, :max_context], cos)
    assert torch.equal(decoder._sin[:, :max_context], sin)


def test_rotary_embeddings_of_a_whole_batch_are_no_table(triton_device: torch.device) -> None:
    from tandem.engine.cuda.fusing import fuse, fuse_decoder

    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "original_max_position_embeddings": 4096, "factor": 2.0}
    own, model = (small_model(triton_device, rope_parameters=rope, max_position_embeddings=8192) for _ in range(2))
    assert fuse(model, LAYOUT) == WHOLE
    assert fuse_decoder(model, LAYOUT, MAX_CONTEXT) is None
    torch.testing.assert_close(run(paged(model)), run(paged(own)), rtol=1e-4, atol=1e-4)


def test_pages_of_another_type_keep_the_models_own_parts(triton_device: torch.device) -> None:
    from tandem.engine.cuda.fusing import fuse

    assert fuse(small_model(triton_device), KVLayout(NUM_LAYERS, 2, 16, 16, "bfloat16")) == "none"


def test_the_greatest_position_has_its_row(triton_device: torch.device) -> None:
    model = fused(small_model(triton_device))
    start = MAX_CONTEXT - 2
    pages = list(range(NUM_PAGES))
    model.arena.tensor.fill_(0.5)
    step = [SequenceInput([5, 6], start, pages)]
    expected = paged(model.model)
    expected.arena.tensor.fill_(0.5)
    torch.testing.assert_close(model.forward(step), expected.forward(step), rtol=1e-4, atol=1e-4)
