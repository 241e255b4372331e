"""The engine on a GPU: the same tokens as on the CPU, graphs that give what they were captured from, chunks that give
what the whole prompt gives, and no wait for the device inside a step."""

from __future__ import annotations

from pathlib import Path

import engine_helpers as helpers
import pytest
import torch

from tandem.engine import loader
from tandem.engine.arena import KVArena
from tandem.engine.batch import SequenceInput
from tandem.engine.cuda.graphs import CudaCapture, DecodeGraphs, run_again
from tandem.engine.engine import Engine
from tandem.engine.paged_model import PagedModel
from tandem.engine.select_kernels import kernels_for

PAGE_SIZE = 256  # every kernel takes it
NUM_PAGES = 24
MAX_NUM_SEQS = 6
#: Of float32 logits of about 1 in size; another order of sums.
TOLERANCE = 1e-4
#: Of bfloat16 logits, in spreads of all logits; the reference on a CPU is within 0.05.
BF16_TOLERANCE = 0.12
PROMPTS = [helpers.make_prompt(length, seed=length) for length in (1, 40, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1)]


@pytest.fixture(scope="module")
def engine(gpu: torch.device, model_dir: Path) -> Engine:
    return load(model_dir, gpu, "float32")


def load(model_dir: Path, device: torch.device, dtype: str) -> Engine:
    engine = helpers.load_engine(model_dir, page_size=PAGE_SIZE, num_pages=NUM_PAGES, device=str(device), dtype=dtype)
    engine.warmup(MAX_NUM_SEQS)
    return engine


def prefill(
    engine: helpers.Computes, prompts: list[list[int]], chunk: int = 10_000
) -> tuple[list[SequenceInput], torch.Tensor]:
    """Compute all but the last token of each; return the step that comes next, and the logits of the last chunks."""
    steps, logits = [], []
    for index, prompt in enumerate(prompts):
        pages = [2 * index + 1, 2 * index]
        for start in range(0, len(prompt) - 1, chunk):
            part = prompt[start : min(start + chunk, len(prompt) - 1)]
            rows = engine.forward([SequenceInput(part, start, pages)])
        if len(prompt) > 1:
            logits.append(rows[0])
        steps.append(SequenceInput(prompt[-1:], len(prompt) - 1, pages))
    return steps, torch.stack(logits)


def test_greedy_tokens_are_those_of_transformers(engine: Engine, model_dir: Path) -> None:
    """Ragged batches of chunks and decodes, and steps of decodes alone, which are graphs."""
    assert engine.attention != "reference"
    expected = helpers.eager_greedy(model_dir, PROMPTS, num_new=24)
    found = helpers.drive(engine, PROMPTS, chunk=100, num_new=24)
    for index, (got, want) in enumerate(zip(found, expected, strict=True)):
        assert got.token_ids == want.token_ids, f"request {index}"
        assert (got.logits.cpu() - want.logits).abs().max() <= TOLERANCE, f"request {index}"


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_whole_model_is_fused(gpu: torch.device, model_dir: Path, dtype: str) -> None:
    """Of each kind all, and in float32 the logits of the model's own parts."""
    pytest.importorskip("triton")
    source = load(model_dir, gpu, dtype)
    assert source.fused == "3 attention, 3 mlp, 7 norm, 3 layer, decoder"
    if dtype == "float32":
        own = loader.load_model(model_dir, loader.load_config(model_dir), dtype, gpu)
        arena = KVArena(source.layout, NUM_PAGES, gpu)
        backend = kernels_for(gpu).attention(source.layout)
        steps, logits = prefill(source, PROMPTS)
        unfused = PagedModel(own, arena, backend, source.vocab_size, source.max_context)
        own_steps, expected = prefill(unfused, PROMPTS)
        assert (logits - expected).abs().max() <= TOLERANCE
        assert (source.forward(steps) - unfused.forward(own_steps)).abs().max() <= TOLERANCE


def test_bfloat16_is_near_float32(gpu: torch.device, engine: Engine, model_dir: Path) -> None:
    half = load(model_dir, gpu, "bfloat16")
    (exact_steps, exact), (steps, rough) = prefill(engine, PROMPTS), prefill(half, PROMPTS)
    spread = exact.std()
    assert (rough - exact).abs().max() <= BF16_TOLERANCE * spread
    assert (half.forward(steps) - engine.forward(exact_steps)).abs().max() <= BF16_TOLERANCE * spread


@pytest.mark.parametrize("chunk", [1, 33, PAGE_SIZE])
def test_chunks_give_what_the_whole_prompt_gives(engine: Engine, chunk: int) -> None:
    whole_steps, whole = prefill(engine, PROMPTS)
    expected = engine.forward(whole_steps)
    engine.arena.tensor.fill_(float("nan"))
    steps, logits = prefill(engine, PROMPTS, chunk)
    assert (logits - whole).abs().max() <= TOLERANCE
    assert (engine.forward(steps) - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_graph_gives_the_bits_of_what_it_was_captured_from(gpu: torch.device, model_dir: Path, dtype: str) -> None:
    """The same padded step with and without a graph, for every size of batch; and both near the eager batch."""
    source = load(model_dir, gpu, dtype)
    steps, _ = prefill(source, PROMPTS)
    arena = KVArena(source.layout, NUM_PAGES + 1, gpu)
    arena.tensor.copy_(source.arena.tensor)
    backend = kernels_for(gpu).attention(source.layout)
    paged = PagedModel(source._model, arena, backend, source.vocab_size, source.max_context, decoder=source._decoder)
    graphs, plain = (
        DecodeGraphs(paged, max_num_seqs=MAX_NUM_SEQS, scratch_page=NUM_PAGES, capture=capture)
        for capture in (CudaCapture(), run_again)
    )
    spread = paged.forward(steps).std()
    for num in range(1, len(steps) + 1):
        chosen = steps[-num:]
        replayed = graphs.forward(chosen)
        assert torch.equal(replayed, plain.forward(chosen)), num
        tolerance = TOLERANCE if dtype == "float32" else float(BF16_TOLERANCE * spread)
        assert (replayed - paged.forward(chosen)).abs().max() <= tolerance, num


def test_a_decode_step_does_not_wait_for_the_device(engine: Engine) -> None:
    """Only who looks at the tokens waits."""
    steps, _ = prefill(engine, PROMPTS)
    expected = engine.forward(steps)
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        logits = engine.forward(steps)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert torch.equal(logits, expected)


def test_queued_steps_keep_their_own_inputs(engine: Engine) -> None:
    """Nobody looks at a token between these steps, and the host's buffer is the same for all."""
    steps, _ = prefill(engine, PROMPTS)
    expected = [engine.forward([step]).clone() for step in steps]
    torch.cuda.synchronize()
    found = [engine.forward([step]) for _ in range(20) for step in steps]
    for index, logits in enumerate(found):
        assert torch.equal(logits, expected[index % len(steps)]), index


def test_padding_touches_no_page_of_a_sequence(engine: Engine) -> None:
    steps, _ = prefill(engine, PROMPTS)
    assert engine.num_pages == NUM_PAGES == engine.arena.num_pages - 1
    others = [page for page in range(NUM_PAGES) if page not in steps[0].pages]
    before = engine.arena.tensor[:, others].clone()
    engine.forward([steps[0]] * 3)  # padded to four
    assert torch.equal(engine.arena.tensor[:, others].nan_to_num(), before.nan_to_num())


def test_layers_are_told_of_in_order_when_their_kv_is_there(engine: Engine) -> None:
    prompt, pages = PROMPTS[3], [4, 9]
    engine.arena.tensor.fill_(float("nan"))
    engine.forward([SequenceInput(prompt, 0, pages)])
    expected = [engine.arena.extent_view(layer, 4).tobytes() for layer in range(engine.layout.num_layers)]
    engine.arena.tensor.fill_(float("nan"))
    seen: list[tuple[int, bytes]] = []

    def written(layer: int) -> None:
        seen.append((layer, engine.arena.extent_view(layer, 4).tobytes()))

    engine.forward([SequenceInput(prompt, 0, pages)], written)
    assert seen == list(enumerate(expected))
