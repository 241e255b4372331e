"""The calculators of `tandem plan`, against values that were counted by hand and published ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.cli import main
from tandem.core.cards import CARDS, CardSheet, find_card
from tandem.core.config import CacheConfig
from tandem.core.errors import ConfigError
from tandem.core.worker_types import Machine, cost_per_million
from tandem.plan.calculators import (
    Served,
    decode_terms,
    kv_room,
    largest_batch,
    phase,
    prefill_terms,
    rates,
    roofline,
)
from tandem.plan.report import said_of_windows
from tandem.plan.shapes import KNOWN, ModelShape, find_shape

# Parameters as published; bytes of K and V of a token in 16 bits: 2 x layers x KV heads x head size x 2.
PUBLISHED = {
    "llama-2-7b": (6.738e9, 524_288),
    "llama-2-13b": (13.016e9, 819_200),
    "llama-2-70b": (68.977e9, 327_680),
    "llama-3-8b": (8.030e9, 131_072),
    "llama-3-70b": (70.554e9, 327_680),
    "mistral-7b": (7.242e9, 131_072),
    "mistral-7b-v0.1": (7.242e9, 131_072),
    "mixtral-8x7b": (46.703e9, 131_072),
    "qwen-2.5-7b": (7.616e9, 57_344),
    "qwen-2.5-72b": (72.706e9, 327_680),
    "gemma-2-9b": (9.242e9, 344_064),
    "gemma-3-27b": (27.016e9, 507_904),  # 1,416 and 25,600 million, without the encoder of images
    "gpt-oss-20b": (20.91e9, 49_152),
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


def test_a_model_whose_layers_all_have_a_window_counted_by_hand() -> None:
    """Mistral 7B v0.1: 32 layers of 8 heads of 128 in 16 bits, which see 4,096 tokens."""
    model, h100 = Served(KNOWN["mistral-7b-v0.1"]), Machine(CARDS["h100"])
    # 131,072 bytes a token; nothing more of a text beyond its window, and of the 256 tokens of a GPU's block.
    assert [model.sequence_bytes(num) for num in (1, 4096, 4352, 4353, 32_768)] == [
        131_072, 536_870_912, 570_425_344, 570_425_344, 570_425_344,
    ]  # fmt: skip
    # 72e9 - 14,482,931,712 bytes have room for 438,820 tokens.
    assert kv_room(model, h100) == 438_820
    assert largest_batch(model, h100, 4096).of_memory == 438_820 // 4096 == 107
    assert largest_batch(model, h100, 32_768).of_memory == 438_820 // 4352 == 100
    assert largest_batch(Served(KNOWN["mistral-7b"]), h100, 32_768).of_memory == 438_820 // 32_768 == 13
    times = roofline(model, Machine(CARDS["h200"]))
    # Of 8 texts of 32,768 tokens a step reads 14,482,931,712 bytes of weights and 8 windows, at 0.8 x 4.8e12 a second.
    step = phase(times, decode_terms(8, 32_768, times.windows))
    assert step.num_bytes == model.weight_bytes + 8 * 4096 * 131_072
    assert step.seconds == pytest.approx(0.002 + 18_777_899_008 / 3.84e12, rel=1e-5)
    assert step.seconds == phase(times, decode_terms(8, 4096, times.windows)).seconds
    # The first 4,096 tokens of a prompt see 1, 2, … tokens, all others 4,096.
    prompt = phase(times, prefill_terms(32_768, times.windows))
    num_pairs = 4096 * 4097 // 2 + (32_768 - 4096) * 4096
    assert prompt.flops == 2 * model.shape.num_active * 32_768 + 4 * 32 * 4096 * num_pairs
    assert phase(times, prefill_terms(4096, times.windows)) == phase(times, prefill_terms(4096))


def test_a_model_of_which_some_layers_have_a_window_counted_by_hand() -> None:
    """Gemma 3 27B: of 62 layers of 16 heads of 128 ten see all, and the others 1,024 tokens."""
    model = Served(KNOWN["gemma-3-27b"])
    # Pages of all tokens stay: 507,904 bytes a token, below the window and above.
    assert [model.sequence_bytes(num) for num in (1, 1024, 1025, 32_768)] == [
        507_904, 1024 * 507_904, 1025 * 507_904, 32_768 * 507_904,
    ]  # fmt: skip
    assert kv_room(model, Machine(CARDS["h200"])) == (126.9e9 - model.weight_bytes) // 507_904 == 143_499
    assert largest_batch(model, Machine(CARDS["h200"]), 32_768).of_memory == 143_499 // 32_768 == 4
    times = roofline(model, Machine(CARDS["h200"]))
    read = [times.model.num_bytes(decode_terms(1, num, times.windows)) for num in (1023, 1024, 1025, 32_768)]
    # A token more costs 62 x 8,192 bytes below the window, and 10 x 8,192 above it.
    assert read[1] - read[0] == 507_904
    assert read[2] - read[1] == pytest.approx(81_920)
    assert read[3] - read[1] == pytest.approx(81_920 * (32_768 - 1024))
    assert times.seconds(decode_terms(8, 32_768, times.windows)) == pytest.approx(
        0.002 + (model.weight_bytes + 8 * (10 * 32_768 + 52 * 1024) * 8192) / 3.84e12
    )
    prompt = times.model.flops(prefill_terms(32_768, times.windows)) - 2 * model.shape.num_active * 32_768
    of_all, of_window = 32_768 * 32_769 // 2, 1024 * 1025 // 2 + (32_768 - 1024) * 1024
    assert prompt == pytest.approx(4 * 32 * 128 * (10 * of_all + 52 * of_window))


def test_of_a_mixed_model_on_a_cpu_the_pages_that_it_holds_counted_by_hand() -> None:
    """Of Gemma 3 27B a page has 32 tokens of ten layers of 8,192 bytes; of each 32 tokens there is one page for the
    layers that see all, and within the window six more."""
    model, epyc = Served(KNOWN["gemma-3-27b"]), Machine(CARDS["epyc-9654"])
    page = 32 * 10 * 8192
    held = [model.sequence_bytes(num, on_cpu=True) for num in (1, 1024, 1025, 32_768)]
    # Of 32,768 tokens the first 992 places are behind the window of the next one: (32,768 - 1,023) // 32.
    assert held == [7 * page, 7 * 32 * page, 7 * 33 * page, (1024 + 6 * 32) * page]
    assert held[-1] == 3040 << 20
    assert model.sequence_bytes(32_768) == 15_872 << 20
    room = kv_room(model, epyc)
    assert room == (691.2e9 - model.weight_bytes) // 507_904 == 1_254_536
    assert largest_batch(model, epyc, 32_768).of_memory == room * 507_904 // page // 1216 == 199
    keeps_all = replace(model, cache=CacheConfig(mixed_windows=False))
    assert largest_batch(keeps_all, epyc, 32_768).of_memory == room // 32_768
    # GPT-OSS 20B: every other one of 24 layers of 2,048 bytes sees 128 tokens: 126 places behind them, and 4 within.
    oss = Served(KNOWN["gpt-oss-20b"])
    assert oss.sequence_bytes(4160, on_cpu=True) == (130 + 4) * 32 * 12 * 2048
    assert oss.sequence_bytes(4160) == 4160 * 24 * 2048
    smaller = replace(oss, cache=CacheConfig(page_size=16))
    assert smaller.sequence_bytes(4160, on_cpu=True) == (260 + 8) * 16 * 12 * 2048


def test_why_pages_are_kept_is_said() -> None:
    few = ModelShape("few", 6, 8, 1, 1, 8, 8, 8, window=16, full_layers=4)
    said = {
        (few, True): "K and V of all tokens are kept all the same, since more layers see all of them.",
        (few, False): "all the same, since decode steps of GPUs have one table of pages for all layers.",
        (KNOWN["gpt-oss-20b"], True): "behind these, workers on CPUs give back 1 of the 2 pages of 12 layers that",
        (KNOWN["mistral-7b-v0.1"], True): "K and V of the last 4,096 are kept.",
    }
    for (shape, on_cpu), words in said.items():
        assert words in said_of_windows(Served(shape), on_cpu=on_cpu)
    off = Served(KNOWN["gpt-oss-20b"], cache=CacheConfig(mixed_windows=False))
    assert "all the same, since cache.mixed_windows is off." in said_of_windows(off, on_cpu=True)


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
    slides = {"use_sliding_window": True, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
    (tmp_path / "config.json").write_text(json.dumps(config | slides))
    assert find_shape(str(tmp_path)) == replace(shape, window=16, full_layers=1)
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
        (SMALL | {"model_type": "mistral", "sliding_window": -5}, "says -5 of sliding_window"),
        (
            SMALL | {"sliding_window": 8, "layer_types": "sliding_attention"},
            "must have a list of layer_types, not 'slid",
        ),
        (
            SMALL
            | {"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 8, "no_rope_layer_interval": 0},
            "no windows of layers that can be",
        ),
        (SMALL | {"model_type": "mistral", "sliding_window": "wide"}, "no windows of layers that can be"),
        (
            SMALL | {"sliding_window": 8, "layer_types": ["sliding_attention"]},
            "of 2 layers the kinds of 1 (layer_types)",
        ),
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
        ("kv --model mistral-7b-v0.1 --tokens 32768 --card h100", "438,820 tokens: 100 sequences of 32,768"),
        (
            "kv --model mistral-7b-v0.1",
            "In all layers a token sees the last 4,096 tokens; K and V of the last 4,352 are",
        ),
        (
            "kv --model gpt-oss-20b",
            "In 12 of 24 layers a token sees the last 128 tokens; K and V of all tokens are kept",
        ),
        ("kv --model gpt-oss-20b --tokens 8192", "384.0 MiB"),
        ("kv --model gpt-oss-20b --tokens 8192 --card epyc-9654", "195.0 MiB"),
        (
            "batch --model gemma-3-27b --card epyc-9654",
            "behind these, workers on CPUs give back 6 of the 7 pages of 10 layers that each 32 tokens have.",
        ),
        ("roofline --model llama-3-8b --card h100 --batch 1", "reading"),
        ("batch --model llama-3-8b --card h100 --tokens 4096 --tpot-ms 30", "104 (bound by KV memory)"),
        ("cost --model llama-3-8b --card h100 --price 2.5", "0.053"),
        ("cost --model llama-3-8b --card h100 --price 2 --tpot-ms 1", "8.05 ms for one request alone; raise --tpot-ms"),
        ("cost --model llama-3-8b --card h100 --price 2 --input 500000", "has no room for the K and V of one request"),
    ],
)
def test_each_calculator_is_a_command(line: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *line.split()]) == 0
    assert shown in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("kv --model none", "(nothing is downloaded); known: llama-2-7b"),
        ("kv --model meta-llama/Llama-3-8B", "did you mean llama-3-8b?"),
        ("kv --model /proc", "/proc has no config.json"),
        ("kv --model llama-3-8b --cards 2", "name it with --card"),
        ("batch --model llama-3-8b --card none", "known: a100"),
        ("batch --model llama-3-8b --card H100", "did you mean h100?"),
        ("roofline --model llama-3-70b --card h100", "take more cards, or fewer bits"),
        ("cost --model llama-3-70b --card h100 --price 1", "take more cards, or fewer bits"),
    ],
)
def test_what_cannot_be_is_named(line: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *line.split()]) == 1
    assert named in capsys.readouterr().err
