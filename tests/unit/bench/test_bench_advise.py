"""Which cluster suits a load: verdicts from figures, and what the command takes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tandem import cli
from tandem.advise.clusters import Cluster, clusters_of
from tandem.advise.measure import Advice, AdviceRun, serve_command
from tandem.advise.report import document, figure_table, figures_of, notes, plot
from tandem.advise.verdict import Answer, Comparison, Outcome, Verdict, verdict
from tandem.bench.load.records import Slo
from tandem.bench.session import Shape, Target, Workload
from tandem.core.config import Config, load
from tandem.core.errors import ConfigError

COLOCATED, SPLIT, THREE = Cluster(0, 2), Cluster(1, 1), Cluster(2, 1)
SLO = Slo(3.0, 0.05)
NAMES = ("goodput", "throughput", "ttft", "tpot", "itl")


def figures(
    goodput: float = 2.0, tokens: float = 100.0, ttft: float = 0.2, tpot: float = 0.02, itl: float = 0.05
) -> dict[str, Any]:
    return {
        "goodput": {"per_s": goodput, "share": min(1.0, goodput / 2)},
        "output_tokens_per_s": tokens,
        "ttft_s": {"mean": ttft},
        "tpot_s": {"mean": tpot},
        "itl_s": {"p99": itl},
        "num_failed": {},
    }


def steady(**changes: float) -> list[dict[str, Any]]:
    """Four repetitions within half a percent of each other, not in step with those of other changes."""
    noise = random.Random(repr(changes))
    return [
        figures(**{name: value * noise.uniform(0.9975, 1.0025) for name, value in (DEFAULTS | changes).items()})
        for _ in range(4)
    ]


DEFAULTS = {"goodput": 2.0, "tokens": 100.0, "ttft": 0.2, "tpot": 0.02, "itl": 0.05}


def judged(
    *runs: Sequence[dict[str, Any]], clusters: Sequence[Cluster] = (COLOCATED, SPLIT), margin: float = 0.05
) -> Verdict:
    found = verdict({each: dict(enumerate(of, 1)) for each, of in zip(clusters, runs, strict=True)}, margin)
    assert found is not None
    return found


def of(found: Verdict, figure: str, cluster: Cluster = SPLIT) -> Comparison:
    return next(each for each in found.comparisons if (each.figure, each.cluster) == (figure, cluster))


def test_the_clusters_of_a_size() -> None:
    assert [str(cluster) for cluster in clusters_of(4)] == ["0+4", "1+3", "2+2", "3+1"]
    assert [cluster.is_colocated for cluster in clusters_of(3)] == [True, False, False]
    assert {cluster.num_workers for cluster in clusters_of(3)} == {3}


def test_goodput_decides_whatever_latencies_say() -> None:
    found = judged(steady(goodput=1.5), steady(goodput=2.0, ttft=0.4))
    assert (found.answer, found.cluster) == (Answer.SPLIT, SPLIT)
    assert found.words[0] == "Yes: split this load, as 1+1."
    assert "better in goodput (1.33 ×" in " ".join(found.words)
    assert "worse in mean TTFT (2.00 ×" in " ".join(found.words)
    other = judged(steady(goodput=2.0), steady(goodput=1.5, itl=0.01))
    assert (other.answer, other.cluster) == (Answer.COLOCATED, COLOCATED)
    assert other.words[0] == "No: serve this load colocated, as 0+2."


def test_where_goodput_is_the_same_the_other_figures_decide() -> None:
    assert judged(steady(), steady(itl=0.02)).answer is Answer.SPLIT
    assert judged(steady(), steady(ttft=0.3)).answer is Answer.COLOCATED
    depends = judged(steady(), steady(itl=0.02, ttft=0.3))
    assert (depends.answer, depends.cluster) == (Answer.DEPENDS, SPLIT)
    words = " ".join(depends.words)
    assert "better in p99 ITL (0.40 ×" in words
    assert "worse in mean TTFT (1.50 ×" in words
    assert "differs by less than 5% in goodput" in words


def test_no_difference_is_said_where_one_is_ruled_out() -> None:
    found = judged(steady(), steady(goodput=2.004))
    assert found.answer is Answer.SAME
    assert "makes no difference" in found.words[0]
    assert {each.outcome for each in found.comparisons} == {Outcome.SAME}


def test_a_difference_within_the_noise_is_not_told_and_more_repetitions_are_asked_for() -> None:
    loud = [figures(goodput=value) for value in (2.0, 1.6, 2.2)]
    found = judged(loud, [figures(goodput=value) for value in (2.2, 1.9, 2.0)])
    assert (found.answer, found.cluster) == (Answer.UNCLEAR, COLOCATED)
    assert "cannot tell" in found.words[0]
    more = of(found, "goodput").more
    assert more is not None
    assert more > 3
    assert f"--repetitions {more} would show a difference of 5%" in " ".join(found.words)


def test_one_repetition_cannot_tell() -> None:
    found = judged([figures(goodput=1.0)], [figures(goodput=2.0)])
    assert found.answer is Answer.UNCLEAR
    assert "One repetition cannot tell" in found.words[0]
    assert (of(found, "goodput").ratio, of(found, "goodput").low, of(found, "goodput").more) == (2.0, None, None)


def test_a_small_difference_does_not_count_however_sure_it_is() -> None:
    first, second = [figures(goodput=2.0)] * 4, [figures(goodput=2.06)] * 4
    assert of(judged(first, second), "goodput").outcome is Outcome.SAME
    assert of(judged(first, second, margin=0.02), "goodput").outcome is Outcome.BETTER


def test_goodput_of_nothing() -> None:
    nothing, some = [figures(goodput=0.0)] * 3, [figures(goodput=1.0)] * 3
    found = judged(nothing, some)
    assert (found.answer, of(found, "goodput").ratio) == (Answer.SPLIT, None)
    assert "goodput (colocated has none)" in " ".join(found.words)
    assert judged(some, nothing).answer is Answer.COLOCATED
    assert of(judged(some, nothing), "goodput").ratio == 0.0
    assert judged(nothing, nothing).answer is Answer.SAME


def test_of_several_splits_the_best_is_named() -> None:
    clusters = (Cluster(0, 3), Cluster(1, 2), THREE)
    best = judged(steady(goodput=1.0), steady(goodput=1.5), steady(goodput=1.9), clusters=clusters)
    assert (best.answer, best.cluster) == (Answer.SPLIT, THREE)
    # One loses goodput, the other keeps it and is steadier.
    mixed = judged(steady(), steady(itl=0.02), steady(goodput=1.0), clusters=clusters)
    assert (mixed.answer, mixed.cluster) == (Answer.SPLIT, Cluster(1, 2))
    both = judged(steady(), steady(goodput=1.0), steady(goodput=1.2), clusters=clusters)
    assert both.answer is Answer.COLOCATED
    assert "2+1 is worse in goodput (0.60 ×" in " ".join(both.words)


def test_a_plain_yes_for_one_split_is_not_hidden_by_another() -> None:
    """One that has as much more than it lacks; one that differs in nothing."""
    clusters = (COLOCATED, SPLIT, THREE)
    mixed = steady(tokens=120, ttft=0.1, tpot=0.04)
    found = judged(steady(), mixed, steady(tokens=120), clusters=clusters)
    assert (found.answer, found.cluster) == (Answer.SPLIT, THREE)
    found = judged(steady(), steady(), steady(ttft=0.1, tpot=0.04), clusters=clusters)
    assert (found.answer, found.cluster) == (Answer.DEPENDS, THREE)


def test_a_figure_that_a_run_lacks_is_left_out() -> None:
    runs = [{**figures(), "tpot_s": None, "itl_s": None} for _ in range(3)]
    assert {each.figure for each in judged(runs, steady()[:3]).comparisons} == {"goodput", "throughput", "ttft"}


def test_only_repetitions_that_ran_on_all_clusters_count() -> None:
    runs = dict(enumerate(steady(), 1))
    assert verdict({COLOCATED: runs, SPLIT: {}}, 0.05) is None
    assert verdict({COLOCATED: runs}, 0.05) is None
    found = verdict({COLOCATED: runs, SPLIT: {2: figures(goodput=9.0)}}, 0.05)
    assert found is not None
    assert found.answer is Answer.UNCLEAR


def test_clusters_that_are_the_same_are_seldom_told_apart() -> None:
    """Of 200 measurements of equal clusters with a tenth of noise in each figure, one of ten at most is wrong."""
    noise = random.Random(7)

    def run() -> dict[str, Any]:
        return figures(*(value * noise.lognormvariate(0, 0.1) for value in DEFAULTS.values()))

    wrong = {Answer.SPLIT, Answer.COLOCATED, Answer.DEPENDS}
    answers = [judged([run() for _ in range(4)], [run() for _ in range(4)]).answer for _ in range(200)]
    share = sum(answer in wrong for answer in answers) / len(answers)
    assert 0.0 < share <= 0.1


# --- around it --------------------------------------------------------------------------------------------------------


def advice_runs(*remarks: str) -> list[AdviceRun]:
    return [
        AdviceRun(cluster, number, run, remarks)
        for cluster, goodput in ((COLOCATED, 1.5), (SPLIT, 2.0))
        for number, run in enumerate(steady(goodput=goodput), 1)
    ]


def test_turns_alternate(tmp_path: Path) -> None:
    workload = Workload([], range(128, 256))
    advice = Advice((COLOCATED, SPLIT), 2, workload, Shape(4), SLO, Target(""), Config(), tmp_path)
    assert list(advice.turns()) == [(1, COLOCATED), (1, SPLIT), (2, SPLIT), (2, COLOCATED)]


def test_a_cluster_is_told_its_pools_and_the_targets_of_all(tmp_path: Path) -> None:
    config = load(None, {"slo.ttft_ms": 700.0, "pools.prefill.workers": 7})
    command = serve_command(config, SPLIT, 8123, tmp_path / "1+1")
    line = list(command.argv)
    options = cli.make_parser().parse_args(line[line.index("serve") :])
    assert (str(options.prefill), str(options.decode), options.port, command.port) == ("1", "1", 8123, 8123)
    assert load(options.config).slo.ttft_ms == 700.0


def test_what_a_reader_must_know() -> None:
    (said,) = [note for note in notes((COLOCATED, SPLIT), advice_runs("it rained"), SLO) if "rained" in note]
    assert said.startswith("0+2, repetition 1; ")
    assert said.endswith("1+1, repetition 4: it rained")
    runs = [AdviceRun(each, 1, figures(goodput=1.0)) for each in (COLOCATED, SPLIT)]
    assert "no cluster keeps the targets (TTFT 3 s and TPOT 50 ms)" in next(notes((COLOCATED, SPLIT), runs, SLO))
    runs = [AdviceRun(each, 1, figures()) for each in (COLOCATED, SPLIT)]
    assert "a heavier load" in next(notes((COLOCATED, SPLIT), runs, SLO))


@pytest.mark.long
def test_the_table_the_file_and_the_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    clusters, runs = (COLOCATED, SPLIT), advice_runs()
    table = figure_table(clusters, runs)
    first, second, *_, last = zip(*(column.cells for column in table.columns), strict=True)
    assert first[:2] == ("goodput, requests/s", "0+2 (colocated)")
    assert second[:3] == ("", "1+1", "2.00")
    assert (last[1], last[2], last[4]) == ("1+1", "100.0", "100.0")
    found = verdict(figures_of(clusters, runs), 0.05)
    content = json.loads(json.dumps(document({"workers": 2}, clusters, runs, found)))
    assert (content["format"], content["verdict"]["answer"], content["verdict"]["cluster"]) == (
        "tandem-advice/1",
        "split",
        "1+1",
    )
    assert {each["figure"] for each in content["verdict"]["comparisons"]} == set(NAMES)
    assert len(content["runs"]) == 8
    plot(tmp_path / "plots" / "advice.png", clusters, runs, "Yes")
    assert (tmp_path / "plots" / "advice.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="the plot cannot be written"):
        plot(tmp_path / "advice.nothing", clusters, runs, "Yes")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--clusters", "1+1", "2+1", "--concurrency", "2"), "name one colocated cluster"),
        (("--clusters", "0+2", "0+1", "1+1", "--concurrency", "2"), "name one colocated cluster"),
        (("--clusters", "0+2", "--concurrency", "2"), "a split or more"),
        ((), "give --rate or --concurrency"),
        (("--trace", "nowhere.csv"), "cannot read the trace nowhere.csv"),
        (("--config", "nowhere.yaml", "--concurrency", "2"), "cannot read nowhere.yaml"),
    ],
    ids=["no colocated", "two colocated", "no split", "no times", "no trace", "no configuration"],
)
def test_what_is_wrong_is_said_before_anything_is_started(
    arguments: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "advise", "--logs", str(tmp_path / "logs"), *arguments]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("text", ["1", "1+0", "+1", "a+b"])
def test_what_names_no_cluster_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.make_parser().parse_args(["bench", "advise", "--clusters", text])
    assert "names no cluster" in capsys.readouterr().err


# --- simulated --------------------------------------------------------------------------------------------------------

SCENARIO = """
times: fitted
fitted: {base_ms: 5, token_us: 100, row_us: 20}
tandem: {scheduling: {chunk_size: 256}}
"""
TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{40 + number}.000000,{300 + 10 * number},20\n" for number in range(12)
)


@pytest.fixture
def simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs the command on a small scenario; its code and what it says."""
    (tmp_path / "scenario.yaml").write_text(SCENARIO)
    (tmp_path / "trace.csv").write_text(TRACE)

    def run(*arguments: object) -> tuple[int, str]:
        given = [str(argument) for argument in ("--simulate", tmp_path / "scenario.yaml", *arguments)]
        code = cli.main(["bench", "advise", "--no-progress", "--json", str(tmp_path / "advice.json"), *given])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run


def test_a_trace_is_simulated_once_and_a_difference_is_no_chance(
    simulated: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    code, said = simulated("--trace", tmp_path / "trace.csv", "--workers", 3, "--slo-ttft", "10s", "--slo-tpot", "1s")
    assert code == 0
    assert "simulated with the times of" in said
    content = json.loads((tmp_path / "advice.json").read_text())
    assert [run["cluster"] for run in content["runs"]] == ["0+3", "1+2", "2+1"]
    for run in content["runs"]:
        assert run["figures"]["goodput"]["num_good"] == run["figures"]["num_requests"] == 12
        assert run["figures"]["output_tokens_per_s"] == pytest.approx(240 / run["figures"]["duration_s"])
    comparisons = content["verdict"]["comparisons"]
    assert content["verdict"]["answer"] != "unclear"
    assert {each["figure"] for each in comparisons} == {"goodput", "throughput", "ttft", "tpot", "gap"}
    assert all(each["low"] == each["ratio"] == each["high"] for each in comparisons)
    # The prompt of a request is computed at once in all clusters; beside prefill its pages are on their way too.
    ttft = {run["cluster"]: run["figures"]["ttft_s"]["mean"] for run in content["runs"]}
    assert ttft["0+3"] > 0.03


def test_what_a_simulated_router_refuses_has_failed_and_is_in_no_latency(
    simulated: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    (tmp_path / "scenario.yaml").write_text(
        SCENARIO.replace("chunk_size: 256", "chunk_size: 256, max_queued_requests: 2") + "refuses: true\n"
    )
    code, said = simulated("--rate", 1000, "--num-requests", 20, "--input-len", 1000, "--repetitions", 1)
    assert code == 1, "as where requests of a measurement failed"
    for run in json.loads((tmp_path / "advice.json").read_text())["runs"]:
        found = run["figures"]
        num_refused = found["num_failed"]["overloaded"]
        assert f"{num_refused} failed: overloaded" in said
        assert found["num_requests"] == 20
        assert 0 < found["ttft_s"]["num"] == 20 - num_refused
        assert 0.1 < found["ttft_s"]["mean"] < found["ttft_s"]["max"], "a refused one has no first token"
        assert found["goodput"]["num_good"] <= 20 - num_refused


def test_what_prompts_share_by_a_trace_is_computed_once_in_a_simulation(
    simulated: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    def ttft(name: str, blocks: Callable[[int], list[int]]) -> list[float]:
        rows = [
            {"timestamp": 1000 * number, "input_length": 1024, "output_length": 20, "hash_ids": blocks(number)}
            for number in range(6)
        ]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert simulated("--trace", tmp_path / name)[0] == 0
        runs = json.loads((tmp_path / "advice.json").read_text())["runs"]
        return [run["figures"]["ttft_s"]["p50"] for run in runs]

    alike = ttft("alike.jsonl", lambda _: [1, 2])
    other = ttft("other.jsonl", lambda number: [2 * number, 2 * number + 1])
    assert all(a < 0.5 * b for a, b in zip(alike, other, strict=True)), (alike, other)


def test_figures_are_kept_where_the_plot_cannot_be_written(
    simulated: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    code, said = simulated("--rate", 5, "--num-requests", 4, "--repetitions", 1, "--plot", tmp_path / "advice.nothing")
    assert code == 1
    assert "the plot cannot be written" in said
    assert len(json.loads((tmp_path / "advice.json").read_text())["runs"]) == 2


def test_arrivals_by_chance_are_repeated(simulated: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    simulated("--rate", 5, "--num-requests", 20, "--repetitions", 2)
    runs = json.loads((tmp_path / "advice.json").read_text())["runs"]
    assert [(run["cluster"], run["repetition"]) for run in runs] == [("0+2", 1), ("1+1", 1), ("0+2", 2), ("1+1", 2)]
    durations = [run["figures"]["duration_s"] for run in runs]
    assert durations[0] != durations[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--concurrency", "2"), "takes a load with times"),
        ((), "give --rate"),
        (("--rate", "1", "--model", "embedded"), "--model does not go with --simulate"),
        (("--rate", "1", "--cut"), "give its tokens to --cut"),
        (("--rate", "1", "--input-len", "200000"), "has room for"),
    ],
    ids=["closed", "no times", "model", "context", "too long"],
)
def test_what_cannot_be_simulated_is_said(
    simulated: Callable[..., tuple[int, str]], arguments: tuple[str, ...], message: str
) -> None:
    code, said = simulated(*arguments)
    assert code == 1
    assert message in said


def test_an_exact_repetition_tells_all() -> None:
    measured = {COLOCATED: {1: figures(goodput=1.0)}, SPLIT: {1: figures(goodput=2.0)}}
    found = verdict(measured, 0.05, is_exact=True)
    assert found is not None
    assert (found.answer, of(found, "goodput").low) == (Answer.SPLIT, pytest.approx(2.0))
