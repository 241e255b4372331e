"""What files of a checkpoint say of pooling, and what becomes of the model's numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tandem.core.errors import ModelLoadError, UnsupportedModelError
from tandem.core.pooling import Pooling, PoolingKind, PoolingTask, read_pooling
from tests.support.pooling_models import write_modules

QWEN = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64}


def checkpoint(target: Path, **config: Any) -> Path:
    target.mkdir(exist_ok=True)
    (target / "config.json").write_text(json.dumps({**QWEN, **config}))
    return target


def test_a_checkpoint_that_says_nothing_generates(tmp_path: Path) -> None:
    assert read_pooling(checkpoint(tmp_path)) is None
    assert read_pooling(checkpoint(tmp_path, architectures=["GPT2LMHeadModel"])) is None


@pytest.mark.parametrize("kind", list(PoolingKind))
@pytest.mark.parametrize("normalizes", [True, False])
def test_modules_of_sentence_transformers_say_how(tmp_path: Path, kind: PoolingKind, normalizes: bool) -> None:
    write_modules(checkpoint(tmp_path, matryoshka_dimensions=[16, 32]), kind, normalizes=normalizes)
    wanted = Pooling(PoolingTask.EMBED, kind, normalizes=normalizes, is_matryoshka=True, dimensions=(16, 32))
    assert read_pooling(tmp_path) == wanted


def test_a_decoder_without_a_head_embeds_by_its_last_token(tmp_path: Path) -> None:
    found = read_pooling(checkpoint(tmp_path, architectures=["Qwen3Model"], is_matryoshka=True))
    assert found == Pooling(PoolingTask.EMBED, PoolingKind.LAST, normalizes=True, is_matryoshka=True)


@pytest.mark.parametrize(
    ("said", "has_sigmoid"),
    [({}, True), ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, False)],
)
def test_a_head_with_one_label_scores(tmp_path: Path, said: dict[str, Any], has_sigmoid: bool) -> None:
    directory = checkpoint(
        tmp_path, architectures=["Qwen3ForSequenceClassification"], id2label={"0": "LABEL_0"}, **said
    )
    assert read_pooling(directory) == Pooling(PoolingTask.SCORE, PoolingKind.LAST, has_sigmoid=has_sigmoid)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "bert", "architectures": ["BertModel"]}, "BertModel is an encoder.*only decoders"),
        ({"architectures": ["Gemma3TextModel"], "use_bidirectional_attention": True}, "is an encoder"),
        ({"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 3}, "has 3 labels"),
        (
            {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1,
             "sbert_ce_default_activation_function": "torch.nn.Tanh"},
            "activation Tanh",
        ),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_with_the_reason(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        read_pooling(checkpoint(tmp_path, **config))


def test_other_modules_and_other_modes_are_refused_by_name(tmp_path: Path) -> None:
    write_modules(checkpoint(tmp_path), "max")
    with pytest.raises(UnsupportedModelError, match="the pooling none is not served; known are last, cls, mean"):
        read_pooling(tmp_path)
    pooling = tmp_path / "1_Pooling" / "config.json"
    pooling.write_text(json.dumps({"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True}))
    with pytest.raises(UnsupportedModelError, match="cls_token and max_tokens"):
        read_pooling(tmp_path)
    modules = tmp_path / "modules.json"
    modules.write_text(json.dumps([*json.loads(modules.read_text()), {"type": "sentence_transformers.models.Dense"}]))
    with pytest.raises(UnsupportedModelError, match="modules of type Dense"):
        read_pooling(tmp_path)
    modules.write_text("{")
    with pytest.raises(ModelLoadError, match=r"modules\.json cannot be read"):
        read_pooling(tmp_path)


def test_vectors_are_cut_and_then_normalised() -> None:
    pooling = Pooling(PoolingTask.EMBED, PoolingKind.LAST, normalizes=True)
    assert pooling.finished([3, 4, 12]) == pytest.approx([3 / 13, 4 / 13, 12 / 13])
    assert pooling.finished([3, 4, 12], 2) == pytest.approx([0.6, 0.8])
    assert pooling.finished([0, 0]) == [0, 0]
    assert Pooling(PoolingTask.EMBED, PoolingKind.LAST).finished([3, 4, 12], 2) == [3, 4]


def test_scores_of_any_size_are_between_0_and_1() -> None:
    pooling = Pooling(PoolingTask.SCORE, PoolingKind.LAST, has_sigmoid=True)
    assert [pooling.finished([x])[0] for x in (-1000, 0, 1000)] == [0, 0.5, 1]
    assert pooling.finished([2])[0] == pytest.approx(1 / (1 + math.exp(-2)))
