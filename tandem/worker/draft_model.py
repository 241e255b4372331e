"""The small model of a worker that proposes what may come next: its engine, and how it draws."""

from __future__ import annotations

from collections.abc import Sequence as SeqOf
from pathlib import Path

from tandem.core.config import Config
from tandem.core.draft import DRAFT_KEY, check_vocabularies
from tandem.core.errors import ConfigError, TandemError
from tandem.core.model_path import resolve_model
from tandem.core.pooling import read_pooling
from tandem.core.sampling import SampledToken
from tandem.engine.engine import Engine, SequenceInput
from tandem.engine.sampler import Logits
from tandem.worker.drafts import DraftInput
from tandem.worker.step import SampleTokens
from tandem.worker.step_engine import StepEngine

# Below whatever a model gives, and finite: sampling sorts out what is not.
_NEVER = -1e30


class DraftModel:
    """The `DraftPass` of an engine.

    Args:
        vocab_size: of the model that it proposes to; only the part behind the tokenizer's tokens may differ.
        sample: draws as that model's tokens are drawn.
    """

    def __init__(self, engine: Engine, vocab_size: int, sample: SampleTokens) -> None:
        self.engine = engine
        self._vocab_size = vocab_size
        self._sample = sample

    def __call__(self, inputs: SeqOf[DraftInput]) -> list[int | None]:
        logits = self.engine.forward(
            [SequenceInput(each.token_ids, each.start, each.pages, int(each.row is not None)) for each in inputs]
        )
        rows = [[each.row] for each in inputs if each.row is not None]
        sampled = iter(self._sample(_as_wide(logits, self._vocab_size), rows) if rows else ())
        return [_token(*next(sampled)) if each.row is not None else None for each in inputs]


def _as_wide(logits: Logits, vocab_size: int) -> Logits:
    """`[rows, vocab_size]`: what is beyond is cut off, and what is missing is never drawn."""
    num_rows, size = logits.shape
    if size >= vocab_size:
        return logits[:, :vocab_size]
    wide = logits.new_full((num_rows, vocab_size), _NEVER)
    wide[:, :size] = logits
    return wide


def _token(sampled: SampledToken | TandemError) -> int | None:
    """A row from which nothing can be drawn proposes nothing."""
    return None if isinstance(sampled, TandemError) else sampled.token_id


def load_draft(
    config: Config, target: StepEngine, target_dir: Path, *, num_threads: int, weight_register: Path | None
) -> Engine | None:
    """The engine of `speculation.draft_model`, ready to compute, with pages of its own; `None`: there is none.

    Args:
        target, target_dir: the model to which it proposes.
        num_threads, weight_register: as of `Engine.load`.

    Raises:
        ModelLoadError, UnsupportedModelError: it is not there, or cannot be served.
        ConfigError: it does not go with the model that is served; says why.
    """
    wanted = config.speculation
    if not wanted.draft_model:
        return None
    if not target.on_cpu or target.pooling is not None:
        why = "it pools and generates nothing" if target.pooling is not None else "proposals are made on CPUs only"
        raise ConfigError(f"{DRAFT_KEY} has no use with this model: {why}; leave it out", key=DRAFT_KEY)
    draft_dir = resolve_model(wanted.draft_model)
    if read_pooling(draft_dir) is not None:
        raise ConfigError(f"{DRAFT_KEY} {draft_dir} pools; name a model that generates", key=DRAFT_KEY)
    check_vocabularies(target_dir, draft_dir)
    draft = Engine.load(
        draft_dir,
        quantize=wanted.draft_quantize,
        page_size=config.cache.page_size,
        kv_bytes=wanted.draft_memory_bytes,
        num_threads=num_threads,
        weight_register=weight_register,
        kernels=config.model.kernels,
    )
    draft.warmup(0)
    return draft
