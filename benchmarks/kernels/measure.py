"""The engine's kernels, each alone, against what the machine's threads can do.

No server, no Ray, no transport: a model is loaded into this process, and its forwards are timed by the wall clock.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from benchmarks.kernels.cases import PAGE_SIZE, Sizes, count_cases, make_cases
from benchmarks.kernels.probes import measure_limits
from benchmarks.kernels.roofline import Figure, Limits, ModelShape, Report
from benchmarks.timing import timed
from tandem.bench.other_load import OtherLoad
from tandem.core.errors import ConfigError
from tandem.engine import loader
from tandem.engine.random_model import ModelSpec

#: What is measured where no model is given: a Llama of 82 million weights, whose step reads 327 MB.
DEFAULT_MODEL = ModelSpec(
    hidden=768, layers=12, heads=12, kv_heads=4, intermediate=2048, vocab=8192, max_positions=2048, std=0.02
)


def thread_counts(asked: list[int] | None) -> list[int]:
    """What to measure on: 1 and all that this process may use, or those that are asked for. Raises `ConfigError`."""
    available = len(os.sched_getaffinity(0))
    for num_threads in asked or ():
        if num_threads > available:
            raise ConfigError(f"--threads {num_threads}: this process may use {available}", key="--threads")
    return list(dict.fromkeys(asked or (1, available)))


def count_steps(sizes: Sizes) -> int:
    """How often one `measure` tells what comes next."""
    return 2 + count_cases(sizes)  # probes before and after


def measure(model_dir: Path, shape: ModelShape, num_threads: int, sizes: Sizes, tell: Callable[[str], None]) -> Report:
    """Measure probes, kernels, and the probes again, on `num_threads` threads; `tell` hears what comes next.

    Raises what `Engine.load` raises.
    """
    load = OtherLoad()
    before = _probe(num_threads, sizes, tell)
    figures: list[Figure] = []
    for case in make_cases(model_dir, shape, num_threads, sizes):
        tell(case.name)
        figures.append(Figure(case.kind, case.name, case.work, timed(case.run, sizes.budget_s), case.goal))
    after = _probe(num_threads, sizes, tell)
    return Report(before.or_better(after), tuple(figures), load.cores())


def _probe(num_threads: int, sizes: Sizes, tell: Callable[[str], None]) -> Limits:
    tell("probes")
    return measure_limits(
        num_threads, matrix_size=sizes.matrix_size, stream_bytes=sizes.cold_bytes, budget_s=sizes.probe_budget_s
    )


def shape_of(model_dir: Path, sizes: Sizes) -> ModelShape:
    """Read from a checkpoint's config what its kernels must do, without its weights.

    Raises `ModelLoadError` where there is no checkpoint, and `ConfigError` for a model that is not dense, or whose
    context or window is shorter than what is measured.
    """
    config = loader.load_config(model_dir)
    text = config.get_text_config(decoder=True)
    if loader.context_of(config, None) < sizes.max_context:
        raise ConfigError(f"{model_dir}: its context is shorter than the {sizes.max_context:,} tokens to measure")
    window = getattr(text, "sliding_window", None)
    if window is not None and window < sizes.max_context:
        raise ConfigError(
            f"{model_dir}: its window of {window:,} tokens is shorter than the {sizes.max_context:,} to measure"
        )
    layout = loader.derive_layout(config, PAGE_SIZE, "float32")
    layers, head = _linear_layers(model_dir, config)
    return ModelShape(
        layer_weights=sum(inputs * outputs for inputs, outputs in layers),
        head_weights=head[0] * head[1],
        largest_linear=max(layers, key=lambda features: features[0] * features[1]),
        num_layers=layout.num_layers,
        num_heads=int(text.num_attention_heads),
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        vocab_size=head[1],
    )


def _linear_layers(model_dir: Path, config: PreTrainedConfig) -> tuple[list[tuple[int, int]], tuple[int, int]]:
    """In and out features of all linear layers but the last, and of the last."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    if any(parameter.dim() > 2 for parameter in model.parameters()):
        raise ConfigError(f"{model_dir}: {config.model_type} is not dense: what a step reads depends on its tokens")
    last = model.get_output_embeddings()
    found = [module for module in model.modules() if isinstance(module, nn.Linear | Conv1D) and module is not last]
    return [_features(module) for module in found], _features(last)


def _features(module: nn.Linear | Conv1D) -> tuple[int, int]:
    rows, columns = module.weight.shape
    return (columns, rows) if isinstance(module, nn.Linear) else (rows, columns)
