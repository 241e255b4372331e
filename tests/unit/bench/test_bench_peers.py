"""Servers side by side: real processes that are started, measured and ended."""

from __future__ import annotations

import asyncio
import io
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from bench_peers import request, serving
from rich.console import Console

from benchmarks.code import Code
from benchmarks.peers import __main__ as command
from benchmarks.peers import models, run
from benchmarks.peers.run import Comparison, compare, prompt_tokens
from benchmarks.peers.servers import CONTESTANTS, TANDEM_COLOCATED, Contestant, Place, chosen_contestants, command_line
from benchmarks.peers.turns import (
    GoodputLoad,
    Load,
    Measured,
    Plan,
    read,
)
from tandem.bench import child_process
from tandem.bench.load.trace_entry import TraceEntry
from tandem.bench.server_process import Command, running
from tandem.core.config import PoolsConfig
from tandem.core.errors import ConfigError, TandemError
from tandem.core.ports import free_port

REPOSITORY = Path(__file__).parents[3]
PEER_PROCESS = Path(__file__).with_name("peer_process.py")


# --- the servers ------------------------------------------------------------------------------------------------------


@pytest.fixture
def port() -> Iterator[int]:
    number = free_port()
    yield number
    with closing(socket.socket()) as probe:
        assert probe.connect_ex(("127.0.0.1", number)) != 0, "the server still runs"


def peer(port: int, *options: object) -> Command:
    return Command("toy", (sys.executable, str(PEER_PROCESS), str(port), *map(str, options)), port)


def test_without_the_peer_only_ours_is_measured(tmp_path: Path) -> None:
    names = [contestant.name for contestant in CONTESTANTS]
    left, messages = chosen_contestants(names, None)
    assert [contestant.name for contestant in left] == ["tandem", "tandem-strict"]
    assert [message.split(" is ")[0] for message in messages] == ["peer-colocated", "peer-split"]
    assert "--peer-venv" in messages[0]
    with pytest.raises(ConfigError, match=r"holds no vLLM \(tools/setup_peer\.sh"):
        chosen_contestants(["peer-split"], tmp_path)
    with pytest.raises(ConfigError, match="no server is called vllm; there are tandem, "):
        chosen_contestants(["vllm"], None)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "vllm").touch()
    assert chosen_contestants(names, tmp_path) == (list(CONTESTANTS), [])


def test_the_commands_share_the_cores_and_the_ports(tmp_path: Path) -> None:
    place = Place(tmp_path / "model", 9000, (2, 3), tmp_path, tmp_path / "venv", tmp_path / "router.py")
    commands = {contestant.name: contestant.commands(place) for contestant in CONTESTANTS}
    assert all(str(place.model) in own[0].argv for own in commands.values())
    assert [own[-1].port for own in commands.values()] == [9000] * 4
    assert "--config" not in commands["tandem"][0].argv
    config = Path(commands["tandem-strict"][0].argv[-1])
    assert config.read_text() == "scheduling:\n  mixed_pool: false\n"
    (engine,) = commands["peer-colocated"]
    assert engine.env["VLLM_CPU_OMP_THREADS_BIND"] == "2,3"
    prefill, decode, router = commands["peer-split"]
    assert [engine.env["VLLM_CPU_OMP_THREADS_BIND"] for engine in (prefill, decode)] == ["2", "3"]
    assert prefill.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] != decode.env["VLLM_NIXL_SIDE_CHANNEL_PORT"]
    assert router.argv[-2:] == ("http://127.0.0.1:9001", "http://127.0.0.1:9002")


def test_ours_are_told_what_is_wanted_and_the_peer_cannot_be(tmp_path: Path) -> None:
    from tandem.core.config import load

    place = Place(tmp_path / "model", 9000, (0, 1), tmp_path, tmp_path / "venv", tmp_path / "router.py")
    for contestant in (*CONTESTANTS, TANDEM_COLOCATED):
        before = contestant.commands(place)
        after = contestant.commands(replace(place, told=(2.5, 0.06)))
        if contestant.is_peer:
            assert after == before
        else:
            config = load(Path(after[0].argv[-1]))
            assert (config.slo.ttft_ms, config.slo.tpot_ms) == (2500, 60)
            assert config.scheduling.mixed_pool is (contestant.name != "tandem-strict")
            assert set(before[0].argv) - {"--config"} <= set(after[0].argv)


@pytest.mark.parametrize(
    ("cores", "prefill_on", "decode_on"), [((4,), "4", "4"), ((0, 1, 2), "0", "1,2"), ((0, 1, 2, 3), "0,1", "2,3")]
)
def test_two_engines_use_all_cores(cores: tuple[int, ...], prefill_on: str, decode_on: str, tmp_path: Path) -> None:
    place = Place(tmp_path / "model", 9000, cores, tmp_path, tmp_path / "venv", tmp_path / "router.py")
    (split,) = (contestant for contestant in CONTESTANTS if contestant.name == "peer-split")
    prefill, decode, _ = split.commands(place)
    assert prefill.env["VLLM_CPU_OMP_THREADS_BIND"] == prefill_on
    assert decode.env["VLLM_CPU_OMP_THREADS_BIND"] == decode_on


def test_a_command_line_names_no_directory_of_this_machine(tmp_path: Path) -> None:
    place = Place(tmp_path / "m", 9000, (0, 1), tmp_path / "l", tmp_path / "v", tmp_path / "t" / "router.py")
    place.directory.mkdir()
    lines = {each.name: [command_line(command, place) for command in each.commands(place)] for each in CONTESTANTS}
    (strict,) = lines["tandem-strict"]
    assert strict == "BIN/tandem serve --model MODEL --port 9000 --config LOGS/tandem.yaml"
    prefill, _, router = lines["peer-split"]
    assert prefill.startswith("VLLM_CPU_OMP_THREADS_BIND=0 VLLM_CPU_KVCACHE_SPACE=2 ")
    assert " PEER_VENV/bin/vllm serve MODEL --host 127.0.0.1 --port 9001 " in prefill
    assert router.startswith("PEER_VENV/bin/python TOOLS/router.py 9000 http")
    assert not any(str(tmp_path) in line for own in lines.values() for line in own)


def test_the_strict_configuration_is_one_that_tandem_knows(tmp_path: Path) -> None:
    from tandem.core.config import load

    place = Place(tmp_path / "model", 9000, (0, 1), tmp_path)
    (strict,) = (contestant for contestant in CONTESTANTS if contestant.name == "tandem-strict")
    config = load(Path(strict.commands(place)[0].argv[-1]))
    assert config.scheduling.mixed_pool is False


def test_a_server_says_how_many_workers_its_commands_start(tmp_path: Path) -> None:
    place = Place(tmp_path / "model", 9000, (0, 1), tmp_path, tmp_path / "venv", tmp_path / "router.py")
    pools = PoolsConfig()
    for contestant in (*CONTESTANTS, TANDEM_COLOCATED):
        commands = contestant.commands(place)
        num = sum("VLLM_CPU_OMP_THREADS_BIND" in command.env for command in commands)
        if not contestant.is_peer:
            argv = commands[0].argv
            for option, pool in (("--prefill", pools.prefill), ("--decode", pools.decode)):
                num += int(argv[argv.index(option) + 1]) if option in argv else pool.workers
        assert contestant.num_workers == num, contestant.name


@pytest.mark.processes
async def test_a_server_runs_inside_and_not_after(port: int, tmp_path: Path) -> None:
    async with running([peer(port)], tmp_path):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\n\r\n")
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        writer.close()


@pytest.mark.processes
async def test_one_that_ends_at_once_is_reported_with_its_log(port: int, tmp_path: Path) -> None:
    with pytest.raises(TandemError, match=r"toy ended with 1 before it was ready(.|\n)*no such checkpoint"):
        async with running([peer(port, "--fails")], tmp_path):
            pytest.fail("it is not ready")


@pytest.mark.processes
async def test_what_does_not_end_is_killed_with_its_children(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "_STOP_S", 0.2)
    pid_file = tmp_path / "pid"
    async with running([peer(port, "--is-stubborn", pid_file)], tmp_path):
        child = psutil.Process(int(pid_file.read_text()))
        assert child.is_running()
    gone, alive = psutil.wait_procs([child], timeout=10)
    assert (gone, alive) == ([child], []) or child.status() == psutil.STATUS_ZOMBIE


async def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    with closing(socket.socket()) as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        number = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"listens on port {number} already"):
            async with running([peer(number)], tmp_path):
                pytest.fail("the port is taken")


# --- all together -----------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _looks_at_others_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_QUIET_S", 0.05)


def comparison(tmp_path: Path, port: int, *, loads: tuple[Load, ...], goodput: GoodputLoad | None = None) -> Comparison:
    """Two toy servers; only the first counts its prompt tokens, and its sources lie in `tmp_path`."""
    contestants = [
        Contestant("ours", "Ours", lambda place: [peer(place.port, "--has-metrics")]),
        Contestant("other", "Other", lambda place: [peer(place.port)], is_peer=True),
    ]
    return Comparison(
        plan=Plan(("ours", "other"), loads, num_repetitions=1, num_warm_up=1, goodput=goodput),
        place=Place(tmp_path, port, (0,), tmp_path),
        contestants=contestants,
        vocabulary=range(128, 256),
        trace=[TraceEntry(8, 2)] * 4,
        measured=Measured.opened(tmp_path / "peers.json", {"loads": {load.name: load.settings() for load in loads}}),
        console=Console(file=io.StringIO()),
        code=Code.of(tmp_path),
        packages=tmp_path,
    )


@pytest.mark.faults
@pytest.mark.processes
async def test_a_comparison_and_its_resumption(tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_BETWEEN_READINGS_S", 0.01)
    small = (Load("A", 16, 4, 2, num_requests=6), Load("B", 8, 3, 1, num_requests=2))
    assert await compare(comparison(tmp_path, port, loads=small[:1])) == 0
    ours, other = read(tmp_path / "peers.json")["runs"]
    assert [run["contestant"] for run in (ours, other)] == ["ours", "other"]
    assert ours["figures"]["num_output_tokens"] == other["figures"]["num_output_tokens"] == 24
    # Those of the warm-up are not among them.
    assert ours["prompt_tokens_computed"] == {"prefill": 72, "decode": 24}
    assert other["prompt_tokens_computed"] == {}
    assert ours["seed"] == other["seed"]
    assert ours["digests"] == other["digests"]
    assert (tmp_path / "ours" / "toy.log").is_file()
    assert (ours["code"], other["code"]) == (Code.of(tmp_path).as_json(), None)
    assert all(re.search(r"/peer_process\.py \d+( --has-metrics)?$", *run["commands"]) for run in (ours, other))
    assert all(0 <= run["other_cores"] < 1000 for run in (ours, other))
    answers = read(tmp_path / "peers.json")["answers"]
    assert [item["contestant"] for item in answers] == ["ours", "other"]
    assert answers[0]["answers"] == answers[1]["answers"] == [[f"{n} " for n in range(64)]] * 8

    searched = GoodputLoad("t.csv", 4, slo_ttft_s=60, slo_tpot_s=60, start_rate=100.0)
    resumed = comparison(tmp_path, port, loads=small, goodput=searched)
    assert await compare(resumed) == 0
    content = read(tmp_path / "peers.json")
    assert content["runs"][:2] == [ours, other]
    assert content["answers"] == answers
    assert [(run["contestant"], run["load"]) for run in content["runs"][2:]] == [("ours", "B"), ("other", "B")]
    assert [search["contestant"] for search in content["goodput"]] == ["ours", "other"]
    assert [search["probes"][-1]["rate"] for search in content["goodput"]] == [100 * 2**11] * 2
    assert content["goodput"][0]["goodput_per_s"] == 100 * 2**11
    stamp = (tmp_path / "peers.json").stat().st_mtime_ns
    assert await compare(resumed) == 0
    assert (tmp_path / "peers.json").stat().st_mtime_ns == stamp


@pytest.fixture
def busy() -> Iterator[None]:
    """Another process that keeps one core busy."""
    program = "print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield
        process.kill()


@pytest.mark.processes
@pytest.mark.faults
@pytest.mark.usefixtures("busy")
async def test_work_of_others_before_a_turn_is_recorded(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_QUIET_S", 0.5)
    monkeypatch.setattr(run, "_BETWEEN_READINGS_S", 0.01)
    await compare(comparison(tmp_path, port, loads=(Load("A", 8, 2, 1, num_requests=1),)))
    assert all(run["other_cores"] > 0.2 for run in read(tmp_path / "peers.json")["runs"])


@pytest.mark.processes
async def test_sources_that_change_meanwhile_end_the_comparison(tmp_path: Path, port: int) -> None:
    comparing = comparison(tmp_path, port, loads=(Load("A", 8, 2, 1, num_requests=1),))
    (tmp_path / "tandem").mkdir()
    (tmp_path / "tandem" / "new.py").touch()
    with pytest.raises(TandemError, match="sources changed since the comparison began"):
        await compare(comparing)
    # The peer does not depend on them.
    others = replace(comparing, plan=replace(comparing.plan, contestants=("other",)))
    assert await compare(others) == 0
    assert [run["contestant"] for run in read(tmp_path / "peers.json")["runs"]] == ["other"]


async def test_counts_are_read_when_all_workers_have_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_BETWEEN_READINGS_S", 0.0)
    counts = iter((10, 20, 30, 30, 40))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        body = b'tandem_prompt_tokens_computed_total{role="prefill"} %d.0\n' % next(counts)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        writer.close()

    async with serving(serve) as url:
        assert await prompt_tokens(url) == {"prefill": 30}


@pytest.mark.processes
async def test_an_interrupt_keeps_what_is_there_and_ends_the_server(tmp_path: Path, port: int) -> None:
    loads = (Load("A", 8, 2, 1, num_requests=1), Load("B", 8, 4000, 1, num_requests=100))
    comparing = comparison(tmp_path, port, loads=loads)
    has_run = asyncio.Event()

    class Watched(Measured):
        def add_run(self, run: dict[str, Any]) -> None:
            super().add_run(run)
            has_run.set()

    watched = Watched(tmp_path / "peers.json", {})
    interrupted = asyncio.create_task(compare(replace(comparing, measured=watched)))
    await has_run.wait()
    interrupted.cancel()
    with pytest.raises(asyncio.CancelledError):
        await interrupted
    assert [run["load"] for run in read(watched.path)["runs"]] == ["A"]


@pytest.mark.faults
@pytest.mark.processes
def test_the_model_in_the_cache_is_that_of_the_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO())
    monkeypatch.setattr(models, "CACHE", tmp_path)
    small = {"hidden": 16, "layers": 1, "heads": 2, "kv-heads": 1, "intermediate": 16, "vocab": 300}
    first = models.made_model(console, "small", small)
    assert (first / "config.json").is_file()
    stamp = first.stat().st_mtime_ns
    assert models.made_model(console, "small", small) == first
    assert first.stat().st_mtime_ns == stamp
    second = models.made_model(console, "small", {**small, "layers": 2})
    assert second != first
    short = models.made_model(console, "small", {**small, "dtype": "bfloat16"})
    assert short not in (first, second)
    assert '"dtype": "bfloat16"' in (short / "config.json").read_text()
    assert '"num_hidden_layers": 2' in (second / "config.json").read_text()


def test_the_command_refuses_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = command.main
    assert main(["--servers", "peer-split", "--peer-venv", str(tmp_path)]) == 1
    assert "holds no vLLM" in capsys.readouterr().err
    assert main(["--loads", "Q"]) == 1
    assert "no load is called Q" in capsys.readouterr().err
    assert main(["--repetitions", "0"]) == 1
    assert "--repetitions is at least 1" in capsys.readouterr().err
    assert main(["--goodput", str(tmp_path / "none.csv")]) == 1
    assert "none.csv" in capsys.readouterr().err
