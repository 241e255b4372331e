"""The grid of loads: which points it has, what is left to measure of them, and what they say."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import docs
from benchmarks.code import Code
from benchmarks.grid import __main__ as command
from benchmarks.grid.figures import AIMS, geometric_mean, point_of, ratio
from benchmarks.grid.measure import Grid
from benchmarks.grid.points import CLIENTS, INPUTS, MODELS, OUTPUTS, Point, all_points, covering, grouped, opened, pairs
from benchmarks.grid.section import section
from benchmarks.peers import run
from benchmarks.peers.comparisons import Comparisons, duration
from benchmarks.peers.models import Model
from benchmarks.peers.servers import Contestant, Place
from benchmarks.peers.turns import read
from tandem.bench.server_process import Command
from tandem.core.ports import free_port

PEER_PROCESS = Path(__file__).with_name("peer_process.py")

# --- points -----------------------------------------------------------------------------------------------------------


def test_any_two_values_meet_in_a_point() -> None:
    points = covering()
    assert len(points) == 20
    wanted = {
        ((a, x), (b, y))
        for (a, some), (b, others) in (
            (("input", INPUTS), ("output", OUTPUTS)),
            (("input", INPUTS), ("clients", CLIENTS)),
            (("output", OUTPUTS), ("clients", CLIENTS)),
        )
        for x in some
        for y in others
    }
    assert pairs(points) == wanted
    assert pairs(points[1:]) != wanted


def test_each_point_has_a_thousand_gaps_and_asks_each_client_twice() -> None:
    for point in all_points():
        assert point.num_requests * (point.num_output - 1) >= 1000
        assert point.num_requests >= 2 * point.num_clients
        assert point.num_requests >= 64 or not point.is_open
        load = point.load(2.5)
        assert (load.num_input, load.num_output, load.concurrency, load.rate) == (
            point.num_input,
            point.num_output,
            point.num_clients,
            2.5,
        )


def test_five_points_are_measured_open_too_after_those_that_give_their_rate() -> None:
    assert [point.num_input for point in opened()] == list(INPUTS)
    assert {point.num_output for point in opened()} == set(OUTPUTS)
    points = all_points()
    for dtype in ("float32", "bfloat16"):
        of_type = [point for point in points if (point.model, point.dtype) == ("82m", dtype)]
        assert len(of_type) == 25
        is_open = [point for point in of_type if point.is_open]
        assert [replace(point, dtype="float32") for point in is_open] == opened()
        assert all(points[points.index(point) - 1] == point.closed for point in is_open)


def test_other_models_have_five_points_of_short_prompts() -> None:
    for model in MODELS.keys() - {"82m"}:
        points = [point for point in all_points() if point.model == model]
        assert len(points) == 5
        assert max(point.num_input for point in points) <= 512
        assert {point.num_clients for point in points} == set(CLIENTS)
        assert {replace(point, model="82m", dtype="float32") for point in points} <= set(covering())


def test_neighbours_of_one_model_and_type_share_the_starts_of_servers() -> None:
    groups = grouped(all_points())
    assert [point for group in groups for point in group.points] == all_points()
    assert max(len(group.points) for group in groups) == 4
    assert len(groups) < len(all_points()) / 2
    for group in groups:
        assert len({(point.model, point.dtype) for point in group.points}) == 1
        assert not any(point.is_open and point.closed in group.points for point in group.points)


def test_no_two_points_share_a_file_or_a_seed() -> None:
    points = all_points()
    assert len({point.name for point in points}) == len({point.seed for point in points}) == len(points) == 60


# --- what they say ----------------------------------------------------------------------------------------------------

CODE = {"digest": "0123456789abcdef", "commit": "c0ffee" * 6 + "c0ff", "is_dirty": False}


def measured(name: str, rate: float, ttft: float, itl: float, **more: Any) -> dict[str, Any]:
    return {
        "contestant": name,
        "date": "2026-01-01T00:00:00+00:00",
        "code": CODE if name.startswith("tandem") else None,
        "other_cores": 0.01,
        "figures": {
            "output_tokens_per_s": rate,
            "requests_per_s": rate / 10,
            "ttft_s": {"mean": ttft},
            "tpot_s": {"mean": itl},
            "itl_s": {"p99": itl},
            "num_failed": {},
        },
    } | more


def content(point: Point, *runs: dict[str, Any]) -> dict[str, Any]:
    settings = {
        "machine": {"cpu": "a CPU", "num_cores": 2, "memory_gib": 16.0, "system": "Linux"},
        "peer_versions": {"vllm": "0.32.0"},
        "point": asdict(point),
    }
    return {"settings": settings, "runs": list(runs)}


def three(point: Point, rate: float, ttft: float, itl: float) -> dict[str, Any]:
    """Tandem's ratios to vLLM; Tandem colocated is as vLLM."""
    others = [measured(name, 100.0, 0.2, 0.05) for name in ("peer-colocated", "tandem-colocated")]
    return content(point, measured("tandem", 100.0 * rate, 0.2 * ttft, 0.05 * itl), *others)


def text(*contents: dict[str, Any]) -> str:
    return "\n".join(section(contents))


SHORT, LONG = Point(32, 64, 4), Point(2048, 16, 16)


def test_cells_have_the_ratio_and_the_colour_of_its_goal() -> None:
    page = text(three(LONG, 0.95, 1.5, 0.4), three(SHORT, 1.5, 0.8, 1.05))
    rows = [line for line in page.splitlines() if line.startswith("| 32 |") or line.startswith("| 2048 |")]
    assert rows[:2] == ["| 32 | 🟩 1.50 (64) |  |", "| 2048 |  | 🟨 0.95 (16) |"]
    assert rows[2:4] == ["| 32 | 🟩 0.80 (64) |  |", "| 2048 |  | 🟥 1.50 (16) |"]
    assert rows[4:6] == ["| 32 | 🟨 1.05 (64) |  |", "| 2048 |  | 🟩 0.40 (16) |"]
    # Beside colocated, the gap has a goal only for long prompts of several clients.
    assert rows[8:10] == ["| 32 | ⬜ 1.05 (64) |  |", "| 2048 |  | 🟩 0.40 (16) |"]


def test_goals_and_geometric_means() -> None:
    page = text(three(SHORT, 2.0, 0.5, 0.5), three(LONG, 0.98, 1.0, 0.5))
    assert geometric_mean([2.0, 0.5, 1.0]) == pytest.approx(1.0)
    assert (
        "| output tokens/s over vLLM's | 1 of 2 | 1.40 | ≥ 1.3: reached | 0.98 (≥ 1) at 2048/16, 16 clients |" in page
    )
    assert "| mean TTFT over vLLM's | 2 of 2 | 0.71 | ≤ 1: reached |  |" in page
    assert "| p99 ITL over that colocated | 1 of 1 | 0.50 |  |  |" in page


def test_goals_follow_the_type_and_the_clients() -> None:
    throughput, ttft = AIMS[0].goal, AIMS[1].goal
    bounds = [
        getattr(goal, "bound", None)
        for goal in (
            throughput(LONG),
            throughput(replace(LONG, dtype="bfloat16")),
            throughput(replace(SHORT, dtype="bfloat16")),
            throughput(replace(SHORT, num_clients=1)),
            ttft(replace(SHORT, num_clients=1)),
            ttft(SHORT),
            throughput(replace(SHORT, is_open=True)),
            ttft(replace(SHORT, is_open=True)),
        )
    ]
    assert bounds == [1.0, 0.95, 1.0, 1.2, 1.1, 1.3, None, 1.3]


def test_machines_types_and_open_points_have_tables_of_their_own() -> None:
    elsewhere = three(replace(SHORT, num_input=128, dtype="bfloat16"), 1.5, 1.0, 1.0)
    elsewhere["settings"]["machine"] |= {"cpu": "another CPU", "instructions": ["AVX2", "AMX"]}
    page = text(
        three(SHORT, 1.5, 1.0, 1.0),
        three(replace(SHORT, is_open=True), 1.0, 1.0, 1.0),
        three(LONG, 1.5, 1.0, 1.0),
        three(replace(SHORT, dtype="bfloat16"), 1.5, 1.0, 1.0),
        elsewhere,
    )
    headings = [line for line in page.splitlines() if line.startswith("### ")]
    assert headings == [
        "### 82m, float32: as many clients as said",
        "### 82m, float32: arrivals by chance, at 0.9 of the rate that vLLM reached",
        "### 82m, bfloat16: as many clients as said",
        "### 82m, bfloat16: as many clients as said",
    ]
    machines = [line for line in page.splitlines() if line.startswith("On ")]
    assert machines == [*["On a CPU, 2 cores, 16.0 GiB, Linux."] * 3,
                        "On another CPU with AVX2, AMX, 2 cores, 16.0 GiB, Linux."]  # fmt: skip
    assert "5 of 60 points" in page


def test_runs_that_lie_too_far_apart_have_no_ratio() -> None:
    ours, other = measured("tandem", 200.0, 0.1, 0.1), measured("peer-colocated", 100.0, 0.1, 0.1)
    assert ratio(content(SHORT, ours, other), AIMS[0]) == 2.0
    late = {**other, "date": "2026-01-01T03:00:00+00:00"}
    assert ratio(content(SHORT, ours, late), AIMS[0]) is None
    assert ratio(content(SHORT, other), AIMS[0]) is None
    assert "over vLLM" not in text(content(SHORT, ours, measured("tandem-colocated", 1.0, 1.0, 1.0))).split("###")[1]


def test_what_speaks_against_the_figures_is_said() -> None:
    loud = measured("tandem", 1.0, 1.0, 1.0, other_cores=0.7)
    loud["figures"]["num_failed"] = {"timeout": 2}
    other_code = measured("tandem-colocated", 1.0, 1.0, 1.0, code={**CODE, "digest": "f" * 16})
    page = text(content(SHORT, loud, other_code, measured("peer-colocated", 1.0, 1.0, 1.0)))
    assert "others used up to 0.70 cores just before 1 of 3 runs" in page
    assert "not all figures of Tandem are of the same code" in page
    assert "2 requests failed" in page
    assert "Warning" not in text(three(SHORT, 1.0, 1.0, 1.0))


def test_the_page_has_the_section_only_with_figures() -> None:
    assert "A grid of loads" not in docs.page(None)
    assert "A grid of loads" in docs.page(None, of_grid=[three(SHORT, 1.0, 1.0, 1.0)])


# --- measuring --------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _looks_at_others_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_QUIET_S", 0.05)
    monkeypatch.setattr(run, "_BETWEEN_READINGS_S", 0.01)


def grid(directory: Path, *points: Point) -> Grid:
    """Two toy servers, of which one is ours, with sources in `directory`; theirs cannot serve bfloat16."""

    def commands(place: Place) -> list[Command]:
        fails = ["--fails"] if place.dtype == "bfloat16" else []
        return [Command("toy", (sys.executable, str(PEER_PROCESS), str(place.port), *fails), place.port)]

    names = [("tandem", False), ("peer-colocated", True)]
    return Grid(
        comparisons=Comparisons(
            directory=directory / "grid",
            contestants=[Contestant(name, name, commands, is_peer=is_peer) for name, is_peer in names],
            place=Place(Path(), free_port(), (0,), directory / "logs"),
            settings=lambda plan, _: {"loads": {load.name: load.settings() for load in plan.loads}},
            console=Console(file=io.StringIO(), width=200),
            packages=directory,
        ),
        points=points,
        model=lambda _: Model(directory, range(128, 256)),
        num_warm_up=1,
    )


CLOSED, OTHER = Point(8, 101, 2), Point(8, 201, 2)
OPEN = replace(CLOSED, is_open=True)


@pytest.mark.faults
@pytest.mark.processes
async def test_a_tiny_grid_and_its_resumption(tmp_path: Path) -> None:
    tiny = grid(tmp_path, CLOSED, OTHER, OPEN)
    assert not tiny.is_done(CLOSED)
    assert await tiny.measure() == 0
    assert (tiny.failures, [tiny.is_done(point) for point in tiny.points]) == ({}, [True] * 3)
    said = tiny.comparisons.console.file.getvalue()  # type: ignore[attr-defined]
    starts = [line for line in said.splitlines() if line.endswith("to measure")]
    of_open = [line for line in starts if line.endswith("1 of 1 to measure")]
    assert (len(starts), len(of_open)) == (4, 2), "each server once for both closed ones, and once for the open one"
    assert len({each["seed"] for point in (CLOSED, OTHER) for each in read(tiny.comparisons.path(point))["runs"]}) == 2
    held = read(tiny.comparisons.path(CLOSED))
    assert point_of(held) == CLOSED
    assert {each["contestant"] for each in held["runs"]} == {"tandem", "peer-colocated"}
    assert {each["seed"] for each in held["runs"]} == {CLOSED.seed + 100}
    assert all(each["figures"]["itl_s"]["num"] >= 1000 for each in held["runs"])
    assert held["answers"] == []
    (peer,) = (each for each in held["runs"] if each["contestant"] == "peer-colocated")
    rate = read(tiny.comparisons.path(OPEN))["settings"]["loads"][OPEN.name]["rate"]
    assert rate == pytest.approx(0.9 * peer["figures"]["requests_per_s"], abs=1e-4)
    assert all(each["figures"]["lateness_s"] is not None for each in read(tiny.comparisons.path(OPEN))["runs"])

    # Again there is nothing to do; with other sources, ours alone is measured anew.
    before = [tiny.comparisons.path(point).read_text() for point in tiny.points]
    assert await tiny.measure() == 0
    assert [tiny.comparisons.path(point).read_text() for point in tiny.points] == before
    (tmp_path / "tandem").mkdir()
    (tmp_path / "tandem" / "new.py").write_text("")
    assert not tiny.is_done(CLOSED)
    assert await tiny.measure() == 0
    again = read(tiny.comparisons.path(CLOSED))
    assert [each for each in again["runs"] if each["contestant"] == "peer-colocated"] == [peer]
    assert tiny.is_done(OPEN)


@pytest.mark.faults
@pytest.mark.processes
async def test_a_point_that_cannot_be_measured_is_noted_and_the_others_go_on(tmp_path: Path) -> None:
    wrong = replace(CLOSED, dtype="bfloat16")
    tiny = grid(tmp_path, wrong, replace(OPEN, dtype="bfloat16"), CLOSED)
    assert await tiny.measure() == 0
    assert "ended with 1 before it was ready" in tiny.failures[wrong.name]
    assert "the rate of open points is not known" in tiny.failures[f"{wrong.name}-open"]
    assert [tiny.is_done(point) for point in tiny.points] == [False, False, True]
    assert "left" in tiny.comparisons.console.file.getvalue()  # type: ignore[attr-defined]


def test_how_long_it_takes() -> None:
    assert [duration(seconds) for seconds in (20, 150, 3700, 7260)] == ["0 min", "2 min", "1 h 2 min", "2 h 1 min"]


@pytest.mark.processes
def test_a_dry_run_lists_the_points(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = tmp_path / f"{SHORT.name}.json"
    runs = [{**measured("tandem", 1.0, 1.0, 1.0), "code": Code.of().as_json()}]
    held.write_text(json.dumps({"format": "tandem-side-by-side/1", "settings": {}, "runs": runs}))
    assert command.main(["--dry-run", "--out", str(tmp_path), "--servers", "tandem"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 61
    (line,) = (line for line in lines if line.split()[0] == SHORT.name)
    assert line.split() == [SHORT.name, "16", "512", "1,024", "done"]
    assert sum("done" in line for line in lines) == 1


def test_what_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--points", "nothing", "--out", str(tmp_path)]) == 1
    assert "no point is called nothing" in capsys.readouterr().err
    assert command.main(["--servers", "nobody", "--out", str(tmp_path)]) == 1
    assert "no server is called nobody" in capsys.readouterr().err
