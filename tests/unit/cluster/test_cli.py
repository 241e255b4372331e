"""The command line: parsing, help, and one clear line for every failure."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from state_files import cluster_file

from tandem import cli
from tandem.cluster import commands, statefile
from tandem.cluster.serve.signals import HANDLED
from tandem.core.errors import ConfigError
from tests.support.imports import loaded_by


@pytest.fixture(autouse=True)
def _own_signals() -> Iterator[None]:
    """`tandem serve` takes signals for its process, which ends with it; this one goes on with other tests."""
    before = {number: signal.getsignal(number) for number in HANDLED}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)

COMMANDS = (
    "serve", "status", "scale", "drain", "stop", "logs", "top", "trace", "hosts", "up", "down", "bench", "doctor",
    "certs", "version",
)


@pytest.fixture(autouse=True)
def _own_runtime_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    said = capsys.readouterr().out
    assert "example:" in said
    assert f"tandem {command}" in said.split("example:")[1]


@pytest.mark.processes
def test_a_reader_that_has_enough_ends_a_command_without_a_word() -> None:
    line = [sys.executable, "-m", "tandem.cli", "version"]
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as sink:
        ended = subprocess.run(line, stdout=sink, stderr=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_without_a_command_it_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    said = capsys.readouterr().out
    assert all(command in said for command in COMMANDS)


@pytest.mark.parametrize("line", [["version"], ["--version"]])
def test_version(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(line) == 0
    assert capsys.readouterr().out.startswith("tandem ")


@pytest.mark.parametrize("wrong", [["nonsense"], ["serve", "--port", "many"], ["serve", "--dtype", "int3"], ["--nope"]])
def test_wrong_usage_is_exit_code_2(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(wrong)
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (["serve", "--prefill", "-1"], "tandem serve: error: argument --prefill: '-1' is not a whole number from 0 to"),
        (["serve", "--decode", "0"], "argument --decode: '0' is not a whole number from 1 to 1024"),
        (["serve", "--decode", "1:x"], "argument --decode: 'x' is not a whole number from 1 to 1024"),
        (["serve", "--decode", "4:2"], "argument --decode: '4:2' is no range of sizes: the first is more than"),
        (["scale", "--prefill", "1:"], "argument --prefill: '' is not a whole number"),
        (["scale", "--routers", "1:2"], "argument --routers: '1:2' is not a whole number"),
        (["serve", "--port", "0"], "argument --port: '0' is not a whole number from 1 to 65535"),
        (["serve", "--port", "65536"], "argument --port: '65536' is not"),
        (["scale", "--prefill", "-1"], "tandem scale: error: argument --prefill: '-1' is not"),
        (["scale", "--decode", str(1 << 40)], f"argument --decode: '{1 << 40}' is not a whole number from 1 to 1024"),
        (["status", "--port", "1e3"], "argument --port: '1e3' is not"),
        (["bench", "run", "--concurrency", "-1"], "tandem bench run: error: argument --concurrency: '-1' is not"),
        (["bench", "run", "--warmup", "-1"], "argument --warmup: '-1' is not a whole number of at least 0"),
        (["plan", "kv", "--tokens", "9" * 16], "argument --tokens: '9999999999999999' is more than there can be"),
        (["plan", "kv", "--weight-bits", "1e308"], "argument --weight-bits: '1e308' is not a number of bits, above 0"),
    ],
)
def test_a_number_that_cannot_be_is_wrong_usage(
    line: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(line)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (["serve", "--prefil", "2"], "tandem serve: error: unknown: --prefil 2; did you mean --prefill?"),
        (["serve", "--dcode=2", "--prt", "1"], "did you mean --decode --port?"),
        (["bench", "run", "--concurency", "2"], "tandem bench run: error: unknown: --concurency 2; did you mean --co"),
        (["statsu"], "did you mean status?"),
        (["bench", "rnu"], "did you mean run?"),
        (["serve", "--dtype", "flot32"], "did you mean float32?"),
        (["status", "extra"], "tandem status: error: unknown: extra\n"),
    ],
)
def test_a_slip_is_answered_with_the_nearest_name(
    line: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(line)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


def test_options_lie_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "tandem.yaml"
    file.write_text("http: {port: 9000, host: 0.0.0.0}\npools: {decode: {workers: 3}}\n")
    line = ["serve", "--config", str(file), "--port", "9001", "--prefill", "2", "--served-model-name", "a", "*"]
    options = cli.make_parser().parse_args([*line, "--dtype", "bfloat16", "--model", "org/name"])
    config = cli._config(options)
    assert (config.http.port, config.http.host) == (9001, "0.0.0.0")
    assert (config.pools.prefill.workers, config.pools.decode.workers) == (2, 3)
    assert config.model.served_names == ("a", "*")
    assert (config.model.dtype, config.model.path) == ("bfloat16", "org/name")


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        (["--prefill", "1:4"], (1, 1, 4)),
        (["--prefill", "3"], (3, 3, 3)),
        (["--prefill", "2:2"], (2, 2, 2)),
        ([], (2, 2, 8)),
    ],
)
def test_a_size_or_a_range_replaces_all_that_the_file_says_of_the_pool(
    given: list[str], sizes: tuple[int, int, int], tmp_path: Path
) -> None:
    file = tmp_path / "tandem.yaml"
    file.write_text("pools: {prefill: {min: 2, max: 8}}\n")
    pool = cli._config(cli.make_parser().parse_args(["serve", "--config", str(file), *given])).pools.prefill
    assert (pool.at_first, pool.least, pool.most) == sizes


FREE = "a free port"


@pytest.mark.long
@pytest.mark.parametrize(
    ("line", "says"),
    [
        (["serve", "--config", "/no/such.yaml"], "cannot read /no/such.yaml"),
        (["serve", "--log", "/no/such.log"], "--log says where the output goes with --detach: give both"),
        (["serve", "--port", FREE, "--model", "/no/such/model"], "there is no directory /no/such/model"),
        (["status"], "no cluster of this user runs on this host; start one with `tandem serve`"),
        (["status", "--port", "8123"], "no cluster of this user runs on port 8123"),
        (["scale"], "say how many workers"),
        (["scale", "--decode", "2"], "no cluster"),
        (["stop"], "no cluster"),
        (["drain", "decode-0"], "no cluster"),
        (["drain", "decode-0", "--timeout", "0"], "--timeout is 0, must be from 0.001 to 604800 seconds"),
        (["drain", "decode-0", "--timeout", "nan"], "--timeout is nan, must be from 0.001 to 604800 seconds"),
        (["stop", "--grace", "inf"], "--grace is inf, must be from 0 to 604800 seconds"),
        (["status", "--address", "127.0.0.1:1"], "no Ray answers at 127.0.0.1:1 (unavailable); name the address"),
        (["stop", "--address", "ray://127.0.0.1:10001"], "is no address of a Ray head"),
        (
            ["serve", "--port", FREE, "--address", "127.0.0.1:1"],
            "no Ray answers at 127.0.0.1:1 (unavailable); start one with `ray",
        ),
    ],
)
def test_failures_are_one_clear_line(line: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = str(taken.getsockname()[1])
    code = 3 if says.startswith("no cluster") else 1
    assert cli.main([free if word == FREE else word for word in line]) == code
    error = capsys.readouterr().err
    assert says in error
    assert error.startswith(f"tandem {line[0]}: ")
    assert error.count("\n") == 1
    assert "Traceback" not in error


def test_a_defect_shows_its_traceback_only_with_debug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any, **__: Any) -> int:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("tandem.cluster.commands.status", broken)
    assert cli.main(["status"]) == 1
    assert "ZeroDivisionError: oops (a defect; --debug shows where)" in capsys.readouterr().err
    with pytest.raises(ZeroDivisionError):
        cli.main(["status", "--debug"])


@pytest.mark.processes
def test_help_and_version_import_neither_ray_nor_grpc_nor_torch() -> None:
    code = "from tandem import cli; cli.main(['version'])"
    assert loaded_by(code, "ray", "grpc", "torch") == []


@pytest.mark.processes
def test_status_stop_and_scale_load_no_more_than_they_need() -> None:
    """They answer in a moment: no Ray, no tensors, and no certificates on loopback."""
    heavy = ("ray", "torch", "numpy", "transformers", "cryptography", "router", "yaml")
    code = "import tandem.cluster.commands; from tandem import cli; cli.make_parser()"
    assert loaded_by(code, *heavy) == []


def test_state_files_of_dead_clusters_are_forgotten() -> None:
    statefile.write(cluster_file())
    statefile.write(cluster_file(port=8001, started=1))
    statefile.write(cluster_file(port=8002, started=1, local=False))
    assert [cluster.port for cluster in statefile.running()] == [8000, 8002]
    assert sorted(path.stem for path in statefile.runtime_directory().glob("*.json")) == ["8000", "8002"]


def test_state_directory_is_private() -> None:
    assert statefile.runtime_directory().stat().st_mode & 0o077 == 0


def test_several_clusters_ask_for_a_port(capsys: pytest.CaptureFixture[str]) -> None:
    statefile.write(cluster_file())
    statefile.write(cluster_file(port=8001))
    assert cli.main(["status"]) == 1
    assert "several clusters run here, on ports 8000, 8001; choose one with --port" in capsys.readouterr().err


@pytest.mark.parametrize("line", [["status"], ["scale", "--decode", "2"], ["drain", "decode-0"], ["stop"]])
def test_a_wrong_port_names_those_where_a_cluster_runs(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    statefile.write(cluster_file())
    statefile.write(cluster_file(port=8001))
    assert cli.main([*line, "--port", "9999"]) == 3
    assert "no cluster of this user runs on port 9999; choose --port 8000 or 8001" in capsys.readouterr().err


@pytest.mark.long
def test_what_answers_but_is_no_ray_is_told_apart_quickly(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        begun = time.monotonic()
        assert cli.main(["status", "--address", f"127.0.0.1:{port}"]) == 1
        assert time.monotonic() - begun < 10
    assert f"no Ray answers at 127.0.0.1:{port}" in capsys.readouterr().err


def test_a_supervisor_that_does_not_answer_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    statefile.write(cluster_file())
    assert cli.main(["status"]) == 1
    assert "the supervisor at 127.0.0.1:1 does not answer (UNAVAILABLE" in capsys.readouterr().err


@pytest.mark.long
def test_stop_forgets_a_cluster_that_is_gone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "RESTART_S", 0.1)
    statefile.write(cluster_file(started=1, local=False))
    assert cli.main(["stop"]) == 0
    assert "does not answer" in capsys.readouterr().out
    assert statefile.running() == []


def test_doctor_lists_everything_and_fails_when_something_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["doctor", "--host", "192.0.2.77"]) == 1
    said = capsys.readouterr().out
    assert "FAIL" in said
    for check in ("packages", "port", "transport", "model", "context", "memory", "versions", "ray", "disk"):
        assert check in said
    assert "use 127.0.0.1" in said


def test_doctor_looks_at_the_ray_that_would_be_joined(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--port", "18765", "--address", "127.0.0.1:1"]) == 1
    assert "no Ray answers at 127.0.0.1:1" in capsys.readouterr().out


def test_serve_checks_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    from tandem.cluster.ray import home
    from tandem.cluster.serve import serve

    monkeypatch.setattr(home, "start_local_ray", lambda: pytest.fail("Ray was started"))
    monkeypatch.setattr(serve.StopSignals, "install", lambda self: None)
    monkeypatch.setattr("tandem.cluster.serve.processes.kill_descendants", lambda: pytest.fail("others were killed"))
    with pytest.raises(ConfigError, match=r"cache\.max_context"):
        serve.serve(cli.load(None, {"cache.max_context": 10**9, "http.port": 18765}), None)


def test_a_second_signal_before_anything_started_touches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from tandem.cluster.serve import serve

    monkeypatch.setattr("tandem.cluster.serve.processes.kill_descendants", lambda: pytest.fail("others were killed"))
    statefile.write(cluster_file())
    monkeypatch.setattr("os._exit", sys.exit)
    with serve.Reporter() as reporter, pytest.raises(SystemExit) as caught:
        serve.Serving(cli.load(None, {}), None, reporter)._force()
    assert caught.value.code == 130
    assert statefile.running() == [cluster_file()]
