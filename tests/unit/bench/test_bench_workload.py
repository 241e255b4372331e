"""Traces as they lie on disk, and the prompts and arrivals made from them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.bench.load.trace_entry import TraceEntry
from tandem.bench.load.traces import cut_to, load_trace, scaled
from tandem.bench.load.workload import (
    body_of,
    fixed_lengths,
    make_jobs,
    plain_vocabulary,
    poisson_arrivals,
    warm_up_jobs,
)
from tandem.core.errors import ConfigError
from tandem.core.tokenizer import Tokenizer
from tests.support.router_site import BOS, EOS, write_checkpoint

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.9951690,396,109"  # as published: no newline at the end
)
MOONCAKE = [
    {"timestamp": 27482, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 48]},
    {"timestamp": 27000, "input_length": 600, "output_length": 5, "hash_ids": [46, 99]},
]
VOCABULARY = range(100, 400)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_dir(write_checkpoint(tmp_path_factory.mktemp("toy")))


def written(tmp_path: Path, text: str, name: str = "trace") -> Path:
    path = tmp_path / name
    path.write_bytes(text.encode())
    return path


def test_azure_is_read_as_it_is_published(tmp_path: Path) -> None:
    first, second = load_trace(written(tmp_path, AZURE))
    assert (first.num_input, first.num_output, first.arrival_s) == (374, 44, 0.0)
    assert (second.num_input, second.num_output) == (396, 109)
    assert second.arrival_s == pytest.approx(4.314579, abs=1e-5)
    assert load_trace(written(tmp_path, AZURE), limit=1) == [first]


def test_the_azure_traces_of_2024_name_their_zone(tmp_path: Path) -> None:
    text = AZURE.replace("6805900", "680590+00:00").replace("9951690", "995169+00:00")
    assert load_trace(written(tmp_path, text))[1].arrival_s == pytest.approx(4.314579, abs=1e-5)


def test_mooncake_is_put_in_order_of_arrival(tmp_path: Path) -> None:
    text = "\n".join(json.dumps(row) for row in MOONCAKE)
    first, second = load_trace(written(tmp_path, text))
    assert (first.num_input, first.arrival_s, first.block_ids) == (600, 0.0, (46, 99))
    assert (second.num_output, second.arrival_s) == (52, pytest.approx(0.482))


def test_sharegpt_takes_the_first_question_and_its_answer(tmp_path: Path, tokenizer: Tokenizer) -> None:
    turns = [{"from": "human", "value": "abc"}, {"from": "gpt", "value": "de"}, {"from": "human", "value": "more"}]
    text = json.dumps([{"id": "1", "conversations": turns[:1]}, {"id": "2", "conversations": turns}, {"id": "3"}])
    (entry,) = load_trace(written(tmp_path, text), tokenizer=tokenizer)
    assert (entry.num_input, entry.num_output, entry.arrival_s) == (3, 2, None)
    assert tokenizer.decode(entry.token_ids) == "abc"
    with pytest.raises(ConfigError, match="--tokenizer"):
        load_trace(written(tmp_path, text))


GOOD = {"timestamp": 1, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 3: this is no JSON"),
        ("[1]", "line 3: this is no JSON object"),
        ({"timestamp": 2}, "line 3: input_length is missing"),
        (GOOD | {"input_length": 600.5}, "line 3: input_length must be a whole number of at least 1, not 600.5"),
        (GOOD | {"input_length": "600"}, 'line 3: input_length must be a whole number of at least 1, not "600"'),
        (GOOD | {"input_length": 0}, "line 3: input_length"),
        (GOOD | {"output_length": True}, "line 3: output_length must be a whole number of at least 0, not true"),
        (GOOD | {"timestamp": -1}, "line 3: timestamp must be a number of milliseconds, not -1"),
        (GOOD | {"hash_ids": [1, "2"]}, "line 3: hash_ids must be a list of whole numbers"),
        (GOOD | {"hash_ids": [1, 2, 3]}, "names 3 blocks, but 600 tokens are 2 blocks of 512; .* --block-size"),
    ],
)
def test_a_bad_line_of_mooncake_is_named(tmp_path: Path, line: object, said: str) -> None:
    lines = [json.dumps(GOOD), "", line if isinstance(line, str) else json.dumps(line)]
    path = written(tmp_path, "\n".join(lines))
    with pytest.raises(ConfigError, match=f"no mooncake trace: .*{said}|no mooncake trace: {said}"):
        load_trace(path)
    assert load_trace(path, limit=1)[0].block_ids == (1, 2)


def test_blocks_may_have_another_length(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 33, "output_length": 0, "hash_ids": [5, 6, 7]}
    (entry,) = load_trace(written(tmp_path, json.dumps(row)), block_size=16)
    assert (entry.block_size, entry.block_ids) == (16, (5, 6, 7))
    assert scaled([entry])[0].num_output == 1


@pytest.mark.parametrize(
    ("text", "format", "said"),
    [
        ("hello", None, "looks like none of"),
        ("", None, "looks like none of"),
        (AZURE.splitlines()[0], None, "holds no request"),
        (AZURE.replace("374", "many"), None, r"no azure trace: ValueError: line \d: invalid"),
        (AZURE.replace("374", "-374"), None, r"line \d: no prompt or output has -374 tokens"),
        (AZURE.replace(",374,44", ""), None, "no azure trace"),
        (AZURE, "mooncake", "no mooncake trace"),
        ('{"timestamp": 1, "input_length": 2, "output_length": 3}\n{"timestamp": 2}', None, "no mooncake trace"),
    ],
)
def test_what_is_no_trace_is_said_so(tmp_path: Path, text: str, format: str | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_trace(written(tmp_path, text), format)  # type: ignore[arg-type]


def test_a_trace_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name an existing file with --trace"):
        load_trace(tmp_path / "none")


def test_lengths_and_times_are_scaled() -> None:
    (entry,) = scaled([TraceEntry(374, 3, 4.0, block_size=512)], lengths=0.125, time=0.5)
    assert entry == TraceEntry(47, 1, 2.0, block_size=64)


@pytest.mark.long
@given(
    lengths=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 50)), min_size=1, max_size=8),
    seed=st.text(max_size=3),
)
def test_prompts_have_exactly_their_length_and_no_other_ids(lengths: list[tuple[int, int]], seed: str) -> None:
    entries = [TraceEntry(num_input, num_output) for num_input, num_output in lengths]
    jobs = make_jobs(entries, vocabulary=VOCABULARY, seed=seed)
    assert [(len(job.prompt_ids), job.num_output) for job in jobs] == lengths
    assert {token_id for job in jobs for token_id in job.prompt_ids} <= set(VOCABULARY)
    assert jobs == make_jobs(entries, vocabulary=VOCABULARY, seed=seed)


def test_seeds_and_numbers_have_prompts_of_their_own() -> None:
    entries = fixed_lengths(3, 32, 1)
    jobs = [make_jobs(entries, vocabulary=VOCABULARY, seed=seed) for seed in ("1", "2")]
    warm = warm_up_jobs(2, jobs[0][0], vocabulary=VOCABULARY, seed="1")
    assert [len(job.prompt_ids) for job in warm] == [32, 32]
    assert len({job.prompt_ids for group in (*jobs, warm) for job in group}) == 8


def test_equal_blocks_have_equal_content() -> None:
    entries = [TraceEntry(1100, 1, block_ids=(46, 47, 48)), TraceEntry(600, 1, block_ids=(46, 99))]
    first, second = (job.prompt_ids for job in make_jobs(entries, vocabulary=VOCABULARY, seed="1"))
    assert (len(first), len(second)) == (1100, 600)
    assert first[:512] == second[:512]
    assert first[512:600] != second[512:600]
    eighth = make_jobs(scaled(entries, lengths=0.125), vocabulary=VOCABULARY, seed="1")
    assert eighth[0].prompt_ids[:64] == eighth[1].prompt_ids[:64]
    assert eighth[0].prompt_ids[64:75] != eighth[1].prompt_ids[64:75]


def test_recorded_texts_are_cut_or_said_again() -> None:
    text = TraceEntry(3, 1, token_ids=(7, 8, 9))
    jobs = make_jobs([*scaled([text], lengths=0.5), *scaled([text], lengths=2.4)], vocabulary=VOCABULARY, seed="1")
    assert [len(job.prompt_ids) for job in jobs] == [2, 7]
    assert jobs[1].prompt_ids[4:] == (8, 9, 7)


def test_recorded_texts_begin_otherwise_with_each_seed_and_number() -> None:
    text = TraceEntry(12, 1, token_ids=tuple(range(12)), num_special=1)
    of_seeds = [
        [job.prompt_ids for job in make_jobs([text] * 3, vocabulary=VOCABULARY, seed=seed)]
        for seed in ("1", "1:1", "1")
    ]
    prompts = {*of_seeds[0], *of_seeds[1]}
    assert of_seeds[0] == of_seeds[2]
    assert len({prompt[1:5] for prompt in prompts}) == 6
    assert {(prompt[0], prompt[5:]) for prompt in prompts} == {(0, tuple(range(5, 12)))}
    assert {token_id for prompt in prompts for token_id in prompt[1:5]} <= set(VOCABULARY)
    short = make_jobs([TraceEntry(1, 1, token_ids=(0,), num_special=1)], vocabulary=VOCABULARY, seed="1")
    assert short[0].prompt_ids == (0,)


def test_a_recorded_text_tells_what_stands_before_it(tmp_path: Path, tokenizer: Tokenizer) -> None:
    class Beginning:
        """A tokenizer that puts its beginning before each text."""

        is_special = staticmethod(tokenizer.is_special)

        @staticmethod
        def encode(text: str, add_special_tokens: bool = True) -> list[int]:
            return [BOS] * add_special_tokens + tokenizer.encode(text)

    turns = [{"from": "human", "value": "abc"}, {"from": "gpt", "value": "de"}]
    path = written(tmp_path, json.dumps([{"conversations": turns}]))
    (plain,) = load_trace(path, tokenizer=tokenizer)
    (begun,) = load_trace(path, tokenizer=cast(Tokenizer, Beginning()))
    assert [(entry.num_input, entry.num_special) for entry in (plain, begun)] == [(3, 0), (4, 1)]


def test_what_is_too_long_is_cut_at_its_end() -> None:
    entries = [TraceEntry(100, 28, block_ids=(1,)), TraceEntry(2000, 28, block_ids=(1, 2, 3, 4)), TraceEntry(10, 400)]
    fitting, cut = cut_to(entries, 128)
    assert [(entry.num_input, entry.num_output) for entry in fitting] == [(100, 28), (100, 28), (10, 118)]
    assert fitting[1].block_ids == (1,)
    assert (cut.num_requests, cut.num_cut) == (3, 2)
    assert str(cut) == (
        "2 of 3 requests are cut to 128 tokens: 10.0% of the prompt tokens and 38.2% of the output tokens are left"
    )
    (both,), _ = cut_to([TraceEntry(1000, 1000)], 128)
    assert (both.num_input, both.num_output) == (64, 64)


def test_a_job_knows_how_much_of_it_was_sent_before() -> None:
    entries = [
        TraceEntry(1100, 1, block_ids=(46, 47, 48)), TraceEntry(600, 1, block_ids=(46, 47)),
        TraceEntry(600, 1, block_ids=(9, 47)), TraceEntry(8, 1), TraceEntry(3, 1, token_ids=(7, 8, 9)),
    ]  # fmt: skip
    jobs = make_jobs(entries, vocabulary=VOCABULARY, seed="1")
    assert [job.num_repeated for job in jobs] == [0, 600, 0, 0, 0]
    assert jobs[1].prompt_ids == jobs[0].prompt_ids[:600]


def test_special_tokens_are_not_drawn(tokenizer: Tokenizer) -> None:
    vocabulary = plain_vocabulary(tokenizer)
    assert not {BOS, EOS} & set(vocabulary)
    assert len(vocabulary) > 250


def test_an_empty_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match="vocabulary"):
        make_jobs(fixed_lengths(1, 1, 1), vocabulary=(), seed="1")


@given(num=st.integers(1, 200), rate=st.floats(0.01, 1000))
def test_poisson_arrivals_fill_their_time(num: int, rate: float) -> None:
    times = poisson_arrivals(num, rate, "1")
    assert times == sorted(times)
    assert len(times) == num
    assert times[0] > 0
    assert times[-1] == pytest.approx(num / rate)
    assert poisson_arrivals(num, rate * 2, "1") == pytest.approx([time / 2 for time in times])


def test_gaps_of_a_poisson_process_are_exponential() -> None:
    times = poisson_arrivals(5000, 10.0, "1")
    gaps = [b - a for a, b in itertools.pairwise(times)]
    # Of an exponential distribution with mean 0.1 a share of 1 / e lies above 0.1; of even gaps, none or all would.
    assert sum(gap > 0.1 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03)


def test_a_body_asks_for_exact_greedy_tokens() -> None:
    (job,) = make_jobs(fixed_lengths(1, 4, 9), vocabulary=range(5, 6), seed="1")
    body = json.loads(body_of(job, "toy", ignore_eos=True))
    assert body == {
        "model": "toy",
        "prompt": [5, 5, 5, 5],
        "max_tokens": 9,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    assert "ignore_eos" not in json.loads(body_of(job, "toy", ignore_eos=False))
