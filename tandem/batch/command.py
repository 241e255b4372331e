"""Answers a file of requests: hands it to the server as a batch, where that has batches, or sends them one by one.

What an interrupted run has reached stands beside the output: `OUTPUT.batch` names the server's batch, `OUTPUT.partial`
has the answers so far. The same command goes on from there; both go when the output is whole.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tandem.batch.requests import AskedLine, lines_of, read_answers, read_requests, write_answers
from tandem.batch.server import RefusedError, Server
from tandem.core.errors import ConfigError, NotRunningError, TandemError
from tandem.core.writable import check_writable

_LOOK_S = 1.0
_FIRST_BACK_OFF_S, _MAX_BACK_OFF_S = 0.5, 30.0
#: Tries at a server that does not answer, one after the other; what it refuses for the moment is tried for ever.
_MAX_UNANSWERED = 8
_TRY_AGAIN = (408, 429, 500, 502, 503, 504)
_ENDED = ("completed", "failed", "expired", "cancelled")

Show = Callable[[int, int], None]
"""How many are answered, and how many of them are no 200."""


@dataclass(frozen=True)
class Found:
    """Answers by custom_id; and the files of them and of what was asked, which a server keeps until told otherwise."""

    by_id: dict[str, bytes]
    file_ids: list[str] = field(default_factory=list)


def answer(file: Path, output: Path, *, url: str, window: str, directly: bool, concurrency: int) -> int:
    """Answer all; the exit code: 0 where each answer is a 200, else 1.

    Raises:
        ConfigError: the file is wrong, or the server refuses it.
        NotRunningError: nothing answers.
    """
    asked = read_requests(file)
    if output.exists():
        raise ConfigError(f"{output} is there already; remove it, or name another --output")
    if not output.parent.is_dir():
        raise ConfigError(f"{output.parent} is no directory; make it, or name another --output")
    check_writable(output, "--output")  # a batch whose name cannot be noted would be sent, and paid for, again
    server = Server(url)
    console = Console(stderr=True)
    try:
        with _progress(console, len(asked)) as show:
            found = None if directly else _by_batch(server, file, output, asked, window, show)
            if found is None:
                found = Found(_one_by_one(url, output, asked, concurrency, show))
        num_failed = write_answers(output, asked, found.by_id.__getitem__)
        _delete(server, found.file_ids)
    except OSError as error:  # of a file: what a connection raises has become one of ours
        raise ConfigError(f"the answers cannot be written to {output}: {error.strerror}", key="--output") from error
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        raise
    finally:
        server.close()
    for left in (_batch_file(output), _partial_file(output)):
        left.unlink(missing_ok=True)
    failed = f", {num_failed} of them errors" if num_failed else ""
    print(f"{output}: {len(asked)} answers{failed}")
    return 1 if num_failed else 0


# -- by the server's batches


def _by_batch(
    server: Server, file: Path, output: Path, asked: list[AskedLine], window: str, show: Show
) -> Found | None:
    """`None`: the server has no batches, or not of these."""
    endpoints = {line.url for line in asked}
    note = _batch_file(output)
    if len(endpoints) > 1 or _partial_file(output).exists():
        return None
    if note.exists():
        batch_id = note.read_text().strip()
    else:
        uploaded: list[str] = []
        try:
            uploaded.append(server.upload(file))
            body = {"input_file_id": uploaded[0], "endpoint": endpoints.pop(), "completion_window": window}
            batch_id = str(server.ask("POST", "/v1/batches", body)["id"])
        except RefusedError as error:
            _delete(server, uploaded)
            if error.status not in (404, 405):
                raise
            print(f"the server has no batches ({error.message}): the requests are sent one by one", file=sys.stderr)
            return None
        print(f"batch {batch_id}; it goes on without this command", file=sys.stderr)
        note.write_text(batch_id + "\n")
    found = _followed(server, batch_id, note, show)
    if (lacking := next((line.custom_id for line in asked if line.custom_id not in found.by_id), None)) is not None:
        raise ConfigError(
            f"batch {batch_id} has no answer to {lacking!r}: {file} was another when it was sent; remove {note} to "
            "send it anew"
        )
    return found


def _delete(server: Server, file_ids: Iterable[str]) -> None:
    """What was sent there and what has been read: a server keeps its files until somebody deletes them, and nobody else
    knows of these."""
    for file_id in file_ids:
        try:
            server.ask("DELETE", f"/v1/files/{file_id}")
        except (TandemError, ValueError) as error:  # that changes nothing of the answers
            print(f"the server keeps the file {file_id}: {error}", file=sys.stderr)


def _followed(server: Server, batch_id: str, note: Path, show: Show) -> Found:
    """Raises `ConfigError`: the batch failed, and the note of it is gone; names its first lines that are wrong."""
    back_off_s, num_unanswered = _FIRST_BACK_OFF_S, 0
    while True:
        try:
            batch = server.ask("GET", f"/v1/batches/{batch_id}")
        except (NotRunningError, RefusedError) as error:
            if isinstance(error, RefusedError):
                if error.status == 404:
                    raise ConfigError(f"{error.message}; remove {note} to send the file anew") from error
                if error.status not in _TRY_AGAIN:
                    raise
            # Its router is replaced, and a proxy may say so; or we have asked too often.
            num_unanswered += 1
            if num_unanswered > _MAX_UNANSWERED:
                raise
            pause_s, back_off_s = back_off_s, min(2 * back_off_s, _MAX_BACK_OFF_S)
        else:
            counts = batch["request_counts"] or {"completed": 0, "failed": 0}
            show(counts["completed"] + counts["failed"], counts["failed"])
            if batch["status"] in _ENDED:
                break
            pause_s, back_off_s, num_unanswered = _LOOK_S, _FIRST_BACK_OFF_S, 0
        time.sleep(pause_s)
    if batch["status"] == "failed":
        note.unlink(missing_ok=True)  # the same command sends the file anew once it has been corrected
        _delete(server, [batch["input_file_id"]])
        wrong = [f"line {error['line']}: {error['message']}" for error in (batch["errors"] or {"data": []})["data"]]
        raise ConfigError(f"the server refuses the file: {'; '.join(wrong[:5])}")
    files = [batch[name] for name in ("output_file_id", "error_file_id") if batch[name]]
    by_id = {custom_id: raw for file_id in files for custom_id, raw in lines_of(server.content(file_id))}
    return Found(by_id, [batch["input_file_id"], *files])


# -- one by one


def _one_by_one(url: str, output: Path, asked: list[AskedLine], concurrency: int, show: Show) -> dict[str, bytes]:
    """Answers by custom_id, those of an earlier run too."""
    own, stop, servers = threading.local(), threading.Event(), list[Server]()

    def one(line: AskedLine) -> bytes:
        if not hasattr(own, "server"):
            own.server = Server(url)
            servers.append(own.server)
        return _answered(own.server, line, stop)

    with _partial_file(output).open("a+b") as journal, ThreadPoolExecutor(concurrency) as pool:
        answers = read_answers(journal)
        left = iter([line for line in asked if line.custom_id not in answers])
        running: set[Future[bytes]] = set()
        num_failed = 0
        try:
            while True:
                for line in left:
                    running.add(pool.submit(one, line))
                    if len(running) >= 2 * concurrency:
                        break
                if not running:
                    return answers
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    raw = future.result()
                    _keep(journal, raw)
                    said = json.loads(raw)
                    answers[said["custom_id"]] = raw
                    num_failed += said["response"]["status_code"] != 200
                    show(len(answers), num_failed)
        finally:
            stop.set()
            for future in running:
                future.cancel()
            for server in servers:
                server.abort()


def _keep(journal: BinaryIO, raw: bytes) -> None:
    journal.write(raw)
    journal.flush()


def _answered(server: Server, line: AskedLine, stop: threading.Event) -> bytes:
    """A line of output. Raises `NotRunningError`: the server does not answer any more."""
    body = json.dumps(line.body).encode()
    back_off_s, num_unanswered = _FIRST_BACK_OFF_S, 0
    while True:
        try:
            status, raw, head = server.send("POST", line.url, body, {"content-type": "application/json"})
            num_unanswered = 0
        except NotRunningError:
            num_unanswered += 1
            if num_unanswered > _MAX_UNANSWERED:
                raise
            status, head = 503, {}
        if status not in _TRY_AGAIN or (status == 500 and head.get("x-should-retry") != "true"):
            response = {"status_code": status, "request_id": head.get("x-request-id", ""), "body": _json(raw)}
            said = {"custom_id": line.custom_id, "response": response, "error": None}
            # Half of a pair of UTF-16 has no UTF-8: within a text of JSON what stands for it is an escape there, too.
            return json.dumps(said, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"
        told = head.get("retry-after", "")
        if stop.wait(float(told) if told.isdigit() else back_off_s):
            raise TandemError("it was interrupted")
        back_off_s = min(2 * back_off_s, _MAX_BACK_OFF_S)


def _json(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return {"error": {"message": raw.decode(errors="replace")[:1000]}}


def _batch_file(output: Path) -> Path:
    return output.with_name(output.name + ".batch")


def _partial_file(output: Path) -> Path:
    return output.with_name(output.name + ".partial")


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Show]:
    """A bar on a terminal; elsewhere nothing."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[failed]}"),
        TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("answered", total=total, failed="")

        def show(num_answered: int, num_failed: int) -> None:
            failed = f"{num_failed} errors" if num_failed else ""
            progress.update(task, completed=num_answered, failed=failed)

        yield show
