"""What is made of the runs of a comparison: medians, ratios, and the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import docs
from benchmarks.parts import figures as parts
from benchmarks.parts.figures import Figure
from benchmarks.peers import figures as figures
from benchmarks.peers.figures import Goal
from benchmarks.peers.turns import LOADS
from tandem.bench.repetitions import Spread, spread
from tandem.bench.report.summary import Distribution

REPOSITORY = Path(__file__).parents[3]
CODE = {"digest": "0123456789abcdef", "commit": "c0ffee" * 6 + "c0ff", "is_dirty": False}


def run(
    contestant: str, repetition: int = 1, *, load: str = "A", rate: float = 100.0, ms: float = 50.0, **more: Any
) -> dict[str, Any]:
    """One run with `rate` tokens a second and all latencies of `ms`; its second gap is 90 ms."""
    latency = dict.fromkeys(("mean", "p50", "p90", "p99", "max"), ms / 1e3)
    return {
        "contestant": contestant,
        "load": load,
        "repetition": repetition,
        "date": f"2026-01-0{repetition}T00:00:00+00:00",
        "seed": repetition,
        "code": CODE if contestant.startswith("tandem") else None,
        "other_cores": 0.01,
        "prompt_tokens_computed": {"prefill": 60, "decode": 40} if contestant == "tandem" else {},
        "figures": {
            "output_tokens_per_s": rate,
            "ttft_s": latency,
            "tpot_s": latency,
            "itl_s": latency,
            "second_gap_s": {**latency, "p99": 0.09},
            "num_failed": {},
        },
        "generator": {"cpu_s": 1.0, "cpu_share": 0.021},
        "digests": ["a", "b", "c", ""],
    } | more


def content(
    *runs: dict[str, Any],
    goodput: tuple[tuple[str, float | None], ...] = (),
    answers: dict[str, list[list[str]]] | None = None,
) -> dict[str, Any]:
    return {
        "settings": {
            "machine": {"cpu": "a CPU", "num_cores": 2, "memory_gib": 16.0, "system": "Linux"},
            "versions": {"tandem": "0.1.0", "torch": "2.13.0"},
            "peer_versions": {"vllm": "0.32.0"},
            "model": {"model_type": "llama", "hidden_size": 768},
            "dtype": "float32",
            "loads": {load.name: load.settings() for load in LOADS},
            "goodput": {
                "trace": "t.csv", "num_requests": 300, "scale_lengths": 0.125, "slo_ttft_s": 3.0, "slo_tpot_s": 0.05,
                "share": 0.9,
            },
        },
        "runs": list(runs),
        "goodput": [
            {"contestant": name, "goodput_per_s": rate, "failed_from_per_s": 9.0,
             "date": "2026-01-05T00:00:00+00:00", "code": CODE, "other_cores": 0.0}
            for name, rate in goodput
        ],
        "answers": [{"contestant": name, "answers": texts} for name, texts in (answers or {}).items()],
    }  # fmt: skip


PAIRS = [
    run(contestant, number, rate=rate, ms=ms)
    for number, ours, other in ((1, 120.0, 100.0), (2, 90.0, 60.0), (3, 110.0, 110.0))
    for contestant, rate, ms in (("tandem", ours, 30.0), ("peer-colocated", other, 60.0))
]


def test_ratios_are_of_equal_repetitions() -> None:
    ours = figures.runs_of(PAIRS, "tandem", "A")
    other = figures.runs_of(PAIRS, "peer-colocated", "A")
    assert figures.ratios(ours, other, figures.THROUGHPUT) == Spread(1.2, 1.0, 1.5, 3)
    assert figures.ratios(ours, {2: other[2], 4: other[1]}, figures.THROUGHPUT) == Spread(1.5, 1.5, 1.5, 1)
    assert figures.ratios(ours, {}, figures.THROUGHPUT) is None
    assert spread(figures.TTFT.of(found) for found in ours.values()) == Spread(30.0, 30.0, 30.0, 3)


def test_a_run_without_a_figure_has_none() -> None:
    nothing = run("tandem")
    nothing["figures"] |= {"ttft_s": None, "second_gap_s": None}
    assert figures.TTFT.of(nothing) is None
    assert figures.gap_over_tpot(nothing) is None
    assert spread([None, 2.0, None]) == Spread(2.0, 2.0, 2.0, 1)
    assert spread([None]) is None
    assert figures.handed_off(run("peer-split")) is None
    assert figures.handed_off(run("tandem", prompt_tokens_computed={"decode": 7})) == 0.0
    assert figures.handed_off(run("tandem", prompt_tokens_computed={"decode": 0, "prefill": 0})) is None


def test_outputs_are_compared_where_the_prompts_were_the_same() -> None:
    ours = {1: run("tandem"), 2: run("tandem", 2)}
    other = {1: run("x", digests=["a", "b", "x", ""]), 2: run("x", 2, seed=7), 3: run("x", 3)}
    assert figures.same_outputs(ours, other) == (2, 4)


def test_where_two_answers_part() -> None:
    assert figures.first_difference(["a", " b", " c"], ["a", " b", " c"]) is None
    assert figures.first_difference(["a", " b", " c"], ["a", " b", " d"]) == 3
    assert figures.first_difference(["a", " b"], ["x", " b"]) == 1
    assert figures.first_difference(["a", " b"], ["a", " b", " c"]) == 3
    # One of them keeps half a character back.
    assert figures.first_difference(["a", "", "é", "b"], ["a", "é", "", "b"]) is None
    assert figures.first_difference(["a", "", "é", "b"], ["a", "é", "", "c"]) == 4


@pytest.mark.parametrize(("value", "is_lower", "is_reached"), [(1.1, True, True), (1.09, True, False),
                                                               (1.1, False, True), (1.11, False, False)])  # fmt: skip
def test_a_goal_is_a_bound(value: float, is_lower: bool, is_reached: bool) -> None:
    goal = Goal(1.1, is_lower)
    assert goal.is_reached_by(value) is is_reached
    assert str(goal) == ("≥ 1.1" if is_lower else "≤ 1.1")


def test_the_page_has_ratios_beside_goals() -> None:
    page = docs.page(content(*PAIRS, goodput=(("tandem", 3.0), ("peer-colocated", 2.5))))
    lines = page.splitlines()
    assert "| date | 2026-01-01 to 2026-01-05 |" in lines
    assert "| vLLM with | vllm 0.32.0 |" in lines
    assert "## Load A: prompts of 512 tokens, 64 generated, 6 clients" in lines
    assert "| | Tandem | vLLM, one engine |" in lines
    assert "| output tokens/s | 110.0 (90.0 to 120.0) | 100.0 (60.0 to 110.0) |" in lines
    assert "| load generator, % of a core | 2.1 (2.1 to 2.1) | 2.1 (2.1 to 2.1) |" in lines
    assert "| output tokens/s | 1.20 (1.00 to 1.50) | ≥ 1.1: reached |" in lines
    assert "| mean TTFT | 0.50 (0.50 to 0.50) | ≤ 1.3: reached |" in lines
    assert "| p99 ITL | 0.50 (0.50 to 0.50) | ≤ 0.6: reached |" in lines
    assert "- Tandem: share of prompt tokens handed off 0.60 (0.60 to 0.60); goal ≥ 0.5: reached" in lines
    assert "- Tandem: p99 gap of tokens 1 to 2 over mean TPOT 3.00 (3.00 to 3.00)" in lines
    assert "- greedy outputs of Tandem and vLLM, one engine: 9 of 12 the same text" in lines
    assert "| Tandem | 3.00 (fails from 9.00) | 0.33 to 3.60 | ≥ 1.5: undecided |" in lines
    assert "| vLLM, one engine | 2.50 (fails from 9.00) |  |  |" in lines


def test_weights_of_fewer_bits_stand_beside_the_checkpoint_as_it_is() -> None:
    runs = [
        run(contestant, number, load="D", rate=rate * number)
        for contestant, rate in (("tandem", 100.0), ("tandem-int8", 170.0), ("tandem-int4", 220.0))
        for number in (1, 2)
    ]
    lines = docs.page(None, of_quantized=content(*runs)).splitlines()
    assert "## With fewer bits a weight" in lines
    assert "| ratio to Tandem | Tandem, int8 | goal | Tandem, int4 | goal |" in lines
    ratios = "1.70 (1.70 to 1.70) | ≥ 1.6: reached | 2.20 (2.20 to 2.20) | ≥ 2.3: **missed**"
    assert f"| output tokens/s | {ratios} |" in lines
    assert not any("the same text" in line for line in lines)


def test_what_was_not_measured_is_not_on_the_page() -> None:
    page = docs.page(content(run("tandem", load="B", ms=30.0)))
    assert "## Load B" in page
    assert "| output tokens/s | 100.0 |" in page
    assert "goal ≤ 2: **missed**" in page
    for absent in ("## Load A", "## Load C", "## Goodput\n", "ratio to", "split over NIXL", "greedy outputs"):
        assert absent not in page
    assert docs.page(None) == docs.page(content())
    assert "No servers were compared yet" in docs.page(None)


def test_goals_are_set_against_one_engine_alone() -> None:
    page = docs.page(content(run("tandem", rate=120.0), run("peer-split", rate=100.0)))
    assert "| ratio to vLLM, split over NIXL | Tandem | goal |" in page
    assert "| output tokens/s | 1.20 |  |" in page


def test_failures_are_said() -> None:
    failing = run("tandem")
    failing["figures"]["num_failed"] = {"http_500": 2, "timeout": 1}
    assert "- Tandem: 3 requests failed and are in no figure" in docs.page(content(failing))


def test_the_page_does_not_depend_on_the_order_of_the_runs() -> None:
    assert docs.page(content(*PAIRS)) == docs.page(content(*reversed(PAIRS)))


def test_runs_hours_apart_have_no_ratio() -> None:
    early = run("tandem", rate=120.0, date="2026-01-01T02:00:01+00:00")
    late = run("peer-colocated", date="2026-01-01T04:00:01+00:00")
    page = docs.page(content(early, late))
    assert "| output tokens/s | 1.20 | ≥ 1.1: reached |" in page
    assert "without a ratio" not in page
    page = docs.page(content({**early, "date": "2026-01-01T02:00:00+00:00"}, late))
    assert "| output tokens/s |  |  |" in page
    assert "- Tandem: repetitions without a ratio, as more than 2 hours apart: 1" in page


def test_the_page_names_the_code() -> None:
    page = docs.page(content(run("tandem")))
    assert "| Tandem at | commit c0ffeec0ffee (sources 0123456789abcdef) |" in page
    assert "Warning" not in page
    dirty = run("tandem-strict", code={**CODE, "is_dirty": True, "digest": "f"})
    page = docs.page(content(run("tandem"), dirty))
    assert "| Tandem, strict split at | commit c0ffeec0ffee with changes (sources f) |" in page
    assert "- **Warning**: not all figures of Tandem are of the same code." in page
    alone = run("tandem", code={"digest": "f", "commit": None, "is_dirty": None})
    assert "| Tandem at | no commit (sources f) |" in docs.page(content(alone))


def test_a_disturbed_machine_is_said() -> None:
    loud = [run("tandem", 2, load=load, other_cores=0.26) for load in "AB"]
    page = docs.page(content(run("tandem"), *loud, run("peer-split", other_cores=0.2)))
    assert page.count("Warning") == 1
    assert "- **Warning**: others used 0.26 cores just before Tandem, repetition 2." in page
    found = content(goodput=(("tandem", 3.0),))
    found["goodput"][0]["other_cores"] = 1.5
    assert "others used 1.50 cores just before Tandem, goodput." in docs.page(found)


def test_a_file_from_before_these_were_recorded_is_read() -> None:
    old = run("tandem")
    del old["code"], old["other_cores"]
    page = docs.page(content(old))
    assert "| Tandem at | code that was not recorded |" in page
    assert "- **Warning**: whether the machine was quiet was not measured for 1 of 1 runs." in page


@pytest.mark.parametrize(
    ("ours", "other", "row"),
    [
        ((4.0, None), (2.0, 2.1), "| ≥ 4.00 | > 1.90 | ≥ 1.5: reached |"),
        ((2.0, None), (2.0, 2.1), "| ≥ 2.00 | > 0.95 | ≥ 1.5: undecided |"),
        ((4.0, 4.1), (2.0, None), "| 4.00 | < 2.05 | ≥ 1.5: undecided |"),
        ((2.0, 2.1), (2.0, None), "| 2.00 | < 1.05 | ≥ 1.5: **missed** |"),
        ((4.0, None), (2.0, None), "| ≥ 4.00 | unknown | ≥ 1.5: undecided |"),
        ((4.0, 4.1), (None, 0.1), "| 4.00 | > 40.00 | ≥ 1.5: reached |"),
        ((None, 0.1), (2.0, 2.1), "| < 0.10 | < 0.05 | ≥ 1.5: **missed** |"),
        ((1.4, 2.8), (1.0, 1.05), "| 1.40 (fails from 2.80) | 1.33 to 2.80 | ≥ 1.5: undecided |"),
        ((3.2, 3.3), (1.0, 2.0), "| 3.20 | 1.60 to 3.30 | ≥ 1.5: reached |"),
        ((3.1, 3.2), (2.0, 2.1), "| 3.10 | 1.55 (1.48 to 1.60) | ≥ 1.5: undecided |"),
        ((4.0, 4.1), (2.0, 2.1), "| 4.00 | 2.00 (1.90 to 2.05) | ≥ 1.5: reached |"),
    ],
)
def test_a_ratio_is_as_well_known_as_both_searches_and_its_bounds_decide(
    ours: tuple[float | None, float | None], other: tuple[float | None, float | None], row: str
) -> None:
    found = content(goodput=(("tandem", ours[0]), ("peer-colocated", other[0])))
    for search, (_, failed_from) in zip(found["goodput"], (ours, other), strict=True):
        search["failed_from_per_s"] = failed_from
    page = docs.page(found)
    assert f"| Tandem {row}" in page
    assert "One search\nof each server" in page


def test_searches_hours_apart_have_no_ratio() -> None:
    found = content(goodput=(("tandem", 3.0), ("peer-colocated", 2.0)))
    found["goodput"][0]["date"] = "2026-01-05T03:00:00+00:00"
    assert "| Tandem | 3.00 (fails from 9.00) | more than 2 hours apart |  |" in docs.page(found)


def test_the_page_says_where_answers_part() -> None:
    answers = {"tandem": [["a", "b"], ["c", "d"]], "peer-colocated": [["a", "b"], ["c", "x"]]}
    page = docs.page(content(run("tandem"), answers=answers))
    assert "| Tandem and vLLM, one engine | 1 of 2 | 2 |" in page
    assert "The same tokens" not in docs.page(content(run("tandem"), answers={"tandem": [["a"]]}))


def test_a_search_without_a_rate_is_no_division_by_zero() -> None:
    page = docs.page(content(goodput=(("tandem", 3.0), ("peer-colocated", None))))
    assert "| Tandem | 3.00 (fails from 9.00) | > 0.33 | ≥ 1.5: undecided |" in page
    assert "| vLLM, one engine | < 9.00 |  |  |" in page


def of_parts(*found: Figure, other_cores: float = 0.0) -> dict[str, Any]:
    return {
        "format": parts.FORMAT,
        "date": "2026-01-07T00:00:00+00:00",
        "machine": {"cpu": "a CPU", "num_cores": 2, "memory_gib": 16.0, "system": "Linux"},
        "versions": {"tandem": "0.1.0"},
        "code": CODE,
        "model": "random, 82 M weights",
        "transport": "ucx",
        "other_cores": other_cores,
        "figures": [figure.as_json() for figure in found],
    }


SAMPLES = {"raw write": Distribution(num=1_200, mean=0.003, p50=0.003, p90=0.004, p99=0.0045, max=0.005)}
FIGURES = (
    Figure(parts.EXPOSED, 0.3, Goal(0.25, is_lower=False), "one at a time", SAMPLES, {"bytes": 50_331_648}),
    Figure(parts.STREAMING, 12_000.0, Goal(10_000, is_lower=True), "all at once"),
)


def test_the_page_shows_parts_beside_their_goals() -> None:
    page = docs.page(None, of_parts=of_parts(*FIGURES))
    assert "No servers were compared yet" in page
    assert "| 30 % of a raw write of the same extents | ≤ 25 %: **missed** | one at a time |" in page
    assert "| 12,000 tokens/s | ≥ 10,000 tokens/s: reached | all at once |" in page
    assert "| exposed: raw write | 3.00 ms | 4.50 ms | 1,200 |" in page
    assert "| exposed: bytes | 50,331,648 |  |  |" in page
    assert "Warning" not in page
    assert "others used 0.50 cores" in docs.page(None, of_parts=of_parts(other_cores=0.5))
    assert "## Parts" not in docs.page(content(run("tandem")))
    assert "## Parts" in docs.page(content(run("tandem")), of_parts=of_parts())


def of_kernels(*shares: float, other_load: float = 0.0) -> dict[str, Any]:
    """One kernel, measured on 1, 2, ... threads with these shares of their limits, and one without a goal."""
    timing = {"median_s": 0.0125, "best_s": 0.012, "num_runs": 9}
    return {
        **{key: of_parts()[key] for key in ("date", "machine", "versions", "code")},
        "model": {"name": "random"},
        "reports": [
            {
                "num_threads": number,
                "product_flop_per_s": number * 100e9,
                "read_bytes_per_s": number * 30e9,
                "other_load": other_load,
                "kernels": [
                    {"name": "decode, batch 8", "timing": timing, "goal": 0.6, "share": share},
                    {"name": "sampling", "timing": timing, "goal": None, "share": 0.05},
                ],
            }
            for number, share in enumerate(shares, start=1)
        ],
    }


def test_the_page_shows_kernels_beside_the_limits_of_their_threads() -> None:
    page = docs.page(None, of_kernels=of_kernels(0.9, 0.62))
    assert "| limit | 1 thread | 2 threads |" in page
    assert "| products | 100 GFLOP/s | 200 GFLOP/s |" in page
    assert "| decode, batch 8 | 12.50 ms, 90% | 12.50 ms, 62% | ≥ 60%: reached |" in page
    assert "| sampling | 12.50 ms, 5% | 12.50 ms, 5% |  |" in page
    assert "Warning" not in page
    page = docs.page(None, of_kernels=of_kernels(0.9, 0.59))
    assert "| 12.50 ms, 90% | 12.50 ms, 59% | ≥ 60%: **missed** |" in page  # on any number of threads
    assert "others used 0.40 cores" in docs.page(None, of_kernels=of_kernels(0.9, other_load=0.4))


def test_the_page_shows_attention_of_prompts_where_it_was_measured() -> None:
    kernels = of_kernels(0.9)
    run = {"num_threads": 2, "context": 8_192, "limit_flop_per_s": 200e9, "torch_flop_per_s": 90e9, "other_load": 0.4}
    rates = {64: 150e9, 96: 100e9}
    runs = [{**run, "head_dim": dim, "flop_per_s": rate, "share": rate / 200e9} for dim, rate in rates.items()]
    sizes = {"chunk": 512, "num_heads": 4, "num_kv_heads": 2}
    kernels["prompt_attention"] = {**kernels, "runs": runs, "sizes": sizes, "goal": 0.7}
    page = docs.page(None, of_kernels=kernels)
    assert "| 2 | 64 | 8,192 | 200 | 150, 75% | 90, 45% | ≥ 70%: reached |" in page
    assert "| 2 | 96 | 8,192 | 200 | 100, 50% | 90, 45% | ≥ 70%: **missed** |" in page
    assert "others used up to 0.40 cores" in page


def test_the_page_shows_products_by_type_of_weights_where_they_were_measured() -> None:
    kernels = of_kernels(0.9)
    assert "### Products by type of weights\n\nNot measured." in docs.page(None, of_kernels=kernels)
    limits = {"num_threads": 2, "limit_flop_per_s": 200e9, "limit_bytes_per_s": 37e9, "other_load": 0.4}
    few, many = {"num_rows": 1, "bound": "reads"}, {"num_rows": 512, "bound": "multiply-adds"}
    runs = [
        {**limits, **few, "weights": "bfloat16", "seconds": 0.001, "share": 0.79, "goal": 0.8},
        {**limits, **many, "weights": "bfloat16", "seconds": 0.1, "share": 0.9, "goal": 0.9},
        {**limits, **few, "weights": "int4", "seconds": 0.0005, "share": 0.5, "goal": None},
        {**limits, **many, "weights": "int4", "seconds": 0.11, "share": 0.85, "goal": None},
    ]
    sizes = {"in_features": 4096, "out_features": 2048, "rows": [1, 512]}
    kernels["weight_types"] = {**kernels, "runs": runs, "sizes": sizes}
    page = docs.page(None, of_kernels=kernels)
    assert "| threads | weights | multiply-adds | reads | 1 row | 512 rows |" in page
    adds = "200 GFLOP/s | 37.0 GB/s"
    missed = "1.00 ms, 79% of reads, **missed** | 100.00 ms, 90% of multiply-adds"
    assert f"| 2 | bfloat16 | {adds} | {missed} |" in page
    assert f"| 2 | int4 | {adds} | 0.50 ms, 50% of reads | 110.00 ms, 85% of multiply-adds |" in page
    assert "1 row 80%, 512 rows 90%" in " ".join(page.split())
    assert "others used up to 0.40 cores" in page
    assert "Not measured" not in page
