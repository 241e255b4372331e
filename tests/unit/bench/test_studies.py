"""Studies on simulated clusters: the effect that each is about is there, and the page that tells of it."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import __main__ as benchmarks_main
from benchmarks.line_plot import Line, Panel, svg
from benchmarks.studies import (
    batching,
    chunk_size,
    link,
    memory,
    mixed_pool,
    page_size,
    slow_link,
    split,
    worker_dies,
)
from benchmarks.studies.catalogue import STUDIES
from benchmarks.studies.command import run
from benchmarks.studies.page import FORMAT, page, plots
from benchmarks.studies.schedulers import Runs, StaticScheduler, contiguous
from benchmarks.studies.study import SCENARIOS, Found, Study, Value, by_labels, merged
from tandem.bench.report.json_file import read_format, write
from tandem.core.pages import PagePool
from tandem.core.sampling import SamplingParams
from tandem.worker.batch import SchedulerLimits
from tandem.worker.scheduler import BatchScheduler
from tandem.worker.sequence import Sequence as Choice

ROOT = Path(__file__).resolve().parents[3]
PAGE, TOKEN = 4, 7
LIMITS = SchedulerLimits(max_num_seqs=3, max_num_batched_tokens=64, chunk_size=16, queue_bound=100)


def few(study: Study, *labels: str, num: int = 250, **load: Any) -> Found:
    """Of the values with these labels, with fewer requests."""
    values = [value for value in study.values if value.label in labels]
    assert len(values) == len(labels)
    tree = {"load": {"requests": num, **load}}
    values = [Value(one.label, merged(one.tree, tree)) for one in values]
    return by_labels(list(replace(study, values=values).measure()))


@pytest.mark.long
@pytest.mark.faults
def test_continuous_batches_serve_more_where_lengths_vary_and_hardly_more_where_they_are_alike() -> None:
    varying = few(batching.STUDY, "32")
    static, continuous = (varying[variant, "32"] for variant in (batching.STATIC, batching.CONTINUOUS))
    assert continuous["tokens_per_s"] > 1.8 * static["tokens_per_s"]
    assert continuous["num_running"] > 1.8 * static["num_running"]
    alike = few(batching.STUDY, "32", rate=10_000, num=768, input_spread=0, output_spread=0)
    static, continuous = (alike[variant, "32"] for variant in (batching.STATIC, batching.CONTINUOUS))
    assert continuous["tokens_per_s"] < 1.35 * static["tokens_per_s"]  # the first batches are those that came first


@pytest.mark.long
def test_who_comes_waits_for_the_end_of_a_static_batch() -> None:
    found = few(batching.STUDY, "8", num=150)
    static, continuous = (found[variant, "8"] for variant in (batching.STATIC, batching.CONTINUOUS))
    assert static["ttft_p50_s"] > 20 * continuous["ttft_p50_s"]


@pytest.mark.long
def test_contiguous_memory_admits_fewer_and_holds_less() -> None:
    found = few(memory.STUDY, "40,000")
    reserved, known, pages = (found[each, "40,000"] for each in (memory.RESERVED, memory.KNOWN, memory.PAGES))
    assert reserved["num_running"] < known["num_running"] / 2 < pages["num_running"] / 2.2
    assert reserved["tokens_per_s"] < known["tokens_per_s"] < pages["tokens_per_s"]
    assert pages["held_share"] / pages["taken_share"] > 0.9
    assert known["held_share"] / known["taken_share"] < 0.85
    assert reserved["held_share"] / reserved["taken_share"] < 0.35
    assert 0 == known["num_preemptions"] == reserved["num_preemptions"]


@pytest.mark.long
@pytest.mark.faults
def test_large_pages_hold_less_of_what_is_taken() -> None:
    found = few(page_size.STUDY, "1", "16", "256")
    one, usual, large = (found[page_size.PAGES, size] for size in ("1", "16", "256"))
    used = [each["held_share"] / each["taken_share"] for each in (one, usual, large)]
    assert used[0] > 0.99 > used[1] > 0.95 > 0.9 > used[2]


@pytest.mark.long
@pytest.mark.faults
def test_small_chunks_make_prompts_late_and_large_ones_handoffs_and_colocated_steps() -> None:
    found = few(chunk_size.STUDY, "64", "512", "4096")
    small, usual, large = (found[chunk_size.SPLIT, size] for size in ("64", "512", "4096"))
    assert small["ttft_p50_s"] > 1.5 * usual["ttft_p50_s"]
    assert large["handoff_p50_s"] > 3 * usual["handoff_p50_s"]
    beside, beside_large = (found[chunk_size.COLOCATED, size] for size in ("512", "4096"))
    assert beside_large["gap_p99_s"] > 1.5 * beside["gap_p99_s"]
    assert beside["handoff_p50_s"] == 0


@pytest.mark.long
@pytest.mark.faults
def test_a_strict_split_ends_where_its_prefill_workers_do() -> None:
    found = few(split.STUDY, "24", num=400)
    colocated, strict, mixed = (found[each, "24"] for each in (split.COLOCATED, split.STRICT, split.MIXED))
    assert min(colocated["kept_share"], mixed["kept_share"]) > strict["kept_share"] + 0.2


@pytest.mark.long
def test_decode_helps_where_prefill_is_short() -> None:
    found = few(mixed_pool.STUDY, "1P3D")
    on, off = (found[each, "1P3D"] for each in (mixed_pool.ON, mixed_pool.OFF))
    assert on["by_decode_share"] > 0.2 > 0 == off["by_decode_share"]
    assert on["ttft_p50_s"] < off["ttft_p50_s"] / 5


@pytest.mark.long
@pytest.mark.faults
def test_a_link_below_what_prefill_computes_is_what_a_split_serves_at() -> None:
    found = few(link.STUDY, "1", "4", "25")
    slow, even, fast = (found[link.SPLIT, rate] for rate in ("1", "4", "25"))
    assert slow["tokens_per_s"] < 0.7 * fast["tokens_per_s"]
    assert even["tokens_per_s"] == pytest.approx(fast["tokens_per_s"], rel=0.02)
    assert found[link.MIXED, "1"]["tokens_per_s"] > 1.3 * slow["tokens_per_s"]


@pytest.mark.long
@pytest.mark.faults
def test_prompts_go_round_a_slow_link_that_routers_hear_of() -> None:
    found = few(slow_link.STUDY, "25 %", num=400)
    told, blind = (found[each, "25 %"] for each in (slow_link.TOLD, slow_link.BLIND))
    assert told["handoff_p99_s"] < blind["handoff_p99_s"] / 3


@pytest.mark.long
@pytest.mark.faults
def test_what_dies_is_felt_and_costs_no_request() -> None:
    found = few(worker_dies.STUDY, "20 s", num=700)
    variants = (worker_dies.NOBODY, worker_dies.PREFILL, worker_dies.DECODE)
    nobody, prefill, decode = (found[each, "20 s"] for each in variants)
    assert decode["gap_p99_s"] > 5 * nobody["gap_p99_s"]
    assert prefill["by_decode_share"] > nobody["by_decode_share"] + 0.05
    open_then = [each["samples"]["num_under_way"][33] for each in (nobody, decode)]
    assert open_then[1] > 1.3 * open_then[0], "they pile up until the next one serves"


# -- schedulers to compare with


def step(scheduler: BatchScheduler) -> list[Choice]:
    """Take one, and let those go that have all; who was in it."""
    batch = scheduler.schedule()
    scheduler.apply(batch, [[TOKEN] for item in batch.items if item.samples])
    for item in batch.items:
        if item.sequence.num_output == item.sequence.params.max_tokens:
            scheduler.pool.release(scheduler.remove(item.sequence))
    return [item.sequence for item in batch.items]


def choices(lengths: Sequence[tuple[int, int]]) -> list[Choice]:
    return [
        Choice(str(n), 1, 0, 0.0, n, [1] * prompt, prompt, SamplingParams(max_tokens=output))
        for n, (prompt, output) in enumerate(lengths)
    ]


lengths_of_some = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=12)


@pytest.mark.long
@given(lengths_of_some, st.integers(13, 60))
def test_nobody_joins_a_static_batch(lengths: Sequence[tuple[int, int]], num_pages: int) -> None:
    scheduler = StaticScheduler(PagePool(num_pages, PAGE), LIMITS)
    asked = choices(lengths)
    for one in asked:
        scheduler.add(one)
    groups: list[set[str]] = []
    for _ in range(2000):
        if not (members := {one.request_id for one in step(scheduler)}):
            break
        if not groups or not members & groups[-1]:
            first = min(int(name) for name in members)
            groups.append({str(number) for number in range(first, min(first + LIMITS.max_num_seqs, len(asked)))})
        assert members <= groups[-1], "who was not there when it began has to wait"
    assert all(one.num_output == one.params.max_tokens for one in asked)
    assert sorted(name for group in groups for name in group) == sorted(one.request_id for one in asked)


@pytest.mark.long
@given(lengths_of_some, st.integers(13, 60), st.booleans())
def test_contiguous_runs_never_overlap_and_all_come_back(
    lengths: Sequence[tuple[int, int]], num_pages: int, knows: bool
) -> None:
    pool = PagePool(num_pages, PAGE)
    scheduler = contiguous(None if knows else 30)(pool, LIMITS)
    asked = choices(lengths)
    for one in asked:
        scheduler.add(one)
    for _ in range(2000):
        if not step(scheduler):
            break
        pool.check()
        for one in scheduler.running:
            wanted = max(0 if knows else 30, one.num_prompt + one.params.max_tokens)
            assert len(one.pages) == -(-wanted // PAGE), "all that it may ever need"
    assert all(one.num_output == one.params.max_tokens for one in asked)
    assert pool.counts().free == num_pages


def test_what_is_free_in_pieces_is_no_run() -> None:
    runs = Runs(10)
    first, second, third = (runs.take(num) for num in (4, 2, 4))
    assert first is not None
    assert second is not None
    assert third is not None
    runs.give_back(first)
    runs.give_back(third)
    assert runs.take(5) is None, "eight are free, in two pieces"
    runs.give_back(second)
    assert runs.take(10) == range(10)


@pytest.mark.long
@given(st.lists(st.integers(1, 6), max_size=20), st.randoms(use_true_random=False))
def test_runs_that_are_taken_and_given_back_in_any_order_are_one_again(sizes: list[int], rng: Any) -> None:
    runs, held = Runs(20), list[range]()
    for size in sizes:
        if (run := runs.take(size)) is not None:
            assert not any(set(run) & set(other) for other in held)
            held.append(run)
        if held and rng.random() < 0.4:
            runs.give_back(held.pop(rng.randrange(len(held))))
    for run in held:
        runs.give_back(run)
    assert runs.take(20) == range(20)


# -- the page


@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    return read_format(ROOT / "docs/figures/studies.json", FORMAT, "studies")


def test_all_studies_are_in_the_page_with_their_scenarios_and_plots(content: dict[str, Any]) -> None:
    text, drawn = page(content, Path("studies.json")), plots(content)
    assert [study.name for study in STUDIES] == list(benchmarks_main.STUDIES) == list(content["studies"])
    for study in STUDIES:
        assert (SCENARIOS / study.scenario).is_file()
        assert f"## {study.title}\n\n`scenarios/{study.scenario}`" in text
        (file,) = [path for path in drawn if path.stem == study.name]
        assert f"({file.relative_to('docs')})" in text
        said = " ".join(study.says(by_labels(content["studies"][study.name])).split())
        assert len(re.findall(r"[.:;!?]\s", said + " ")) >= 3
        assert said in " ".join(text.split())


def test_each_line_of_a_plot_has_a_point_for_each_value(content: dict[str, Any]) -> None:
    for path, text in plots(content).items():
        root = ET.fromstring(text)
        (study,) = [one for one in STUDIES if one.name == path.stem]
        lines = list(root.iter("{http://www.w3.org/2000/svg}polyline"))
        assert len(lines) == len(study.panels) * len(study.variants)
        if not study.over_time:
            assert {len(line.attrib["points"].split()) for line in lines} == {len(study.values)}
            titles = list(root.iter("{http://www.w3.org/2000/svg}title"))
            assert len(titles) == len(lines) * len(study.values)


@pytest.mark.processes  # git tells the commit
def test_a_study_that_is_simulated_again_leaves_the_others_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few_requests = {"load": {"requests": 30}}
    small = replace(worker_dies.STUDY, values=[Value("20 s", few_requests)])
    file = tmp_path / "studies.json"
    write(file, {"format": FORMAT, "studies": {"link": ["as it was"], "worker_dies": ["older"]}})
    run(file, ["worker_dies"], [small, replace(small, name="split")])
    found = read_format(file, FORMAT, "studies")["studies"]
    assert list(found) == ["link", "worker_dies"]
    assert found["link"] == ["as it was"]
    assert [point["num_requests"] for point in found["worker_dies"]] == [30] * 3
    assert len(found["worker_dies"][0]["samples"]["tokens_per_s"]) > 5
    assert "## A worker dies" in capsys.readouterr().out


def test_an_axis_is_logarithmic_where_values_lie_far_apart() -> None:
    def heights(*values: float) -> list[float]:
        text = svg([Panel("t", "x", [Line("a", list(enumerate(values)))], [str(n) for n in range(len(values))])])
        (line,) = ET.fromstring(text).iter("{http://www.w3.org/2000/svg}polyline")
        return [float(point.split(",")[1]) for point in line.attrib["points"].split()]

    a, b, c = heights(1, 10, 100)
    assert a - b == pytest.approx(b - c, abs=0.2)
    a, b, c = heights(10, 20, 30)
    assert a - b == pytest.approx(b - c, abs=0.2)
    zero, one, hundred = heights(0, 1, 100)
    assert zero - one < 0.05 * (zero - hundred), "nothing is at no power of ten"


def test_values_take_the_place_of_leaves_alone() -> None:
    base = {"a": {"b": 1, "c": 2}, "d": 3}
    assert merged(base, {"a": {"c": 4}, "f": {"g": 5}}) == {"a": {"b": 1, "c": 4}, "d": 3, "f": {"g": 5}}
    assert base == {"a": {"b": 1, "c": 2}, "d": 3}
