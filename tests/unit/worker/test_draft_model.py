"""A small model beside a large one: what it proposes, and which ones are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from tandem.core.config import EMBEDDED_MODEL, from_dict
from tandem.core.errors import ConfigError, ModelLoadError
from tandem.core.sampling import SampleRow, SamplingParams, SequenceState
from tandem.engine.engine import Engine, SequenceInput
from tandem.engine.random_model import ModelSpec, make_tokenizer, save
from tandem.worker.draft_model import DraftModel, load_draft
from tandem.worker.drafts import DraftInput

SMALL = ModelSpec(hidden=32, layers=1, heads=2, kv_heads=1, intermediate=64, vocab=300, max_positions=128)
TEXT = [7, 200, 31, 5, 90]


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(SMALL, tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(target_dir: Path) -> Engine:
    return Engine.load(target_dir, page_size=16, num_pages=4, num_threads=1, probe=False)


def tokens_of(directory: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    tokenizer.save_pretrained(directory)
    return directory


def loaded(target: Engine, target_dir: Path, draft: str | Path, **given: Any) -> Engine:
    config = from_dict({"cache": {"page_size": 16}, "speculation": {"draft_model": str(draft), **given}})
    engine = load_draft(config, target, target_dir, num_threads=1, weight_register=None)
    assert engine is not None
    return engine


@pytest.fixture(scope="module")
def itself(target: Engine, target_dir: Path) -> Engine:
    return loaded(target, target_dir, target_dir, draft_memory_bytes=1 << 20)


def asked(params: SamplingParams, position: int = 0) -> SampleRow:
    return SampleRow(SequenceState(TEXT), params, 0, position)


def test_without_a_draft_there_is_none(target: Engine, target_dir: Path) -> None:
    assert load_draft(from_dict({}), target, target_dir, num_threads=1, weight_register=None) is None


def test_it_has_pages_of_its_own_within_their_bound(target: Engine, itself: Engine) -> None:
    assert itself.arena is not target.arena
    assert itself.arena.num_bytes <= 1 << 20 < itself.arena.num_bytes + itself.layout.page_bytes


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_model_itself_proposes_what_the_step_draws(target: Engine, itself: Engine, temperature: float) -> None:
    propose, params = DraftModel(itself, target.vocab_size, target.sampler()), SamplingParams(temperature, seed=3)
    for position in range(8):
        row = asked(params, position)
        ((drawn,),) = target.sampler()(target.forward([SequenceInput(TEXT, 0, [0])]), [[row]])
        chunk = DraftInput(TEXT[:3], 0, [1], None)
        assert propose([chunk]) == [None]
        assert propose([DraftInput(TEXT[3:], 3, [1], row), chunk]) == [drawn.token_id, None]  # type: ignore[union-attr]


@pytest.mark.parametrize("rows", [290, 320])
def test_rows_beyond_the_tokens_may_differ(target: Engine, tmp_path: Path, rows: int) -> None:
    """Families pad the embeddings of their models to other sizes; what one has no row for, it does not propose."""
    tokenizer = make_tokenizer(280)
    wide = tokens_of(save(SMALL, tmp_path / "wide"), tokenizer)
    other = tokens_of(save(ModelSpec(**{**vars(SMALL), "vocab": rows}), tmp_path / "other"), tokenizer)
    draft = loaded(target, wide, other, draft_memory_bytes=1 << 20)
    assert draft.vocab_size == rows
    params = SamplingParams(seed=5, logit_bias=tuple((token, -50.0) for token in range(285)))
    propose = DraftModel(draft, target.vocab_size, target.sampler())
    found = [propose([DraftInput(TEXT, 0, [0], asked(params, position))])[0] for position in range(30)]
    assert all(token is not None and 285 <= token < min(rows, 300) for token in found)


def test_logits_of_which_nothing_can_be_drawn_propose_nothing(target: Engine, itself: Engine) -> None:
    itself.arena.tensor[:, 5].fill_(float("nan"))
    propose = DraftModel(itself, target.vocab_size, target.sampler())
    broken, whole = (DraftInput([5], 4, [page], asked(SamplingParams())) for page in (5, 6))
    found = propose([broken, whole])
    assert found[0] is None
    assert found[1] is not None


def test_other_tokens_are_refused_by_the_first(target: Engine, target_dir: Path, tmp_path: Path) -> None:
    fewer = tokens_of(save(SMALL, tmp_path / "fewer"), make_tokenizer(299))
    with pytest.raises(ConfigError, match="has 299 tokens, the model 300; name a model of the same family") as caught:
        loaded(target, target_dir, fewer)
    assert caught.value.key == "speculation.draft_model"
    text = (target_dir / "tokenizer.json").read_text()
    swapped = save(SMALL, tmp_path / "swapped")
    assert text.count('"Ġw299"') == text.count('"Ġw298"') == 1
    exchanged = text.replace('"Ġw299"', '"other"').replace('"Ġw298"', '"Ġw299"').replace('"other"', '"Ġw298"')
    (swapped / "tokenizer.json").write_text(exchanged)
    with pytest.raises(ConfigError, match="token 298 as 'Ġw299', the model as 'Ġw298'"):
        loaded(target, target_dir, swapped)


def test_what_cannot_be_loaded_or_is_of_no_use_is_refused(target: Engine, target_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="there is no directory"):
        loaded(target, target_dir, tmp_path / "nothing")
    broken = save(SMALL, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ModelLoadError, match="safetensors"):
        loaded(target, target_dir, broken)
    with pytest.raises(ConfigError, match="has another vocabulary"):
        loaded(target, target_dir, EMBEDDED_MODEL)
    scores = save(SMALL, tmp_path / "scores")
    config = json.loads((scores / "config.json").read_text())
    one_label = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
    (scores / "config.json").write_text(json.dumps(config | one_label))
    with pytest.raises(ConfigError, match="name a model that generates"):
        loaded(target, target_dir, scores)
    assert torch.isfinite(target.forward([SequenceInput(TEXT, 0, [0])])).all()
