"""Small random models, what `transformers` makes of them, and a driver that runs an engine over ragged batches."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tandem.core.pages import PageTable, page_table
from tandem.engine.attention.interface import ATTENTION_NAME
from tandem.engine.engine import Engine, SequenceInput
from tandem.engine.random_model import ModelSpec, save

REPOSITORY = Path(__file__).resolve().parents[3]

PAGE_SIZE = 16
NUM_PAGES = 160
WINDOW = 24
LONG_PROMPT = 300
NUM_NEW = 64
PROMPT_LENGTHS = (1, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1, LONG_PROMPT)
#: Of `small_model`.
SMALL_LAYERS, SMALL_VOCAB = 3, 320
#: Two logits may differ by this much in float32 (other row counts round otherwise).
LOGIT_TOLERANCE = 1e-4


#: Options of each architecture beyond the defaults. The windows are shorter than most prompts; the seeds give texts
#: without near ties and with many different tokens, as a test checks.
ARCHITECTURES: dict[str, dict[str, object]] = {
    "llama": {"seed": 1},
    "qwen2": {},
    "qwen3": {"head_dim": 32, "sliding_window": WINDOW},
    "mistral": {"sliding_window": WINDOW},
    "gemma2": {"sliding_window": WINDOW, "layers": 4},
    "gpt2": {},
    "phi": {"kv_heads": 4, "seed": 1},
}


def save_model(arch: str, target: Path, **options: object) -> Path:
    """Write the small random checkpoint of `arch` and return its directory."""
    sizes = {"max_positions": 512} | ARCHITECTURES[arch] | options
    return save(ModelSpec(arch=arch, **sizes), target)  # type: ignore[arg-type]


def randomize(module: torch.nn.Module) -> torch.nn.Module:
    """The module, to evaluate, with other weights, always the same."""
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            generator = torch.Generator().manual_seed(index)
            parameter.copy_(torch.randn(*parameter.shape, generator=generator) * 0.3)
    return module.eval()


def small_config(**options: object) -> LlamaConfig:
    """Of parts of a Llama, or of all of a small one."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**(sizes | {"num_hidden_layers": 2, "vocab_size": 70} | options))
    config._attn_implementation = ATTENTION_NAME
    return config


def load_engine(
    model_dir: Path,
    *,
    page_size: int = PAGE_SIZE,
    num_pages: int = NUM_PAGES,
    num_threads: int = 1,
    **options: object,
) -> Engine:
    """Load without the probe, which has its own tests."""
    return Engine.load(
        model_dir, page_size=page_size, num_pages=num_pages, num_threads=num_threads, probe=False, **options
    )  # type: ignore[arg-type]


def make_prompt(length: int, seed: int, vocab_size: int = 320) -> list[int]:
    """Return `length` random token ids, none of them special."""
    return np.random.default_rng([seed, length]).integers(2, vocab_size, length).tolist()


def small_model(**options: object) -> LlamaForCausalLM:
    """A Llama of three layers, whose every weight is random."""
    config = small_config(**({"num_hidden_layers": SMALL_LAYERS, "vocab_size": SMALL_VOCAB} | options))
    model = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


class Computes(Protocol):
    """An engine, or a paged model."""

    def forward(self, sequences: Sequence[SequenceInput], /) -> torch.Tensor: ...


def prefilled(model: Computes, pages: Sequence[int], starts: Sequence[int]) -> list[SequenceInput]:
    """Compute the tokens before `starts`; return the step that comes next, in `pages` out of order."""
    free = np.random.default_rng(3).permutation(pages).tolist()
    steps = []
    for index, start in enumerate(starts):
        num_pages = start // PAGE_SIZE + 1
        taken, free = page_table(free[:num_pages]), free[num_pages:]
        tokens = make_prompt(start + 1, seed=index)
        if start:
            model.forward([SequenceInput(tokens[:-1], 0, taken)])
        steps.append(SequenceInput(tokens[-1:], start, taken))
    return steps


@dataclass
class Continuation:
    """What follows a prompt: the ids, and the logits that each was chosen from (`[num_new, vocab]`)."""

    token_ids: list[int]
    logits: torch.Tensor


def eager_greedy(model_dir: Path, prompts: Sequence[list[int]], num_new: int = NUM_NEW) -> list[Continuation]:
    """Continue each prompt by `transformers`' own greedy `generate`, eager attention, float32."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager").eval()
    results = []
    for prompt in prompts:
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=num_new,
            min_new_tokens=num_new,
            do_sample=False,
            eos_token_id=[],
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        results.append(Continuation(output.sequences[0, len(prompt) :].tolist(), torch.cat(output.logits)))
    return results


@dataclass
class Case:
    """One architecture: its checkpoint, an engine on it, prompts, and what `transformers` continues them with."""

    arch: str
    model_dir: Path
    engine: Engine
    prompts: list[list[int]]
    expected: list[Continuation]


@dataclass
class Request:
    """One request in the driver: its tokens, its pages, and how far its KV goes."""

    tokens: list[int]
    prompt_length: int
    pages: PageTable
    begins_at: int  # step
    computed: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)

    @property
    def num_new(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def prefilled(self) -> bool:
        return self.computed >= self.prompt_length


Hook = Callable[[int, list[Request]], None]


def drive(
    engine: Engine,
    prompts: Sequence[list[int]],
    *,
    chunk: int,
    num_new: int = NUM_NEW,
    stagger: int = 3,
    before_step: Hook | None = None,
) -> list[Continuation]:
    """Run all prompts together: chunks of at most `chunk` tokens beside decode rows, in pages out of order.

    Request i begins at step `i * stagger`, so the batches mix all phases.
    """
    page_size = engine.layout.page_size
    free = np.random.default_rng(0).permutation(engine.num_pages).tolist()
    requests = []
    for index, prompt in enumerate(prompts):
        count = -(-(len(prompt) + num_new) // page_size)
        pages, free = page_table(free[:count]), free[count:]
        requests.append(Request(list(prompt), len(prompt), pages, index * stagger))
    step = 0
    while any(request.num_new < num_new for request in requests):
        if before_step is not None:
            before_step(step, requests)
        running = [request for request in requests if request.begins_at <= step and request.num_new < num_new]
        _step(engine, running, chunk)
        step += 1
    return [Continuation(request.tokens[request.prompt_length :], torch.stack(request.logits)) for request in requests]


def _step(engine: Engine, running: list[Request], chunk: int) -> None:
    if not running:
        return
    inputs = []
    for request in running:
        tokens = request.tokens[request.computed : request.computed + chunk]
        ends = request.computed + len(tokens) == len(request.tokens)
        inputs.append(SequenceInput(tokens, request.computed, request.pages, int(ends)))
    rows = iter(engine.forward(inputs).clone())  # the next forward may write over them
    for request, item in zip(running, inputs, strict=True):
        request.computed = item.end
        if item.num_logits:
            request.logits.append(next(rows))
            request.tokens.append(int(request.logits[-1].argmax()))


def assert_identical(found: Sequence[Continuation], expected: Sequence[Continuation]) -> None:
    """Assert equal tokens, and logits within `LOGIT_TOLERANCE`, for every request."""
    for index, (got, want) in enumerate(zip(found, expected, strict=True)):
        assert got.token_ids == want.token_ids[: len(got.token_ids)], f"request {index}: tokens differ"
        difference = float((got.logits - want.logits[: len(got.token_ids)]).abs().max())
        assert difference <= LOGIT_TOLERANCE, f"request {index}: logits differ by {difference:.1e}"


def environment_without_wide_vectors() -> dict[str, str]:
    """This process' own, but for code that Numba compiles there: as for a CPU without AVX-512."""
    import llvmlite.binding  # the helpers serve tests for GPUs too, where it need not be

    features = llvmlite.binding.get_host_cpu_features()
    wide = ("avx512", "avx10", "amx-avx512")
    fewer = {name: present and not name.startswith(wide) for name, present in features.items()}
    named = ",".join(f"{'+' if present else '-'}{name}" for name, present in fewer.items())
    return os.environ | {"NUMBA_CPU_FEATURES": named, "PYTHONPATH": str(REPOSITORY)}
