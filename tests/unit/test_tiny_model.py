"""The shipped tiny model: its files, its limits, its tokenizer, and that it really recalls."""

from __future__ import annotations

import importlib
import json
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "tandem" / "models" / "tiny"
FILES = {
    "README.md",
    "chat_template.jinja",
    "config.json",
    "eval.json",
    "generation_config.json",
    "model.safetensors",
    "reference.json",
    "tokenizer.json",
    "tokenizer_config.json",
}


def read_json(name: str) -> Any:
    """Read one of the model's JSON files."""
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


def import_tool(name: str) -> ModuleType:
    """Import a tool; tools are scripts, so their folder has to be on the path."""
    pytest.importorskip("transformers")
    sys.path.insert(0, str(REPOSITORY / "tools"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


@pytest.fixture(scope="module")
def evaluation() -> ModuleType:
    """The evaluation tool as a module."""
    return import_tool("eval_tiny_model")


@pytest.fixture(scope="module")
def model(evaluation: ModuleType) -> Any:
    """The model with the attention that the references were made with."""
    return evaluation.TinyModel(FOLDER, "eager")


def test_files_are_present_and_small() -> None:
    assert {path.name for path in FOLDER.iterdir()} == FILES
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 6_000_000


def test_config_keeps_the_limits() -> None:
    config = read_json("config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["vocab_size"] <= 2048
    assert config["max_position_embeddings"] >= 2048
    assert config["num_attention_heads"] > config["num_key_value_heads"] > 1
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0
    assert config["head_dim"] % 16 == 0
    assert read_json("generation_config.json")["eos_token_id"] == config["eos_token_id"]


def test_tokenizer_and_config_agree(model: Any) -> None:
    config = read_json("config.json")
    tokenizer = model.tokenizer
    assert len(tokenizer) == config["vocab_size"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (config["bos_token_id"], config["eos_token_id"])
    assert tokenizer("Hello").input_ids[0] == tokenizer.bos_token_id


@pytest.mark.long
@given(st.text(max_size=60).filter(lambda text: "<|" not in text))
def test_any_text_round_trips(text: str) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_digits_are_tokens_of_their_own(model: Any) -> None:
    pieces = model.tokenizer.tokenize("The code for maple is 4821.")
    assert [piece.lstrip("Ġ") for piece in pieces[-5:]] == ["4", "8", "2", "1", "."]


def test_chat_template_renders(model: Any) -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": " Hello! "}]
    text = model.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|bos|><|system|>Be kind.<|eos|><|user|>Hello!<|eos|><|assistant|>"
    ids = model.tokenizer(text, add_special_tokens=False).input_ids
    assert ids[0] == model.tokenizer.bos_token_id
    assert ids.count(model.tokenizer.eos_token_id) == 2


def test_chat_template_refuses_an_unknown_role(model: Any) -> None:
    with pytest.raises(Exception, match="Unknown role"):
        model.tokenizer.apply_chat_template([{"role": "robot", "content": "Hi"}], tokenize=False)


@pytest.mark.parametrize("form", ["plain", "chat"])
def test_measured_recall_is_good_enough_to_ship(form: str) -> None:
    report = read_json("eval.json")
    assert report["recall"][form]["of"] == 100
    assert report["recall"][form]["right"] >= 75
    assert report["recall"]["tokens"] == [400, 900]
    assert len(report["training"]["curve"]) >= 5


@pytest.mark.long
@pytest.mark.parametrize("chat", [False, True])
def test_recall_now(evaluation: ModuleType, model: Any, chat: bool) -> None:
    """A few prompts of a seed that neither training nor the evaluation uses."""
    tasks = list(evaluation.recall_prompts(model, 999, 8, 400, 600, chat))
    right = sum(task["code"] in model.decode(model.generate(task["ids"], 16)) for task in tasks)
    assert right >= 5


@pytest.mark.long
def test_references_still_hold(model: Any) -> None:
    references = read_json("reference.json")
    entries = references["entries"]
    assert len(entries) >= 5
    assert {"prompt" in entry for entry in entries} == {True, False}
    for entry in entries:
        assert entry["smallest_logit_gap"] > 2e-3
        ids = model.encode(entry.get("prompt", entry.get("messages")))
        assert ids == entry["prompt_token_ids"]
        assert model.generate(ids, len(entry["token_ids"])) == entry["token_ids"]


def test_the_corpus_is_a_function_of_the_seed(evaluation: ModuleType) -> None:
    corpus = evaluation.corpus
    first, second = (corpus.recall_task(random.Random(3), 300, 4, 2) for _ in range(2))
    assert first == second
    assert all(f"the code for {key} is {code}." in first.context.lower() for key, code in first.codes)
    assert not any(character.isdigit() for character in corpus.story(random.Random(4)))


def test_a_training_batch_is_a_function_of_seed_and_step() -> None:
    trainer = import_tool("train_tiny_model")
    tokenizer = trainer.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    stage = trainer.Stage(1.0, 256, 4, 0.25, 0.75)
    first, second, other = (trainer.Batches(tokenizer, 5).batch(step, stage) for step in (1, 1, 2))
    assert first.ids.tolist() == second.ids.tolist() != other.ids.tolist()
    # Every source is the same digit stated earlier, and is counted as recall rather than as text.
    marked = (first.sources >= 0).nonzero().tolist()
    assert marked
    for row, query in marked:
        source = int(first.sources[row, query])
        assert source <= query
        assert first.ids[row, source] == first.ids[row, query + 1]
        assert first.recall[row, query]
        assert not first.text[row, query]
