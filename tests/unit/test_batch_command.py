"""`tandem batch`: by batches and one by one, interrupted and gone on with; a real router, scripted workers."""

from __future__ import annotations

import json
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tandem.batch.command import answer
from tandem.batch.requests import read_answers, read_requests
from tandem.batch.server import Server
from tandem.cli import main
from tandem.core.errors import ConfigError, NotRunningError
from tandem.core.ports import free_port
from tests.support.router_site import EOS, Site, opened_site, write_checkpoint
from tests.support.waiting import LONG_S

NUM = 30


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("toy") / "toy")


@pytest.fixture
def make_site(checkpoint: Path) -> Iterator[Callable[..., Site]]:
    made: list[Any] = []

    def make(**options: Any) -> Site:
        made.append(opened_site(checkpoint, options))
        site: Site = made[-1].__enter__()
        site.prefill.script = site.decode.script = lambda prompt, choice, index: [97, 98, 99, EOS][min(index, 3)]
        return site

    yield make
    for site in made:
        site.__exit__(None, None, None)


def written(file: Path, **others: Any) -> Path:
    """Requests of which the last one is wrong."""
    bodies = [{"model": "toy", "prompt": "ab"} for _ in range(NUM)]
    bodies[-1]["n"] = 0  # type: ignore[assignment]
    lines = (
        {"custom_id": f"r{n}", "method": "POST", "url": "/v1/completions", "body": body, **others}
        for n, body in enumerate(bodies)
    )
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_a_file_may_begin_with_the_mark_of_editors_on_windows(tmp_path: Path) -> None:
    file = written(tmp_path / "requests.jsonl")
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert [line.custom_id for line in read_requests(file)] == [f"r{number}" for number in range(NUM)]


def statuses(output: Path) -> list[tuple[str, int]]:
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    return [(line["custom_id"], line["response"]["status_code"]) for line in lines]


EXPECTED = [(f"r{n}", 200) for n in range(NUM - 1)] + [(f"r{NUM - 1}", 400)]


@pytest.mark.long
@pytest.mark.parametrize("way", ["by batches", "directly", "without batches"])
def test_a_file_is_answered_in_its_order(
    make_site: Callable[..., Site], tmp_path: Path, capsys: pytest.CaptureFixture[str], way: str
) -> None:
    has_batches = way != "without batches"
    site = make_site(**({"batches.directory": str(tmp_path / "batches")} if has_batches else {}))
    file = written(tmp_path / "in.jsonl")
    arguments = ["batch", str(file), "--url", site.url, *(["--directly"] if way == "directly" else [])]
    assert main(arguments) == 1, "one of the answers is an error"
    output = tmp_path / "in.jsonl.answers.jsonl"
    assert statuses(output) == EXPECTED
    said = capsys.readouterr()
    assert f"{NUM} answers, 1 of them errors" in said.out
    assert ("goes on without this command" in said.err) == (way == "by batches")
    assert ("one by one" in said.err) == (way == "without batches")
    if has_batches:
        assert not site.openai().files.list().data, "the server keeps nothing of it"
    assert sorted(path.name for path in tmp_path.glob("in*")) == ["in.jsonl", output.name], "nothing else is left"
    assert main(arguments) == 1
    assert "is there already" in capsys.readouterr().err


def test_an_answer_is_kept_where_its_name_has_half_of_a_pair(make_site: Callable[..., Site], tmp_path: Path) -> None:
    file, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked = {"custom_id": "\ud83d ö", "url": "/v1/completions", "body": {"model": "toy", "prompt": "ab"}}
    file.write_text(json.dumps(asked) + "\n")
    assert answer(file, output, url=make_site().url, window="24h", directly=False, concurrency=1) == 0
    assert statuses(output) == [("\ud83d ö", 200)]


@pytest.mark.long
def test_answers_of_an_earlier_run_are_kept(make_site: Callable[..., Site], tmp_path: Path) -> None:
    site, file, output = make_site(), written(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    kept = {"custom_id": "r3", "response": {"status_code": 200, "request_id": "x", "body": {}}, "error": None}
    (tmp_path / "out.jsonl.partial").write_text(json.dumps(kept) + '\n{"custom_id": "r4", "resp')
    assert answer(file, output, url=f"{site.url}/v1", window="24h", directly=False, concurrency=4) == 1
    assert statuses(output) == EXPECTED
    assert json.loads(output.read_text().splitlines()[3]) == kept
    assert site.prefill.count("start") == NUM - 2


@pytest.mark.long
def test_a_batch_of_an_earlier_run_is_followed(make_site: Callable[..., Site], tmp_path: Path) -> None:
    site = make_site(**{"batches.directory": str(tmp_path / "batches")})
    client, file, output = site.openai(), written(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    stored = client.files.create(file=file, purpose="batch")
    batch = client.batches.create(input_file_id=stored.id, endpoint="/v1/completions", completion_window="24h")
    (tmp_path / "out.jsonl.batch").write_text(batch.id)
    assert answer(file, output, url=site.url, window="24h", directly=False, concurrency=4) == 1
    assert statuses(output) == EXPECTED
    assert len(client.batches.list().data) == 1


@pytest.mark.long
def test_a_file_that_the_server_refused_is_sent_anew_when_it_has_been_corrected(
    make_site: Callable[..., Site], tmp_path: Path
) -> None:
    site = make_site(**{"batches.directory": str(tmp_path / "batches")})
    file, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    written(file, body={"model": "another", "prompt": "ab"})
    with pytest.raises(ConfigError, match="the server refuses the file: line 1"):
        answer(file, output, url=site.url, window="24h", directly=False, concurrency=4)
    assert not site.openai().files.list().data
    written(file)
    assert answer(file, output, url=site.url, window="24h", directly=False, concurrency=4) == 1
    assert statuses(output) == EXPECTED


def test_a_file_whose_batch_is_refused_stays_on_no_server(make_site: Callable[..., Site], tmp_path: Path) -> None:
    site, file = make_site(**{"batches.directory": str(tmp_path / "batches")}), written(tmp_path / "in.jsonl")
    with pytest.raises(ConfigError, match="completion_window must be a time"):
        answer(file, tmp_path / "out.jsonl", url=site.url, window="soon", directly=False, concurrency=4)
    assert not site.openai().files.list().data


class Busy(BaseHTTPRequestHandler):
    """Refuses each request twice before it answers."""

    protocol_version = "HTTP/1.1"
    seen: ClassVar[Counter[bytes]] = Counter()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.seen[body] += 1
        is_refused = self.seen[body] <= 2
        self.send_response(429 if is_refused else 200)
        if is_refused:
            self.send_header("retry-after", "0")
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")


@pytest.mark.long
def test_what_a_server_refuses_for_now_is_tried_again(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Busy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        line = {"custom_id": "r0", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}
        (tmp_path / "in.jsonl").write_text(json.dumps(line))
        url = f"http://127.0.0.1:{server.server_port}"
        assert main(["batch", str(tmp_path / "in.jsonl"), "--url", url, "--directly"]) == 0
        server.shutdown()
    assert statuses(tmp_path / "in.jsonl.answers.jsonl") == [("r0", 200)]
    assert list(Busy.seen.values()) == [3]


class Away(BaseHTTPRequestHandler):
    """A proxy whose router is away when it is first asked for a batch."""

    protocol_version = "HTTP/1.1"
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        batch = {
            "status": "completed", "request_counts": None, "input_file_id": "in", "output_file_id": "out",
            "error_file_id": None,
        }  # fmt: skip
        answer = {"custom_id": "r0", "response": {"status_code": 200, "body": {}}, "error": None}
        is_away = not self.asked
        self.asked.append(self.path)
        body = json.dumps(answer if self.path.endswith("/content") else batch).encode()
        self.send_response(502 if is_away else 200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_DELETE(self) -> None:
        self.send_response(204)
        self.send_header("content-length", "0")
        self.end_headers()


@pytest.mark.long
def test_a_batch_is_followed_beyond_an_answer_of_its_proxy_alone(tmp_path: Path) -> None:
    line = {"custom_id": "r0", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}
    (tmp_path / "in.jsonl").write_text(json.dumps(line))
    (tmp_path / "in.jsonl.answers.jsonl.batch").write_text("batch_1")
    with ThreadingHTTPServer(("127.0.0.1", 0), Away) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert main(["batch", str(tmp_path / "in.jsonl"), "--url", f"http://127.0.0.1:{server.server_port}"]) == 0
        server.shutdown()
    assert Away.asked == ["/v1/batches/batch_1", "/v1/batches/batch_1", "/v1/files/out/content"]
    assert statuses(tmp_path / "in.jsonl.answers.jsonl") == [("r0", 200)]


class Slow(BaseHTTPRequestHandler):
    """Answers the first request, and no other in time."""

    protocol_version = "HTTP/1.1"
    asked: ClassVar[queue.Queue[bytes]] = queue.Queue()
    answers: ClassVar[threading.Event] = threading.Event()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.asked.put(body)
        if body != b"first":
            self.answers.wait(LONG_S)
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")


def test_a_request_that_is_broken_off_is_not_sent_again() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Slow) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        server = Server(f"http://127.0.0.1:{site.server_port}")
        server.send("POST", "/v1/completions", b"first")
        assert Slow.asked.get(timeout=LONG_S) == b"first"
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(server.send, "POST", "/v1/completions", b"second")
            assert Slow.asked.get(timeout=LONG_S) == b"second"
            server.abort()
            try:
                with pytest.raises(NotRunningError):
                    sending.result(LONG_S / 4)
            finally:
                Slow.answers.set()
        with pytest.raises(NotRunningError):
            server.send("POST", "/v1/completions", b"third")
        assert Slow.asked.empty()
        site.shutdown()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{no", "line 2 is no JSON"),
        ("[" * 100_000, "line 2 is no JSON"),
        ('{"method": "POST"}', "line 2 has no custom_id"),
        ('{"custom_id": "r0", "url": "/v1/completions", "body": {}}', "line 2 has the custom_id of line 1"),
        ('{"custom_id": "x", "url": "/health", "body": {}}', "line 2 must have the method POST"),
        ('{"custom_id": "x", "url": "/v1/completions HTTP/1.1", "body": {}}', "line 2 must have the method POST"),
        ('{"custom_id": "x", "url": "/v1/ö", "body": {}}', "line 2 must have the method POST"),
        ('{"custom_id": "x", "url": "/v1/completions"}', "line 2 has no body"),
        ('{"custom_id": "x", "url": "/v1/completions", "body": {"stream": true}}', "leave `stream` out"),
    ],
)
def test_a_line_that_is_wrong_is_named(tmp_path: Path, line: str, words: str) -> None:
    first = '{"custom_id": "r0", "method": "POST", "url": "/v1/completions", "body": {}}'
    (tmp_path / "in.jsonl").write_text(f"{first}\n{line}\n")
    with pytest.raises(ConfigError, match=words):
        answer(tmp_path / "in.jsonl", tmp_path / "out", url="http://x", window="24h", directly=True, concurrency=1)


def test_a_directory_for_the_answers_that_is_not_there_is_named_before_anything_is_sent(
    make_site: Callable[..., Site], tmp_path: Path
) -> None:
    site, file = make_site(**{"batches.directory": str(tmp_path / "batches")}), written(tmp_path / "in.jsonl")
    with pytest.raises(ConfigError, match="nowhere is no directory"):
        answer(file, tmp_path / "nowhere" / "out", url=site.url, window="24h", directly=False, concurrency=1)
    assert not site.openai().batches.list().data


@pytest.mark.parametrize("directly", [False, True])
def test_answers_that_cannot_be_written_are_told_before_anything_is_sent(
    make_site: Callable[..., Site], tmp_path: Path, directly: bool
) -> None:
    site, file = make_site(**{"batches.directory": str(tmp_path / "batches")}), written(tmp_path / "in.jsonl")
    with pytest.raises(ConfigError, match=r"/proc/out cannot be written: .*; name another --output"):
        answer(file, Path("/proc/out"), url=site.url, window="24h", directly=directly, concurrency=1)
    assert not site.openai().files.list().data
    assert not site.prefill.count("start")


@pytest.mark.long
def test_a_file_that_is_not_the_one_of_its_batch_is_told_apart(make_site: Callable[..., Site], tmp_path: Path) -> None:
    site = make_site(**{"batches.directory": str(tmp_path / "batches")})
    client, file, output = site.openai(), written(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    stored = client.files.create(file=file, purpose="batch")
    batch = client.batches.create(input_file_id=stored.id, endpoint="/v1/completions", completion_window="24h")
    (tmp_path / "out.jsonl.batch").write_text(batch.id)
    file.write_text(file.read_text().replace('"r1"', '"new"'))
    with pytest.raises(ConfigError, match=f"batch {batch.id} has no answer to 'new'.*out.jsonl.batch"):
        answer(file, output, url=site.url, window="24h", directly=False, concurrency=4)
    assert not output.exists()


def test_a_batch_that_the_server_does_not_know_is_told_with_what_helps(
    make_site: Callable[..., Site], tmp_path: Path
) -> None:
    site = make_site(**{"batches.directory": str(tmp_path / "batches")})
    (tmp_path / "out.batch").write_text("batch_gone")
    with pytest.raises(ConfigError, match=r"batch_gone.*remove .*out.batch to send the file anew"):
        answer(written(tmp_path / "in"), tmp_path / "out", url=site.url, window="1h", directly=False, concurrency=1)


def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    file = written(tmp_path / "in.jsonl")
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(NotRunningError, match="does not answer"):
        answer(file, tmp_path / "out", url=url, window="24h", directly=False, concurrency=1)


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:99999", "http://host:8000x", "http://[fd00::5"])
def test_what_is_no_url_is_named(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match="is no URL; write it like"):
        answer(written(tmp_path / "in"), tmp_path / "out", url=url, window="1h", directly=False, concurrency=1)


def test_a_journal_loses_what_was_cut_off(tmp_path: Path) -> None:
    with (tmp_path / "journal").open("a+b") as journal:
        journal.write(b'{"custom_id": "a"}\n{"custom')
        journal.flush()
        assert list(read_answers(journal)) == ["a"]
        journal.write(b'{"custom_id": "b"}\n')
        journal.flush()
        assert list(read_answers(journal)) == ["a", "b"]
