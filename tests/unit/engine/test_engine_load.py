"""Loading, and what a forward promises beside its numbers."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import engine_helpers as helpers
import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.core.errors import ConfigError, ModelLoadError, UnsupportedModelError
from tandem.engine import engine as engine_module
from tandem.engine import loader
from tandem.engine.cpu.kernels import CPUKernels
from tandem.engine.engine import Engine, SequenceInput, _count_pages
from tandem.engine.loader import Types
from tandem.engine.paged_model import PagedModel
from tandem.engine.random_model import EOS_ID, make_tokenizer


@pytest.fixture(scope="module")
def engine(llama_dir: Path) -> Engine:
    return helpers.load_engine(llama_dir, num_pages=40)


@pytest.fixture
def broken_dir(llama_dir: Path, tmp_path: Path) -> Path:
    """Return a copy of a checkpoint, to be broken."""
    return Path(shutil.copytree(llama_dir, tmp_path / "model"))


def test_attributes(engine: Engine, llama_dir: Path) -> None:
    assert engine.layout == engine.arena.layout
    assert (engine.layout.num_layers, engine.layout.num_kv_heads, engine.layout.head_dim) == (3, 2, 16)
    assert engine.layout.page_size == helpers.PAGE_SIZE
    assert engine.arena.num_pages == 40
    assert engine.vocab_size == 320
    assert engine.max_context == 512
    assert engine.eos_token_ids == (1,)
    assert engine.types == Types.all_of("float32")
    assert engine.attention == "cpu"


def test_eos_comes_from_both_files(broken_dir: Path) -> None:
    path = broken_dir / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [7, 9]}))
    assert helpers.load_engine(broken_dir, num_pages=1).eos_token_ids == (7, 9, 1)
    path.unlink()
    assert helpers.load_engine(broken_dir, num_pages=1).eos_token_ids == (1,)


def test_ends_of_text_that_cannot_be_read_are_not_passed_over(broken_dir: Path) -> None:
    for torn in ("{", '{"eos_token_id": "end"}'):
        (broken_dir / "generation_config.json").write_text(torn)
        with pytest.raises(ModelLoadError, match=r"generation_config\.json"):
            loader.eos_of(broken_dir, loader.load_config(broken_dir))


def test_where_no_config_names_an_end_of_text_the_tokenizers_holds(broken_dir: Path) -> None:
    make_tokenizer(64).save_pretrained(broken_dir)
    (broken_dir / "generation_config.json").unlink(missing_ok=True)
    config = loader.load_config(broken_dir)
    config.eos_token_id = None
    assert loader.eos_of(broken_dir, config) == (EOS_ID,)
    (broken_dir / "tokenizer.json").unlink()
    assert loader.eos_of(broken_dir, config) == ()


def test_kv_bytes_are_counted_in_pages(llama_dir: Path) -> None:
    page_bytes = helpers.load_engine(llama_dir, num_pages=1).layout.page_bytes
    engine = Engine.load(
        llama_dir, page_size=helpers.PAGE_SIZE, kv_bytes=5 * page_bytes + 1, num_threads=1, probe=False
    )
    assert engine.arena.num_pages == 5
    with pytest.raises(ConfigError, match="do not hold one page"):
        Engine.load(llama_dir, kv_bytes=1, num_threads=1, probe=False)


def test_the_arena_is_made_of_what_the_weights_leave(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What trials of fused parts took on the way is free again by then."""
    calls: list[str] = []

    def watch(owner: Any, name: str) -> None:
        inner = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (calls.append(name), inner(*args))[1])

    watch(CPUKernels, "decoder")
    watch(engine_module, "_count_pages")
    watch(engine_module, "KVArena")
    Engine.load(llama_dir, num_pages=4, num_threads=1, probe=False)
    assert calls == ["decoder", "_count_pages", "KVArena"]


def test_a_page_of_the_engines_own_is_within_the_bytes(engine: Engine) -> None:
    cpu, page_bytes = torch.device("cpu"), engine.layout.page_bytes
    assert _count_pages(engine.layout, None, 5 * page_bytes, cpu, 1) == 5
    assert _count_pages(engine.layout, 5, None, cpu, 1) == 6
    with pytest.raises(ConfigError, match="do not hold one page of"):
        _count_pages(engine.layout, None, page_bytes, cpu, 1)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"device": "tpu"}, "tpu"),
        ({"device": "meta"}, "neither cpu nor cuda"),
        ({"dtype": "int8"}, "int8"),
        ({"kernels": "fast"}, "kernels 'fast' is not one of auto, vectors, torch"),
        ({"page_size": 0}, "page_size"),
        ({"num_pages": 0}, "at least one page"),
        ({"num_pages": 1, "kv_bytes": 1}, "not both"),
        ({"num_threads": 0}, "num_threads"),
        ({"max_context": 513}, r"\[1, 512\]"),
        ({"max_context": 0}, r"\[1, 512\]"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(llama_dir: Path, options: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Engine.load(llama_dir, **({"num_threads": 1, "num_pages": 1, "probe": False} | options))  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_without_a_device_is_named(llama_dir: Path) -> None:
    with pytest.raises(ConfigError, match="no CUDA device"):
        Engine.load(llama_dir, device="cuda")


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="not a directory"):
        Engine.load(tmp_path / "nowhere")
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        Engine.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        Engine.load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(ModelLoadError, match="no-such-model"):
        Engine.load(tmp_path)


def test_encoder_decoders_are_refused(tmp_path: Path) -> None:
    encoder = tmp_path / "t5"
    encoder.mkdir()
    (encoder / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        Engine.load(encoder)


def test_missing_and_misshapen_weights_are_refused(broken_dir: Path) -> None:
    path = broken_dir / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.self_attn.k_proj.weight"
    whole = tensors.pop(name)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"layers\.1\.self_attn\.k_proj"):
        helpers.load_engine(broken_dir)
    save_file(tensors | {name: whole[:-1].contiguous()}, path, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError):
        helpers.load_engine(broken_dir)
    path.write_bytes(b"torn")
    with pytest.raises(ModelLoadError):
        helpers.load_engine(broken_dir)
    path.unlink()
    with pytest.raises(ModelLoadError):
        helpers.load_engine(broken_dir)


EXTRA = torch.zeros(2)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.3.mlp.up_proj.weight",
        "lm_head.bias",
        "adapter.weight",
    ],
)
def test_tensors_that_the_model_has_no_place_for_are_refused_by_name(broken_dir: Path, name: str) -> None:
    path = broken_dir / "model.safetensors"
    save_file(load_file(path) | {name: EXTRA}, path, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=rf"LlamaForCausalLM .* no place for {re.escape(name)}; "):
        helpers.load_engine(broken_dir)


def test_of_many_tensors_without_a_place_some_are_named(broken_dir: Path) -> None:
    path = broken_dir / "model.safetensors"
    extra = {f"model.layers.{layer}.mlp.up_proj.bias": EXTRA.clone() for layer in range(7)}
    save_file(load_file(path) | extra, path, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"layers\.0\..*layers\.4\.mlp\.up_proj\.bias and 2 more"):
        helpers.load_engine(broken_dir)


def test_tensors_without_which_a_model_is_the_same_are_left_out(broken_dir: Path, engine: Engine) -> None:
    path = broken_dir / "model.safetensors"
    names = [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.0.attn.bias",
        "model.layers.0.attention.masked_bias",
        "model.layers.0.self_attn.k_scale",
        "model.embeddings.position_ids",
        "score.weight",
        "v_head.summary.weight",
    ]
    save_file(load_file(path) | {name: EXTRA.clone() for name in names}, path, metadata={"format": "pt"})
    assert helpers.load_engine(broken_dir, num_pages=1).weights_sha256 == engine.weights_sha256


@pytest.mark.long
def test_weights_digest_knows_weights_config_and_type(engine: Engine, llama_dir: Path, broken_dir: Path) -> None:
    digests = {engine.weights_sha256}
    assert helpers.load_engine(llama_dir, num_pages=3, page_size=32).weights_sha256 == engine.weights_sha256
    assert helpers.load_engine(broken_dir, num_pages=1).weights_sha256 == engine.weights_sha256
    digests.add(helpers.load_engine(llama_dir, num_pages=1, dtype="bfloat16").weights_sha256)
    path = broken_dir / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}))
    digests.add(helpers.load_engine(broken_dir, num_pages=1).weights_sha256)
    path.write_text(json.dumps(config))
    tensors = load_file(broken_dir / "model.safetensors")
    tensors["model.norm.weight"][3] += 1e-3
    save_file(tensors, broken_dir / "model.safetensors", metadata={"format": "pt"})
    digests.add(helpers.load_engine(broken_dir, num_pages=1).weights_sha256)
    assert len(digests) == 4
    assert all(len(digest) == 64 for digest in digests)


def test_tied_weights_load(tmp_path: Path) -> None:
    model_dir = helpers.save_model("gpt2", tmp_path / "gpt2", tie=True)
    prompts = [helpers.make_prompt(20, seed=0)]
    expected = helpers.eager_greedy(model_dir, prompts, num_new=4)
    found = helpers.drive(helpers.load_engine(model_dir), prompts, chunk=7, num_new=4)
    helpers.assert_identical(found, expected)


@pytest.mark.parametrize(
    ("sequence", "reason"),
    [
        (SequenceInput([], 0, [0], 0), "at least one token"),
        (SequenceInput([2], -1, [0], 0), "outside of the context"),
        (SequenceInput([2], 512, range(33), 0), "outside of the context"),
        (SequenceInput([2], 0, [0], 2), "num_logits"),
        (SequenceInput([2], 0, [0], -1), "num_logits"),
        (SequenceInput([2] * 17, 0, [0], 0), "do not hold"),
        (SequenceInput([2], 16, [0], 0), "do not hold"),
        (SequenceInput([2], 0, [40], 0), "outside of the arena"),
        (SequenceInput([2], 0, [0, -1], 0), "outside of the arena"),
        (SequenceInput([320], 0, [0], 0), "vocabulary"),
        (SequenceInput([-1], 0, [0], 0), "vocabulary"),
    ],
    ids=str,
)
def test_forward_refuses_what_lies_outside_and_writes_nothing(
    engine: Engine, sequence: SequenceInput, reason: str
) -> None:
    before = engine.arena.tensor.clone()
    with pytest.raises(ValueError, match=reason):
        engine.forward([SequenceInput([2, 3], 0, [1], 1), sequence])
    assert torch.equal(engine.arena.tensor, before)


def test_pages_of_the_engines_own_are_refused(engine: Engine) -> None:
    paged = PagedModel(engine._model, engine.arena, engine._backend, engine.vocab_size, 512, num_pages=39)
    paged.forward([SequenceInput([2], 0, [38])])
    with pytest.raises(ValueError, match="outside of the arena"):
        paged.forward([SequenceInput([2], 0, [39])])


def test_forward_refuses_an_empty_batch(engine: Engine) -> None:
    with pytest.raises(ValueError, match="empty"):
        engine.forward([])


def test_logits_come_in_order_for_the_last_rows(engine: Engine) -> None:
    first, second = helpers.make_prompt(20, seed=1), helpers.make_prompt(5, seed=2)
    every = engine.forward([SequenceInput(first, 0, [3, 4], 20), SequenceInput(second, 0, [5], 5)])
    some = engine.forward([SequenceInput(first, 0, [3, 4], 2), SequenceInput(second, 0, [5], 1)])
    none = engine.forward([SequenceInput(first, 0, [3, 4], 0)])
    assert every.shape == (25, 320)
    assert every.dtype == torch.float32
    assert none.shape == (0, 320)
    assert float((some - every[[18, 19, 24]]).abs().max()) < helpers.LOGIT_TOLERANCE


def test_layers_are_told_of_when_they_are_written(engine: Engine) -> None:
    prompt = helpers.make_prompt(20, seed=3)
    pages = [8, 2]
    engine.forward([SequenceInput(prompt, 0, pages, 0)])
    whole = engine.arena.tensor[:, pages].clone()
    engine.arena.tensor[:, pages] = 0
    seen: list[int] = []

    def check(layer: int) -> None:
        seen.append(layer)
        assert torch.equal(engine.arena.tensor[layer, pages], whole[layer])  # bytes are there
        assert not engine.arena.tensor[layer + 1 :, pages].any()  # later layers are still to come

    engine.forward([SequenceInput(prompt, 0, pages, 0)], on_layer=check)
    assert seen == [0, 1, 2]


def test_forward_writes_its_own_slots_only(engine: Engine) -> None:
    engine.arena.tensor.fill_(3.0)
    engine.forward([SequenceInput(helpers.make_prompt(18, seed=4), 0, [6, 9], 0)])
    changed = (engine.arena.tensor != 3.0).flatten(4).any(-1).any(0).any(1)  # [page][slot]
    expected = torch.zeros_like(changed)
    expected[6] = True
    expected[9, :2] = True
    assert torch.equal(changed, expected)


def test_pages_can_be_shared_and_copied_on_write(engine: Engine) -> None:
    """Two choices fork after a prompt of a page and a half: the full page is shared, the partial one copied."""
    prompt = helpers.make_prompt(24, seed=5)
    engine.forward([SequenceInput(prompt, 0, [10, 11], 0)])
    engine.arena.copy_page(11, 12)
    forked = engine.forward([SequenceInput([5, 6], 24, [10, 11], 1), SequenceInput([7], 24, [10, 12], 1)])
    alone = [engine.forward([SequenceInput([*prompt, *tail], 0, [13, 14], 1)]) for tail in ([5, 6], [7])]
    assert float((forked - torch.cat(alone)).abs().max()) < helpers.LOGIT_TOLERANCE


def test_warmup_leaves_the_arena_alone(llama_dir: Path) -> None:
    engine = helpers.load_engine(llama_dir)
    engine.warmup()
    assert not engine.arena.tensor.any()
    helpers.load_engine(llama_dir, num_pages=1, max_context=1).warmup()


# Prints what is compiled after the warm-up, and after requests of all kinds.
_COMPILED_BY = """
import ctypes
import sys
import torch
import engine_helpers as helpers
from tandem.engine.cpu import attention_kernel
from tandem.engine.cpu import attention_short
from tandem.engine.cpu import layer_kernels
from tandem.engine.cpu import packed_kernel
from tandem.engine.cpu import tiles_kernel
from tandem.engine.cpu import tiles_quantized
from tandem.engine.cpu import thread_team
from tandem.engine.cpu import lending

class Lender:
    word = ctypes.c_int64(0)
    wanted_back_at = offered_at = ctypes.addressof(word)

    def borrow(self):
        return 1

engine = helpers.load_engine(sys.argv[1], num_threads=1, cache_dtype=sys.argv[2], quantize=sys.argv[3])
types = engine.types
short = {"bfloat16": packed_kernel.BY_TWO, "bfloat16 in tiles": tiles_kernel.IN_TILES}.get(types.multiplied)
if types.quantized and short:
    rounded = tiles_quantized.QUANTIZED_IN_TILES if types.in_tiles else packed_kernel.QUANTIZED_BY_TWO
    short = rounded[int(types.quantized[3:])]
products = short or packed_kernel.PRODUCTS[getattr(torch, types.stored)]
put = packed_kernel.round_together if products.rounds else packed_kernel.put_together
put = () if products.in_rows else (put,)
of_short = {"by two": attention_short.ATTEND_BY_TWO, "in tiles": attention_short.ATTEND_IN_TILES}.get(types.products)
fits = engine.layout.head_dim % 32 == 0
KERNELS = (products.multiply, products.multiply_gated, layer_kernels.normalize_rows,
           layer_kernels.PLACE_HEADS[engine.layout.dtype], layer_kernels.add_rows, layer_kernels.gather_rows,
           layer_kernels.GATHER[getattr(torch, engine.types.stored)],
           of_short if of_short and fits else attention_kernel.ATTEND[engine.layout.dtype],
           *((packed_kernel.round_rows,) if short else ()), *put)

def compiled():
    kernels = ["_address" in vars(kernel) for kernel in KERNELS]
    return kernels + [len(function.signatures) for function in (thread_team._lead, thread_team._follow)]

engine.warmup()
print(compiled())
lending.borrow_from(Lender())
helpers.drive(engine, [helpers.make_prompt(100, 0), helpers.make_prompt(1, 0)], chunk=100, num_new=3)
helpers.drive(engine, [helpers.make_prompt(9, 0)], chunk=1, num_new=3)
print(compiled())
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "quantize"),
    [
        ("float32", "auto", "none"),
        ("bfloat16", "auto", "int8"),
        pytest.param("bfloat16", "bfloat16", "none", marks=pytest.mark.faults),
        pytest.param("float16", "int8", "none", marks=pytest.mark.faults),
    ],
)
def test_warmup_compiles_all_that_requests_need(dtype: str, cache_dtype: str, quantize: str, tmp_path: Path) -> None:
    """In a process of its own: here other tests have compiled kernels already."""
    model_dir = helpers.save_model("llama", tmp_path / "llama", dtype=dtype, head_dim=32)
    ended = subprocess.run(
        [sys.executable, "-c", _COMPILED_BY, str(model_dir), cache_dtype, quantize],
        cwd=Path(__file__).parent,
        env=os.environ | {"PYTHONPATH": f"{helpers.REPOSITORY}{os.pathsep}{Path(__file__).parent}"},
        capture_output=True,
        text=True,
        check=True,
    )
    after_warmup, after_requests = ended.stdout.splitlines()
    assert after_warmup == after_requests
    assert "False" not in after_warmup
    assert after_warmup.endswith(" 1, 1]")


def test_two_engines_in_two_threads_do_not_meet(llama_dir: Path) -> None:
    prompts = [[helpers.make_prompt(40, seed=seed)] for seed in (1, 2)]
    engines = [helpers.load_engine(llama_dir) for _ in prompts]
    expected = [
        helpers.drive(engine, prompt, chunk=9, num_new=24) for engine, prompt in zip(engines, prompts, strict=True)
    ]
    found: dict[int, list[helpers.Continuation]] = {}
    threads = [
        threading.Thread(
            target=lambda i=i: found.update({i: helpers.drive(engines[i], prompts[i], chunk=9, num_new=24)})
        )
        for i in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(2):
        helpers.assert_identical(found[index], expected[index])


def test_random_checkpoints_bring_a_tokenizer(llama_dir: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(llama_dir / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 320
    text = "Grüße, 世界! <s>\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.decode([319]) == " w319"
    small = helpers.save_model("llama", tmp_path / "small", vocab=50)
    assert Tokenizer.from_file(str(small / "tokenizer.json")).encode("w7 w9").ids == [7, 9]


@pytest.mark.processes
def test_the_engine_needs_no_triton() -> None:
    """On CUDA the model's own parts serve then. A process of its own: here somebody may have imported it."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from tandem.engine.cuda.kernels import CudaKernels\n"
        "kernels = CudaKernels(None)\n"
        "print(kernels.fuse(None, None, None), kernels.decoder(None, None, 1))"
    )
    environment = os.environ | {"PYTHONPATH": str(helpers.REPOSITORY)}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert found.stdout.strip() == "Fused(parts='none', linear='torch') None"
