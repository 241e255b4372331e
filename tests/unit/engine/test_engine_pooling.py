"""Hidden states and scores of paged batches, beside transformers' own forward of each prompt alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tandem.core.errors import InternalError
from tandem.core.pooling import PoolingKind
from tandem.engine.engine import Engine, SequenceInput
from tandem.engine.pooler import mean_of, sum_rows
from tandem.worker.prompt_pooling import PromptPooling
from tests.support.pooling_models import embeddings_of, save_embedder, save_scorer, scores_of

PAGE = 16
PROMPTS = [[(7 * n + 3 * i) % 300 + 2 for i in range(length)] for n, length in enumerate((1, 16, 17, 70, 111))]


def pooled(engine: Engine, chunk: int) -> list[list[float]]:
    """All prompts side by side, in chunks of up to `chunk` tokens."""
    assert engine.pooling is not None
    width = -(-max(map(len, PROMPTS)) // PAGE)
    states = [PromptPooling(engine.pooling.kind) for _ in PROMPTS]
    for start in range(0, max(map(len, PROMPTS)), chunk):
        parts = []
        for number, (ids, state) in enumerate(zip(PROMPTS, states, strict=True)):
            end = min(start + chunk, len(ids))
            if start < end:
                count = state.in_step(start, end - start, len(ids))
                rows = SequenceInput(
                    ids[start:end], start, range(number * width, (number + 1) * width),
                    end - count.start if count else 0,
                )  # fmt: skip
                parts.append((state, rows, len(count), len(ids)))
        hidden = engine.forward([rows for _, rows, _, _ in parts])
        first = 0
        for state, rows, num, num_prompt in parts:
            state.take(hidden[first : first + num], rows.end, num_prompt, sum_rows)
            first += rows.num_logits
    values = [state.values(len(ids), mean_of) for state, ids in zip(states, PROMPTS, strict=True)]
    return [engine.pooling.finished(vector) for vector in values if not isinstance(vector, InternalError)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("arch", "kind"),
    [("qwen3", PoolingKind.LAST), ("llama", PoolingKind.MEAN), ("gpt2", PoolingKind.CLS), ("gemma2", PoolingKind.MEAN)],
)
def test_vectors_are_transformers_own_whatever_the_chunks(tmp_path: Path, arch: str, kind: PoolingKind) -> None:
    directory = save_embedder(tmp_path / arch, kind, arch=arch, layers=4)
    engine = Engine.load(directory, page_size=PAGE, num_pages=40, probe=False)
    wanted = embeddings_of(directory, PROMPTS, kind)
    for chunk in (16, 48, 512):
        assert torch.allclose(torch.tensor(pooled(engine, chunk)), wanted, atol=1e-5, rtol=0)


@pytest.mark.long
def test_scores_are_transformers_own(tmp_path: Path) -> None:
    directory = save_scorer(tmp_path / "scorer", arch="qwen3")
    engine = Engine.load(directory, page_size=PAGE, num_pages=40)
    wanted = scores_of(directory, PROMPTS)
    for chunk in (16, 512):
        assert [score for (score,) in pooled(engine, chunk)] == pytest.approx(wanted, abs=1e-5)


def test_a_vector_with_nan_is_an_error() -> None:
    total = sum_rows(torch.tensor([[1.0, float("nan")]]), None)
    assert isinstance(mean_of(total, 1), InternalError)
