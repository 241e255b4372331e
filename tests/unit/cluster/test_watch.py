"""`tandem top` and `tandem trace` against a real router with scripted workers."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from rich.console import Console

from tandem import cli
from tandem.cluster.watch.figures import NUM_SECONDS, Window, duration, sparkline
from tandem.cluster.watch.top import screen
from tests.support.router_site import Site, opened_site, write_checkpoint

KEY = "a key of this test"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("watch") / "toy")


@pytest.fixture(scope="module")
def site(checkpoint: Path) -> Iterator[Site]:
    with opened_site(checkpoint) as site:
        yield site


def test_top_shows_workers_and_figures_once(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    assert site.post(prompt="x", max_tokens=3).status_code == 200
    assert cli.main(["top", "--once", "--url", site.url]) == 0
    said = capsys.readouterr().out
    assert "Tandem toy: 0 requests under way" in said
    for word in ("prefill-0", "decode-0", "ready", "tokens/s"):
        assert word in said


@pytest.mark.processes
def test_top_ends_by_ctrl_c_in_order(site: Site) -> None:
    """In a terminal of its own, as a person calls it."""
    ours, its = pty.openpty()
    line = [sys.executable, "-m", "tandem.cli", "top", "--url", site.url]
    with subprocess.Popen(line, stdin=its, stdout=its, stderr=its) as top:
        os.close(its)
        seen = b""
        while b"decode-0" not in seen:
            seen += os.read(ours, 4096)
        top.send_signal(signal.SIGINT)
        try:
            while os.read(ours, 4096):
                pass
        except OSError:  # the terminal's other end is closed
            pass
        assert top.wait() == 0
    os.close(ours)


def test_trace_shows_where_the_time_went(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    request_id = site.post(prompt=["a", "b"], max_tokens=3).headers["x-request-id"]
    assert cli.main(["trace", request_id, "--url", site.url]) == 0
    said = capsys.readouterr().out
    assert said.count(f"{request_id}#") == 2, "one for each prompt"
    parts = ("waits for router", "read", "tokenise", "queue", "prefill", "send")
    for part in (*parts, "attempt 1 at", "prefill-0 → decode-0 (load)"):
        assert part in said, said
    assert cli.main(["trace", request_id, "--url", site.url, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trace", "nobody's", "--url", "{url}"], 'no request "nobody\'s" is remembered'),
        (["top", "--url", "ftp://x"], "is no URL; write it like http://host:8000"),
        (["top", "--url", "http://x:99999"], "is no URL; write it like http://host:8000"),
        (["top", "--url", "http://127.0.0.1:1"], "does not answer"),
        (["trace", "x", "--url", "{url}/v1/nothing"], "is not served here"),
    ],
)
def test_what_cannot_be_shown_says_why(
    site: Site, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([argument.format(url=site.url) for argument in arguments]) in (1, 3)
    assert said in capsys.readouterr().err


class Breaking(BaseHTTPRequestHandler):
    """Answers in full what is no Tandem's, and breaks off what streams."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        if self.path == "/v1/events":
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"40\r\ndata: {")
            self.close_connection = True
            return
        self.send_header("content-length", "6")
        self.end_headers()
        self.wfile.write(b"<html>")


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["top", "--once"], "the router at {url} has left"),
        (["top"], "the router at {url} has left"),
        (["trace", "x"], "what answers at {url} is no Tandem of this version"),
    ],
)
def test_an_answer_that_breaks_off_or_is_anothers_is_no_defect(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Breaking) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert cli.main([*arguments, "--url", url]) in (1, 3)
        server.shutdown()
    error = capsys.readouterr().err
    assert said.format(url=url) in error
    assert "defect" not in error


@pytest.mark.long
def test_a_key_is_read_from_the_environment(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = frozenset({hashlib.sha256(KEY.encode()).digest()})
    with opened_site(checkpoint, with_workers=False, key_digests=digests) as site:
        for given, code, said in ((None, 1, "asks for an API key"), ("wrong", 1, "does not take"), (KEY, 0, "")):
            if given:
                monkeypatch.setenv("TANDEM_API_KEY", given)
            assert cli.main(["top", "--once", "--url", site.url]) == code
            assert said in capsys.readouterr().err


def test_a_screen_has_room_for_many_workers_and_requests() -> None:
    pages = dict.fromkeys(("free", "used", "reserved", "cached", "quarantined"), 5)
    worker = {"state": "ready", "num_running": 1, "num_queued": 0, "pages": pages}
    row = {"state": "decoding", "age_s": 1.0, "ttft_s": 0.1, "prompt_tokens": 9, "output_tokens": 2, "attempt": 1}
    pools = {role: [{"id": f"{role}-{n}", **worker} for n in range(512)] for role in ("prefill", "decode")}
    state = {
        "routers": [{"num_running": 200}],
        "cluster": {"model": "m", **pools, "num_workers": {"prefill": 512, "decode": 512}},
        "running": [{"id": f"request-{n}", "prefill": "p", "decode": "d", **row} for n in range(200)],
    }
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(screen(state, Window(), 30))
    lines = console.export_text().splitlines()
    assert len(lines) <= 30
    assert any("and 1014 more" in line for line in lines)
    assert any("request-0" in line for line in lines)


def test_the_window_keeps_a_minute() -> None:
    window = Window()
    for second in range(200):
        told = {"second": second, "tokens": 2, "arrived": 1, "outcomes": {"finished": 1}, "ttft": {"0": 1}, "itl": {}}
        window.add({"seconds": [told]})
        window.add({"seconds": [told]})  # again, after a router has left
    assert len(window.seconds) == NUM_SECONDS
    assert (window.rate("tokens"), window.quantile("ttft", 0.5), window.quantile("itl", 0.5)) == (2.0, 1.0, None)
    assert window.outcomes == {"finished": NUM_SECONDS}


def test_numbers_read_well() -> None:
    assert [duration(value) for value in (None, 2e-5, 0.0123, 1.5)] == ["-", "20 µs", "12.3 ms", "1.50 s"]
    assert sparkline([0, 1, 4, 8]) == " ▁▄█"
    assert sparkline([0, 0]) == "  "
