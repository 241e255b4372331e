"""The calculators of `tandem plan`, against values that were counted by hand and published ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.cli import main
from tandem.core.errors import ConfigError
from tandem.plan.calculators import (
    Machine,
    Served,
    cost_per_million,
    decode_terms,
    kv_room,
    largest_batch,
    phase,
    prefill_terms,
    rates,
    roofline,
)
from tandem.plan.cards import CARDS, CardSheet, find_card
from tandem.plan.shapes import KNOWN, ModelShape, find_shape

# Parameters as published; bytes of K and V of a token in 16 bits: 2 x layers x KV heads x head size x 2.
PUBLISHED = {
    "llama-2-7b": (6.738e9, 524_288),
    "llama-2-13b": (13.016e9, 819_200),
    "llama-2-70b": (68.977e9, 327_680),
    "llama-3-8b": (8.030e9, 131_072),
    "llama-3-70b": (70.554e9, 327_680),
    "mistral-7b": (7.242e9, 131_072),
    "mixtral-8x7b": (46.703e9, 131_072),
    "qwen-2.5-7b": (7.616e9, 57_344),
    "qwen-2.5-72b": (72.706e9, 327_680),
    "bloom-176b": (176.247e9, 4_014_080),
}
#: 1,000 operations and 10 bytes a second, 1,000 bytes of memory: easy to count with.
SLOW = Machine(CardSheet("slow", 1e-9, 1e-8, 1e-6, 5), 1, 1.0, 1.0, 0.0, 1.0)
#: A layer with one head of 2 numbers: 4 x 2 + 3 x 2 x 3 = ... counted in the tests.
TINY = Served(ModelShape("tiny", 1, 2, 1, 1, 2, 3, 5), 8, "float32")


@pytest.mark.parametrize("name", list(KNOWN))
def test_known_models_are_those_that_were_published(name: str) -> None:
    parameters, token_bytes = PUBLISHED[name]
    assert KNOWN[name].num_parameters == pytest.approx(parameters, rel=1e-3)
    assert KNOWN[name].kv_bytes_per_token("bfloat16") == token_bytes
    assert KNOWN[name].kv_bytes_per_token("float32") == 2 * token_bytes
    head_dim = KNOWN[name].head_dim
    assert KNOWN[name].kv_bytes_per_token("int8") * 2 * head_dim == token_bytes * (head_dim + 4)  # with scales


def test_a_token_of_a_mixture_is_multiplied_with_its_experts_alone() -> None:
    assert KNOWN["mixtral-8x7b"].num_active == pytest.approx(12.9e9 - 32000 * 4096, rel=0.01)


def test_memory_counted_by_hand() -> None:
    # Attention 2 x 2 x 2 x (1 + 1), feed-forward 3 x 2 x 3, embedding and output 2 x 5 x 2.
    assert TINY.shape.num_parameters == 16 + 18 + 20
    assert TINY.weight_bytes == 54
    assert TINY.token_bytes == 2 * 1 * 1 * 2 * 4
    assert kv_room(TINY, SLOW) == (1000 - 54) // 16
    assert kv_room(Served(TINY.shape, 8 * 1000 / 54 + 1, "float32"), SLOW) < 0


def test_times_counted_by_hand() -> None:
    times = roofline(TINY, SLOW)
    # A prompt of 10: 2 x 44 x 10 operations (the embedding is looked up), 4 x 2 numbers for each of 55 pairs.
    prompt = phase(times, prefill_terms(10))
    assert prompt.flops == 2 * 44 * 10 + 4 * 2 * 55
    assert prompt.num_bytes == 54 + 10 * 16
    assert not prompt.is_compute_bound
    assert prompt.seconds == pytest.approx(prompt.num_bytes / 10)
    # A step of 4 sequences of 5 tokens.
    step = phase(times, decode_terms(4, 5))
    assert step.flops == 2 * 44 * 4 + 4 * 2 * 20
    assert step.num_bytes == 54 + 20 * 16
    assert step.intensity == pytest.approx(512 / 374)


def test_the_ridge_is_where_computing_and_reading_take_as_long() -> None:
    assert find_card("h100").ridge == pytest.approx(989e12 / 3.35e12)
    assert all(20 < card.ridge < 700 for card in CARDS.values())


def test_the_largest_batch_is_the_one_before_a_target_is_missed() -> None:
    # 946 // 16 = 59 tokens of room; a step of B sequences of 5 tokens reads 54 + 80 B bytes at 10 a second.
    assert largest_batch(TINY, SLOW, 5).most == 59 // 5
    bounded = largest_batch(TINY, SLOW, 5, tpot_s=(54 + 80 * 3) / 10)
    assert (bounded.of_tpot, bounded.most, bounded.bound) == (3, 3, "time per token")
    roomy = largest_batch(TINY, SLOW, 5, tpot_s=1e9)
    assert (roomy.most, roomy.bound) == (11, "KV memory")
    assert largest_batch(TINY, SLOW, 5, tpot_s=1e-3).most == 0


def test_cards_that_share_a_model_are_as_one_of_their_sum() -> None:
    model = Served(KNOWN["llama-3-70b"])
    four = Machine(CARDS["h100"], 4)
    assert four.memory_bytes == 4 * Machine(CARDS["h100"]).memory_bytes
    one_s, four_s = (roofline(model, m).seconds(decode_terms(8, 1000)) - 0.002 for m in (Machine(CARDS["h100"]), four))
    assert one_s == pytest.approx(4 * four_s)


def test_cost_follows_from_price_and_rate() -> None:
    assert cost_per_million(3.6, 1000) == pytest.approx(1.0)
    assert cost_per_million(3.6, 0) == float("inf")
    found = rates(Served(KNOWN["llama-3-8b"]), Machine(CARDS["h100"]), 1000, 200, 0.03)
    assert found.prefill > 2 * found.decode > 0


def test_a_directory_of_a_checkpoint_is_a_model_too(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen3_moe", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 999, "moe_intermediate_size": 48,
        "vocab_size": 100, "num_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = find_shape(str(tmp_path))
    assert shape == ModelShape(
        tmp_path.name, 2, 64, 4, 2, 32, 48, 100, is_tied=True, experts=8, experts_per_token=2
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64, "n_layer": 2, "n_head": 2}))
    with pytest.raises(ConfigError, match="does not say vocab_size"):
        find_shape(str(tmp_path))


SMALL = {"hidden_size": 64, "n_layer": 2, "n_head": 2, "vocab_size": 100}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ([SMALL], "must hold an object, not list"),
        (SMALL | {"n_head": 0}, "says 0 of num_attention_heads or n_head"),
        (SMALL | {"n_layer": -3}, "says -3 of num_hidden_layers or n_layer"),
        (SMALL | {"num_local_experts": -1}, "says -1 of num_local_experts"),
        (SMALL | {"n_head": 65}, "more heads than their hidden size, 64"),
    ],
)
def test_a_model_that_cannot_be_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: object, named: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", "kv", "--model", str(tmp_path)]) == 1
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("kv --model llama-3-8b --tokens 8192 --card h100", "426,788 tokens: 52 sequences of 8,192"),
        ("roofline --model llama-3-8b --card h100 --batch 1", "reading"),
        ("batch --model llama-3-8b --card h100 --tokens 4096 --tpot-ms 30", "104 (bound by KV memory)"),
        ("cost --model llama-3-8b --card h100 --price 2.5", "0.053"),
    ],
)
def test_each_calculator_is_a_command(line: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *line.split()]) == 0
    assert shown in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("kv --model none", "known: llama-2-7b"),
        ("batch --model llama-3-8b --card none", "known: a100"),
        ("cost --model llama-3-70b --card h100 --price 1", "take more cards, or fewer bits"),
    ],
)
def test_what_cannot_be_is_named(line: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *line.split()]) == 1
    assert named in capsys.readouterr().err
