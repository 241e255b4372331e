"""`benchmarks link`: both sides as processes over loopback, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks.link.sender import LAYOUTS, Measured
from tandem.core.ports import free_port

SECRET = "TANDEM_LINK_SECRET"


@pytest.fixture(params=["ucx", pytest.param("nccl", marks=pytest.mark.faults)])
def listening(request: pytest.FixtureRequest) -> Iterator[tuple[str, int]]:
    """A receiver: its transport and port."""
    port = free_port()
    line = [sys.executable, "-m", "benchmarks", "link", "--listen", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(
        [*line, "--transport", request.param],
        env={**os.environ, SECRET: "of this test", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process, process.stdout as said:
        try:
            assert "listening" in said.readline()
            yield request.param, port
        finally:
            process.terminate()


@pytest.mark.processes
def test_all_is_measured_over_loopback(
    listening: tuple[str, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    transport, port = listening
    monkeypatch.setenv(SECRET, "of this test")
    file = tmp_path / "link.json"
    line = ["link", "--to", "127.0.0.1", "--port", str(port), "--transport", transport, "--layouts", "82m"]
    line += ["--tokens", "40", "700", "--runs", "2", "--prefill-rate", "20000", "--json", str(file)]
    assert benchmarks.main([*line, "--link", "a"]) == 0
    assert benchmarks.main([*line, "--link", "b"]) == 0, "one receiver serves one sender after the other"

    links = json.loads(file.read_text())["links"]
    assert [(link["link"], link["transport"]) for link in links] == [("a", transport), ("b", transport)]
    short, long = links[0]["measured"]
    assert short["num_bytes"] == 2 * LAYOUTS["82m"].page_bytes, "40 tokens are two pages"
    assert long["num_bytes"] == 22 * LAYOUTS["82m"].page_bytes
    for name in ("tcp_s", "raw_s", "handoff_s", "exposed_s"):
        assert len(long[name]) == 2, name
        assert min(long[name]) > 0, name
    assert "700" in capsys.readouterr().out
    assert not caplog.records, "nothing failed in between"


@pytest.mark.processes
@pytest.mark.parametrize("listening", ["ucx"], indirect=True)
def test_who_has_another_secret_is_told(
    listening: tuple[str, int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(SECRET, "of somebody else")
    for _ in range(2):  # and the receiver stays
        assert benchmarks.main(["link", "--to", "127.0.0.1", "--port", str(listening[1])]) == 1
        assert f"has another {SECRET}" in capsys.readouterr().err


@pytest.mark.parametrize(("secret", "words"), [("", f"set {SECRET}"), ("x", "nobody listens on 127.0.0.1")])
def test_what_cannot_be_measured_says_what_to_do(
    secret: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(SECRET, secret)
    assert benchmarks.main(["link", "--to", "127.0.0.1", "--port", str(free_port())]) == 1
    assert words in capsys.readouterr().err


def test_rates_are_of_the_median() -> None:
    measured = Measured("8b", 1, 2_000_000_000, 1.0, (1.0, 2.0, 9.0), (1.0,), (4.0,), (0.0,))
    assert measured.gb_per_s(measured.tcp_s) == 1.0
