"""`benchmarks parts`: its arithmetic by hand, its table, its refusals; and its cheap parts, measured for real."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from benchmarks import __main__ as benchmarks
from benchmarks.parts import command as parts_command
from benchmarks.parts import figures as parts
from benchmarks.parts.figures import Figure, shown, shown_goal
from benchmarks.parts.file import PartsFile
from benchmarks.parts.handoff import Admissions, HandoffSizes, Transfers
from benchmarks.parts.pair import PairSession
from benchmarks.parts.placement import PlacementCost, PlacementSizes, measure_placement
from benchmarks.parts.router import RouterSizes, RouterTtft, Streamed, _Reader, _Tally
from benchmarks.parts.serve import Idle, is_own, measure_idle, name_of
from benchmarks.peers.figures import Goal
from tandem import cli
from tandem.core.errors import ConfigError, TandemError
from tandem.engine.random_model import ModelSpec, save
from tests.support.waiting import wait_until

GUARD = str(Path(cli.__file__).parent / "cluster/serve/orphan_guard.py")

TRANSFERS = Transfers(
    exposed_s=[0.001, 0.002, 0.009],
    handoff_s=[0.010, 0.008, 0.012],
    exposed_answer_s=[0.001, 0.001, 0.001],
    handoff_answer_s=[0.002, 0.002, 0.002],
    compute_s=[1.0, 1.0, 1.0],
    num_bytes=40_000_000,
    num_descriptors=12,
    raw_s=[0.004, 0.004, 0.009],
    raw_descriptors=12,
)

# --- arithmetic -------------------------------------------------------------------------------------------------------


def test_exposed_is_the_median_over_the_raw_writes_median() -> None:
    figure = parts.exposed_figure(TRANSFERS, 2048)
    assert figure.value == pytest.approx(0.5)
    assert not figure.as_json()["is_reached"]
    assert figure.samples["exposed"].p99 == pytest.approx(0.009, rel=0.02)


def test_bandwidth_is_the_share_of_the_raw_writes() -> None:
    figure = parts.bandwidth_figure(TRANSFERS, 2048)
    assert figure.value == pytest.approx(0.4)
    assert figure.facts["raw bytes/s"] == pytest.approx(1e10)
    assert figure.facts["handoff bytes/s"] == pytest.approx(4e9)


@pytest.mark.parametrize(("admission_s", "is_reached"), [(0.0249, True), (0.0251, False)])
def test_an_admission_may_take_one_median_step_and_5_ms(admission_s: float, is_reached: bool) -> None:
    figure = parts.admission_figure(Admissions([admission_s] * 10, [0.02, 0.02, 0.5]), 8)
    assert figure.value == pytest.approx(admission_s)
    assert figure.as_json()["is_reached"] is is_reached


def test_the_routers_part_of_ttft_is_what_the_worker_did_not_take() -> None:
    figure = parts.ttft_figure(RouterTtft(client_s=[0.005, 0.004, 0.009], workers_s=[0.001, 0.002, 0.002]), 512)
    assert figure.value == pytest.approx(0.004)
    assert not figure.as_json()["is_reached"]


def test_streaming_is_the_median_round() -> None:
    rounds = [Streamed(100_000, seconds, 0.9, 0.2, 3e-5, 7_000.0) for seconds in (5.0, 8.0, 12.5)]
    figure = parts.streaming_figure(rounds, 256, 400)
    assert figure.value == 12_500
    assert figure.as_json()["is_reached"]
    assert figure.facts["router's CPU, cores"] == 0.9


def test_routers_are_compared_by_the_cpu_of_a_token_where_it_cost_least() -> None:
    rounds = {
        num: [Streamed(100_000, 5.0, 0.9, 0.2, token_s, 20_000.0) for token_s in (cost, 2 * cost)]
        for num, cost in ((1, 3e-5), (2, 3e-5), (4, 3.3e-5))
    }
    figure = parts.sharing_figure(rounds, 256, 400)
    assert figure.value == pytest.approx(1.1)
    assert figure.as_json()["is_reached"]
    assert figure.facts["4: CPU of a token, µs"] == pytest.approx(33)
    assert figure.facts["2: tokens/s"] == 20_000


def test_placement_is_the_median_with_the_most_workers() -> None:
    times = {8: [1e-5] * 3, 1024: [2e-5, 3e-5, 9e-5]}
    figure = parts.placement_figure(PlacementCost(times, times, times))
    assert figure.value == pytest.approx(3e-5)
    assert figure.as_json()["is_reached"]
    assert figure.samples["status, 1,024 workers"].num == 3


def test_placement_is_measured_with_each_number_of_workers() -> None:
    cost = measure_placement(PlacementSizes(num_workers=(1, 5), num_rounds=20))
    for seconds in (cost.placement_s, cost.request_s, cost.status_s):
        assert {num: len(found) for num, found in seconds.items()} == {1: 20, 5: 20}
    assert all(a <= b for num in (1, 5) for a, b in zip(cost.placement_s[num], cost.request_s[num], strict=True))


IDLE = Idle(own_cpu=[("Worker", 0.01), ("Worker", 0.005), ("tandem serve", 0.02)], ray_cpu=0.2, num_ray_processes=9)


def test_idle_is_the_sum_over_tandems_own_processes() -> None:
    figure = parts.idle_figure(IDLE, 30.0)
    assert figure.value == pytest.approx(0.035)
    assert not figure.as_json()["is_reached"]
    assert figure.facts["Worker, cores"] == pytest.approx(0.015)
    assert figure.facts["Ray's own 9 processes, cores"] == 0.2


def test_startup_is_the_median_start() -> None:
    assert parts.startup_figure([9.0, 11.0]).value == 10.0


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.249, "share", "25 %"),
        (0.0123, "cores", "1.23 % of a core"),
        (0.0031, "s", "3.10 ms"),
        (0.0000131, "s", "13.1 µs"),
        (12.5, "s", "12.50 s"),
        (12_345.6, "tokens/s", "12,346 tokens/s"),
    ],
)
def test_figures_are_shown_in_their_units(value: float, unit: str, text: str) -> None:
    assert shown(value, unit) == text
    assert shown_goal(Goal(value, is_lower=True), unit) == f"≥ {text}"
    assert shown_goal(Goal(value, is_lower=False), unit) == f"≤ {text}"


def test_the_command_offers_what_there_is() -> None:
    assert tuple(part.name for part in parts.PARTS) == benchmarks.PARTS
    assert {name for names, _ in parts_command._GROUPS for name in names} == set(benchmarks.PARTS)


def test_the_table_says_what_missed_its_goal() -> None:
    out = io.StringIO()
    figures = [parts.bandwidth_figure(TRANSFERS, 2048), parts.startup_figure([9.0, 11.0])]
    Console(file=out, width=160).print(parts_command.figure_table(figures))
    rows = {line.strip()[:20]: line for line in out.getvalue().splitlines()}
    assert "40 %" in rows["handoff bandwidth, f"]
    assert "≥ 85 % missed" in rows["handoff bandwidth, f"]
    assert "missed" not in rows["`tandem serve` to it"]


# --- processes of `tandem serve` --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "is_ours", "name"),
    [
        (["ray::RouterActor.wait_closed"], True, "RouterActor"),
        (["ray::SupervisorActor"], True, "SupervisorActor"),
        (["ray::DashboardAgent"], False, "DashboardAgent"),
        (["ray::IDLE"], False, "IDLE"),
        (["/x/bin/python", "-I", GUARD, "1"], True, "orphan_guard"),
        (["/x/tandem/bin/python", "/x/tandem/.venv/ray/dashboard.py"], False, "dashboard"),
        (["/x/tandem/ray/raylet", "--store"], False, "tandem serve"),
    ],
)
def test_rays_processes_are_told_from_ours(line: list[str], is_ours: bool, name: str) -> None:
    assert is_own(line) is is_ours
    assert name_of(line) == name


OWN = [sys.executable, "-c", "input()", GUARD]
OTHER = [sys.executable, "-c", "input()"]


@contextlib.contextmanager
def waiting(line: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A child that does nothing until the block ends."""
    with subprocess.Popen(line, stdin=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def become_zombie(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


async def idle_while_begun() -> asyncio.Task[Idle]:
    """The idle time of this process and its children, begun."""
    measuring = asyncio.create_task(measure_idle(os.getpid(), 0.2))
    await asyncio.sleep(0)
    return measuring


@pytest.mark.processes
async def test_each_own_process_is_in_the_idle_time() -> None:
    with waiting(OWN), waiting(OTHER):
        idle = await measure_idle(os.getpid(), 0.05)
    assert [name for name, _ in idle.own_cpu[1:]] == ["orphan_guard"]
    assert idle.num_ray_processes >= 1


@pytest.mark.processes
async def test_an_own_process_that_ends_in_the_idle_time_is_an_error() -> None:
    with waiting(OWN) as process:
        measuring = await idle_while_begun()
        process.kill()
        process.wait()
        with pytest.raises(TandemError, match="changed in the idle time: orphan_guard ended"):
            await measuring


@pytest.mark.processes
async def test_an_own_process_that_begins_in_the_idle_time_is_an_error() -> None:
    measuring = await idle_while_begun()
    with waiting(OWN), pytest.raises(TandemError, match="changed in the idle time: orphan_guard began"):
        await measuring


@pytest.mark.processes
@pytest.mark.parametrize("is_reaped", [False, True])
async def test_rays_processes_may_end_at_any_time(is_reaped: bool) -> None:
    num_before = (await measure_idle(os.getpid(), 0.0001)).num_ray_processes
    with waiting(OTHER) as ends_before, waiting(OTHER) as ends_within:
        become_zombie(ends_before)  # has no command line any more
        measuring = await idle_while_begun()
        become_zombie(ends_within)
        if is_reaped:
            ends_within.wait()
        idle = await measuring
    assert idle.num_ray_processes == num_before + (not is_reaped)


# --- the file ---------------------------------------------------------------------------------------------------------

STARTUP = parts.startup_figure([9.0, 11.0])


def write(path: Path, figures: Sequence[Figure], other_cores: float = 0.0, model: str = "random") -> dict[str, Any]:
    wanted = [figure.part.name for figure in figures]
    PartsFile.open(path, model, "ucx", wanted).write(figures, other_cores)
    content: dict[str, Any] = json.loads(path.read_text())
    return content


@pytest.mark.processes
def test_a_file_keeps_the_figures_that_were_not_measured_anew(tmp_path: Path) -> None:
    write(tmp_path / "parts.json", [parts.idle_figure(IDLE, 30.0), STARTUP], other_cores=0.3)
    content = write(tmp_path / "parts.json", [parts.bandwidth_figure(TRANSFERS, 96), parts.startup_figure([2.0])], 0.1)
    assert {figure["name"]: round(figure["value"], 3) for figure in content["figures"]} == {
        "bandwidth": 0.4, "idle": 0.035, "startup": 2.0
    }  # fmt: skip
    assert [figure["name"] for figure in content["figures"]] == ["bandwidth", "idle", "startup"]
    assert content["other_cores"] == 0.3


@pytest.mark.processes
@pytest.mark.parametrize("changed", ["machine", "versions", "model", "transport", "code"])
def test_figures_of_other_settings_are_not_mixed_and_not_lost(tmp_path: Path, changed: str) -> None:
    file = tmp_path / "parts.json"
    content = write(file, [parts.idle_figure(IDLE, 30.0), STARTUP])
    content[changed] = {"digest": "another"} if changed == "code" else "another"
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=f"holds idle of another {changed}: measure all"):
        write(file, [STARTUP])
    again = write(file, [parts.idle_figure(IDLE, 30.0), parts.startup_figure([2.0])])
    assert [figure["value"] for figure in again["figures"]] == [pytest.approx(0.035), 2.0]
    assert again[changed] != content[changed]


@pytest.mark.processes
@pytest.mark.parametrize("text", ["no JSON", "[]", '{"format": "tandem-bench/1"}'])
def test_a_file_of_something_else_is_not_overwritten(tmp_path: Path, text: str) -> None:
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"other\.json"):
        parts_command.run(None, None, ["ttft"], file, sizes=SMALL)
    assert file.read_text() == text


# --- the raw reader ---------------------------------------------------------------------------------------------------

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
ANSWER = HEAD + b"".join(
    b"%x\r\n%s\r\n" % (len(event), event)
    for event in [*(b'data: {"text": "%d"}\n\n' % n for n in range(3)), b"data: [DONE]\n\n"]
)


async def read(answers: Sequence[bytes], piece: int) -> tuple[_Tally, list[_Reader]]:
    """Answers that come in turn, in pieces of `piece` bytes, to readers of 3 tokens."""
    tally = _Tally(len(answers))
    readers = [_Reader(tally, num_tokens=3) for _ in answers]
    for at in range(0, max(map(len, answers)), piece):
        for reader, answer in zip(readers, answers, strict=True):
            if answer[at : at + piece]:
                reader.data_received(answer[at : at + piece])
    return tally, readers


@pytest.mark.parametrize("piece", [1, 2, 7, 1000])
async def test_events_are_counted_however_they_are_cut(piece: int) -> None:
    tally, readers = await read([ANSWER, ANSWER], piece)
    assert tally.over.done()
    for reader in readers:
        reader.check()


async def test_only_events_of_the_time_in_which_all_streams_run_count() -> None:
    tally, _ = await read([ANSWER, ANSWER], 1)
    # Of both: two further tokens behind the first; the window begins with the last first event and ends with an end.
    assert tally.num_in_window == 4


@pytest.mark.parametrize("cut", [b"[DONE]\n\n", b'data: {"text": "1"}\n\n'])
async def test_a_stream_with_another_number_of_events_is_an_error(cut: bytes) -> None:
    _, (reader,) = await read([ANSWER.replace(cut, b"")], 1000)
    reader.connection_lost(None)
    with pytest.raises(TandemError, match=r"a stream of 3 tokens came as [12] events"):
        reader.check()


async def test_an_error_ends_a_stream() -> None:
    tally, (reader,) = await read([b"HTTP/1.1 429 Too Many Requests\r\n\r\n"], 1000)
    assert tally.over.done()
    with pytest.raises(TandemError, match="429 Too Many"):
        reader.check()


# --- for real ---------------------------------------------------------------------------------------------------------

SMALL = parts_command.PartSizes(
    HandoffSizes(
        num_prompts=2, prompt=96, num_raw=3, num_admissions=5, short_prompt=40, num_running=2, running_tokens=100,
        kv_bytes=16 << 20,
    ),
    RouterSizes(num_ttft=5, num_warm_up=2, num_streams=8, num_tokens=400),
    num_streaming_rounds=1,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_command, "_QUIET_S", 0.1)


@contextlib.contextmanager
def no_process_left() -> Iterator[None]:
    """No child more than before: of other tests, `multiprocessing`'s own may live on in this process."""
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= before


def measure(tmp_path: Path, only: Sequence[str], model: Path | None = None) -> dict[str, dict[str, Any]]:
    file = tmp_path / "parts.json"
    with no_process_left():
        parts_command.run(model, None, only, file, sizes=SMALL)
    content = json.loads(file.read_text())
    assert content["format"] == "tandem-parts/1"
    return {figure["name"]: figure for figure in content["figures"]}


@pytest.mark.processes
def test_the_router_is_measured_before_workers_that_answer_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_API_KEYS", "of-the-users-own-server")
    figures = measure(tmp_path, ["ttft", "streaming"])
    assert figures.keys() == {"ttft", "streaming"}
    ttft = figures["ttft"]["samples"]
    assert ttft["added"]["num"] == 5
    assert 0 < ttft["worker's part"]["p50"] < ttft["client's TTFT"]["p50"]
    assert ttft["added"]["p50"] < ttft["client's TTFT"]["p50"]
    assert figures["streaming"]["value"] > 100


@pytest.mark.processes
@pytest.mark.faults  # twelve processes at once: half a minute in which whatever runs beside it stands still
def test_routers_that_share_a_port_are_measured_together(tmp_path: Path) -> None:
    (figure,) = measure(tmp_path, ["routers"]).values()
    assert figure["value"] > 0
    assert {f"{num}: tokens/s" for num in (1, 2, 4)} <= figure["facts"].keys()
    assert all(value > 0 for name, value in figure["facts"].items() if "tokens/s" in name or "token, µs" in name)


@pytest.mark.faults
@pytest.mark.processes
def test_handoffs_are_measured_between_real_workers(tmp_path: Path) -> None:
    model = save(ModelSpec(layers=2, max_positions=256), tmp_path / "model")
    figures = measure(tmp_path, ["exposed", "bandwidth", "admission"], model)
    assert figures.keys() == {"exposed", "bandwidth", "admission"}
    # 3 pages of 32 slots, of 2 layers with K and V of 2 heads of 16 float32: all, in each handoff
    assert figures["bandwidth"]["facts"]["bytes"] == 3 * 32 * 2 * 2 * 2 * 16 * 4
    assert figures["exposed"]["samples"]["exposed"]["num"] == 2
    assert figures["exposed"]["samples"]["raw write"]["num"] == 3
    admission = figures["admission"]["samples"]
    assert admission["admission"]["num"] == 5
    assert 0 < admission["admission"]["p50"] < 5
    assert admission["step"]["num"] > 5


@pytest.mark.processes
@pytest.mark.faults
def test_a_worker_that_does_not_start_is_an_error_that_says_why(tmp_path: Path) -> None:
    with no_process_left(), pytest.raises(TandemError, match=r"exposed: prefill ended with 1(.|\n)*no-model"):
        measure(tmp_path, ["exposed"], tmp_path / "no-model")


@pytest.mark.processes
@pytest.mark.faults
def test_what_was_found_before_a_failure_is_shown_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(TandemError, match="exposed: prefill ended with 1"):
        measure(tmp_path, ["ttft", "exposed"], tmp_path / "no-model")
    assert parts.ROUTER_TTFT.title[:20] in capsys.readouterr().out
    content = json.loads((tmp_path / "parts.json").read_text())
    assert [figure["name"] for figure in content["figures"]] == ["ttft"]


@pytest.mark.processes
@pytest.mark.parametrize(
    "number", [signal.SIGINT, *(pytest.param(n, marks=pytest.mark.faults) for n in (signal.SIGTERM, signal.SIGHUP))]
)
def test_who_ends_it_ends_what_it_has_started(tmp_path: Path, number: signal.Signals) -> None:
    # Under `nohup` the tests themselves run with some signals ignored, which a child would inherit, and heed.
    as_in_a_terminal = ["env", "--default-signal=INT,TERM,HUP"]
    line = [*as_in_a_terminal, sys.executable, "-m", "benchmarks", "parts", "--only", "streaming"]
    process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert process.stderr is not None
    while "streams" not in process.stderr.readline():
        assert process.poll() is None
    family = wait_until(lambda: psutil.Process(process.pid).children(recursive=True), "what it starts", 20)
    process.send_signal(number)
    assert process.wait(30) == 130
    assert "interrupted" in process.stderr.read()
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_part_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        benchmarks.main(["parts", "--only", "speed"])
    assert ended.value.code == 2
    assert "invalid choice: 'speed'" in capsys.readouterr().err


async def test_who_is_cancelled_in_the_middle_of_a_command_does_not_end_the_session() -> None:
    """gRPC ends a call whose write is cancelled."""

    class Call:
        def __init__(self) -> None:
            self.writing, self.goes_out = asyncio.Event(), asyncio.Event()
            self.written: list[object] = []

        async def write(self, command: object) -> None:
            self.writing.set()
            await self.goes_out.wait()
            self.written.append(command)

    session, call = PairSession("", ""), Call()
    session._calls["prefill"] = call
    saying = asyncio.create_task(session._say("prefill", "first"))
    await call.writing.wait()
    saying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await saying
    call.goes_out.set()
    await session._say("prefill", "second")
    assert call.written == ["first", "second"]
