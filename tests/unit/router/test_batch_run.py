"""One batch on a real disk, with answers that the test gives."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import itertools
import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from router.batches import disk
from router.batches.journal import ResultsJournal
from router.batches.leader import BatchLeader
from router.batches.lease import Lease
from router.batches.lines import LineRules
from router.batches.records import Batch, StoredFile, new_id
from router.batches.room import Room
from router.batches.run import Answer, Ask, BatchRun
from router.batches.store import BatchFolder, Store
from router.openai.model_card import ModelCard
from router.policy.admission import Admission
from router.policy.background import BackgroundAdmission
from tandem.core import config as configuration
from tandem.core.clock import MonotonicClock
from tandem.core.tokenizer import Tokenizer
from tests.support.waiting import LONG_S, until

OWNER, ENDPOINT = "mine", "/v1/completions"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "batches")


def queued(store: Store, num_lines: int, owner: str = OWNER) -> Batch:
    """A new batch."""
    now_s = time.time()
    file = StoredFile(new_id("file-", now_s), 0, int(now_s), "in.jsonl", "batch")
    line = {"method": "POST", "url": ENDPOINT, "body": {"model": "toy", "prompt": "x"}}
    text = "".join(json.dumps({"custom_id": f"r{number}", **line}) + "\n" for number in range(num_lines))
    (store.folder_of_files(owner) / f"{file.id}.data").write_text(text)
    store.add_file(owner, file)
    batch = Batch(new_id("batch_", now_s), ENDPOINT, file.id, "24h", int(now_s), int(now_s) + 86_400)
    store.add_batch(owner, batch)
    return batch


def test_a_batch_whose_router_ends_while_it_is_made_is_nowhere_or_in_the_queue(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be seen, and wait for ever. A router may end between any two writes."""
    num_left = 0

    def write_whole(path: Path, content: bytes) -> None:
        nonlocal num_left
        if not num_left:
            raise KeyboardInterrupt
        num_left -= 1
        disk.write_whole(path, content)

    monkeypatch.setattr("router.batches.store.write_whole", write_whole)
    seen = []
    for num_left in (1, 2, 3):  # noqa: B007 - read by the above; one is that of the file
        with contextlib.suppress(KeyboardInterrupt):
            queued(store, 1)
        seen.append([len(store.queued()), len(store.batches(OWNER, after="", limit=9).items)])
    assert seen == [[0, 0], [0, 0], [1, 1]]

    (kept,) = store.queued()
    old_s = time.time() - 2 * 86_400
    for entry in (store.directory / "queue").iterdir():
        os.utime(entry, (old_s, old_s))
    store.clear_stale()
    assert [entry.name for entry in (store.directory / "queue").iterdir()] == [kept.path.name]
    assert kept.is_there


@pytest.fixture
def make_run(store: Store, checkpoint: Path) -> Callable[[BatchFolder, Ask], BatchRun]:
    config = configuration.load(None, {"model.served_names": ["toy"]})
    card = ModelCard.from_dir(checkpoint, config, Tokenizer.from_dir(checkpoint))
    clock = MonotonicClock()

    def made(folder: BatchFolder, ask: Ask) -> BatchRun:
        room = Room(BackgroundAdmission(Admission(8, clock, lambda: 8.0), clock, 1.0))
        return BatchRun(folder, store, lambda endpoint: LineRules(endpoint, card, 100, 10_000), room, ask)

    return made


@pytest.fixture
def run_of(store: Store, make_run: Callable[[BatchFolder, Ask], BatchRun]) -> Callable[[Ask], BatchRun]:
    """Of the one batch in the queue."""

    def made(ask: Ask) -> BatchRun:
        (folder,) = store.queued()
        return make_run(folder, ask)

    return made


async def answered(owner: str, endpoint: str, body: bytes, request_id: str) -> Answer:
    return Answer(200, b'{"good": true}')


async def test_a_result_that_is_on_its_way_to_the_disk_when_the_batch_is_cancelled_counts(
    store: Store, run_of: Callable[[Ask], BatchRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, loop = queued(store, 3), asyncio.get_running_loop()
    append = ResultsJournal.append

    async def cancelled() -> None:
        run.look()
        for _ in range(50):  # all that a cancel does before it writes
            await asyncio.sleep(0)

    def append_late(journal: ResultsJournal, number: int, line: bytes, *, is_good: bool) -> None:
        if run.folder.cancelled_at() is None:
            run.folder.cancel()
            asyncio.run_coroutine_threadsafe(cancelled(), loop).result(LONG_S)
        append(journal, number, line, is_good=is_good)

    monkeypatch.setattr(ResultsJournal, "append", append_late)
    run = run_of(answered)
    async with asyncio.timeout(LONG_S):
        await run.run()
    ended = store.batch(OWNER, batch.id)
    assert (ended.status, ended.num_completed > 0) == ("cancelled", True)
    assert ended.output_file_id is not None
    good = store.data_of(OWNER, ended.output_file_id).read_bytes().splitlines()
    assert len(good) == ended.num_completed
    left = store.data_of(OWNER, ended.error_file_id).read_bytes().splitlines() if ended.error_file_id else []
    assert len(good) + len(left) == 3


async def test_a_run_that_is_ended_has_written_all_when_another_may_begin(
    store: Store, run_of: Callable[[Ask], BatchRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    queued(store, 1)
    may_go_on, has_begun, append = threading.Event(), asyncio.Event(), ResultsJournal.append
    loop = asyncio.get_running_loop()

    def append_late(journal: ResultsJournal, number: int, line: bytes, *, is_good: bool) -> None:
        loop.call_soon_threadsafe(has_begun.set)
        may_go_on.wait(LONG_S)
        append(journal, number, line, is_good=is_good)

    monkeypatch.setattr(ResultsJournal, "append", append_late)
    run = run_of(answered)
    running = asyncio.create_task(run.run())
    async with asyncio.timeout(LONG_S):
        await has_begun.wait()
        running.cancel()
        for _ in range(50):
            await asyncio.sleep(0)
        assert not running.done()
        may_go_on.set()
        await asyncio.wait({running})
    assert ResultsJournal(run.folder.results, run.folder.progress, 1).has(0)


async def test_a_leader_that_is_told_to_stop_twice_ends_what_is_under_way(
    store: Store, run_of: Callable[[Ask], BatchRun]
) -> None:
    queued(store, 1)
    is_asked, ends, may_end, has_ended = asyncio.Event(), asyncio.Event(), asyncio.Event(), False

    async def ask(owner: str, endpoint: str, body: bytes, request_id: str) -> Answer:
        nonlocal has_ended
        is_asked.set()
        try:
            await asyncio.Event().wait()
            raise AssertionError
        finally:
            ends.set()
            await may_end.wait()
            has_ended = True

    leader = BatchLeader(store, lambda _: run_of(ask))
    leader.start()
    async with asyncio.timeout(LONG_S):
        await is_asked.wait()
        stops = [asyncio.create_task(leader.stop())]
        await ends.wait()
        stops.append(asyncio.create_task(leader.stop()))
        for _ in range(50):
            await asyncio.sleep(0)
        assert not any(stop.done() for stop in stops)
        may_end.set()
        await asyncio.gather(*stops)
    assert has_ended


class Waited(asyncio.Event):
    """Says that somebody waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_waited_for = asyncio.Event()

    async def wait(self) -> Literal[True]:
        self.is_waited_for.set()
        return await super().wait()


async def test_a_leader_is_told_to_stop_in_the_moment_in_which_it_would_look_again(
    store: Store, run_of: Callable[[Ask], BatchRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own timeout has passed, which it has not heard of yet."""
    monkeypatch.setattr("router.batches.leader._LOOK_S", 0.2)
    leader = BatchLeader(store, lambda _: run_of(answered))
    leader._changed = changed = Waited()
    leader.start()
    async with asyncio.timeout(LONG_S):
        await changed.is_waited_for.wait()
        asyncio.get_running_loop().call_soon(time.sleep, 0.4)  # then both are due: this test, then the leader
        await asyncio.sleep(0.1)
        await leader.stop()


MakeRun = Callable[[BatchFolder, Ask], BatchRun]


def failing(
    monkeypatch: pytest.MonkeyPatch, of: object, name: str, error: Exception, *, armed: threading.Event | None = None
) -> threading.Event:
    """Lets a function fail once, the next time or the next that it is `armed`; the event says that it has."""
    real, has_failed = getattr(of, name), threading.Event()

    def fails(*args: Any, **kwargs: Any) -> Any:
        if not has_failed.is_set() and (armed is None or armed.is_set()):
            has_failed.set()
            raise error
        return real(*args, **kwargs)

    monkeypatch.setattr(of, name, fails)
    return has_failed


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tried again after a while is tried again at once."""
    monkeypatch.setattr("router.batches.leader._LOOK_S", 0.01)
    monkeypatch.setattr("router.batches.lease._AGAIN_S", 0.01)


async def until_completed(store: Store, batch: Batch) -> None:
    await until(
        lambda: store.batch(OWNER, batch.id).status, "the end of the batch", wanted=lambda seen: seen == "completed"
    )


@pytest.mark.usefixtures("soon")
async def test_a_leader_that_cannot_see_whether_a_batch_is_cancelled_goes_on_with_it_and_with_others(
    store: Store, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, is_asked, may_answer, num_asked = queued(store, 1), asyncio.Event(), asyncio.Event(), 0
    armed = threading.Event()
    stale = OSError(errno.ESTALE, "Stale file handle")
    has_failed = failing(monkeypatch, BatchFolder, "cancelled_at", stale, armed=armed)

    async def ask(*of: object) -> Answer:
        nonlocal num_asked
        num_asked += 1
        is_asked.set()
        await may_answer.wait()
        return Answer(200, b"{}")

    leader = BatchLeader(store, lambda folder: make_run(folder, ask))
    leader.start()
    async with asyncio.timeout(LONG_S):
        await is_asked.wait()
    armed.set()
    await until(has_failed.is_set, "the failure")
    second = queued(store, 1)
    leader.wake.tell()
    may_answer.set()
    for batch in (first, second):
        await until_completed(store, batch)
    await leader.stop()
    assert num_asked == 2


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(
    ("of", "name", "error"),
    [
        (Store, "clear_stale", OSError(errno.ESTALE, "Stale file handle")),
        (Store, "queued", OSError(errno.EIO, "Input/output error")),
        (Store, "queued", RuntimeError("unforeseen")),
        (BatchLeader, "_start", RuntimeError("unforeseen")),
        (os, "mkfifo", PermissionError(errno.EPERM, "Operation not permitted")),
        (fcntl, "flock", OSError(errno.ENOLCK, "No locks available")),
    ],
    ids=["what is stale", "the queue", "unforeseen", "unforeseen at a start", "no pipe", "no lock"],
)
async def test_the_queue_is_worked_off_behind_an_error_which_the_log_tells_once(
    store: Store,
    make_run: MakeRun,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    of: object,
    name: str,
    error: Exception,
) -> None:
    has_failed = failing(monkeypatch, of, name, error)
    leader = BatchLeader(store, lambda folder: make_run(folder, answered))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            batch = queued(store, 1)
            (leader.wake.tell if has_failed.is_set() else leader.start)()
            await until_completed(store, batch)
        await leader.stop()
    assert has_failed.is_set()
    assert len(caplog.records) == 1, caplog.text


@pytest.mark.usefixtures("soon")
async def test_a_leader_that_cannot_work_gives_the_lead_on(store: Store, make_run: MakeRun) -> None:
    batch, has_failed = queued(store, 1), asyncio.Event()

    def fail(_: BatchFolder) -> BatchRun:
        has_failed.set()
        raise RuntimeError("unforeseen")

    broken = BatchLeader(store, fail)
    broken.start()
    await has_failed.wait()
    other = BatchLeader(store, lambda folder: make_run(folder, answered))
    other.start()
    await until_completed(store, batch)
    for leader in (broken, other):
        await leader.stop()


async def test_who_is_told_to_stop_before_it_hears_that_it_leads_does_not_lead(tmp_path: Path) -> None:
    num_led = 0

    def lead() -> None:
        nonlocal num_led
        num_led += 1

    lease = Lease(tmp_path / "lease", lead)
    lease.start()
    for thread in threading.enumerate():
        if thread.name == "batch lease":
            thread.join(LONG_S)
    lease.close()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not num_led


def test_results_of_a_writer_that_lost_the_queue_unseen_take_nobodys_place(tmp_path: Path) -> None:
    results, progress = tmp_path / "results", tmp_path / "progress"
    lost, leading = ResultsJournal(results, progress, 3), ResultsJournal(results, progress, 3)
    lost.append(0, b'{"of": "lost 0"}', is_good=False)
    leading.append(1, b'{"of": 1}', is_good=True)
    lost.append(1, b'{"of": "lost 1"}', is_good=True)
    leading.append(0, b'{"of": 0}', is_good=True)
    leading.settle()
    told = [(number, is_good, result and json.loads(result)["of"]) for number, is_good, result in leading.in_order()]
    assert told == [(0, False, "lost 0"), (1, True, 1), (2, False, None)]
    assert (leading.num_completed, leading.num_failed) == (1, 1)
    lost.close()
    leading.close()


def test_a_batch_was_cancelled_when_it_was_first(store: Store) -> None:
    batch = queued(store, 1)
    store.cancel(OWNER, batch.id)
    (folder,) = store.queued()
    os.utime(folder.path / "cancel", (1_700_000_000, 1_700_000_000))
    assert store.cancel(OWNER, batch.id).cancelling_at == 1_700_000_000


def test_a_batch_that_is_being_made_hides_no_other(store: Store) -> None:
    batch = queued(store, 1)
    (store.directory / "owners" / OWNER / "batches" / new_id("batch_", time.time() + 1)).mkdir()
    page = store.batches(OWNER, after="", limit=1)
    assert [one.id for one in page.items if isinstance(one, Batch)] == [batch.id]
    assert not page.has_more


async def test_results_outlast_the_host_before_it_is_written_that_they_are_there(
    store: Store, run_of: Callable[[Ask], BatchRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = queued(store, 3)
    run, sync, done = run_of(answered), os.fdatasync, list[str]()

    def note_sync(file: int) -> None:
        done.append("results")
        sync(file)

    def note_write(batch: Batch) -> None:
        done.append(batch.status)
        write(batch)

    write = run.folder.write
    monkeypatch.setattr(os, "fdatasync", note_sync)
    monkeypatch.setattr(run.folder, "write", note_write)
    async with asyncio.timeout(LONG_S):
        await run.run()
    assert store.batch(OWNER, batch.id).status == "completed"
    assert done[: done.index("finalizing")][-1] == "results"


@pytest.mark.usefixtures("soon")
async def test_whoever_has_many_batches_leaves_places_to_others(store: Store, make_run: MakeRun) -> None:
    for _ in range(12):
        queued(store, 1, "many")
    late = queued(store, 1, "late")
    begun = Counter[str]()

    async def ask(owner: str, *of: object) -> Answer:
        begun[owner] += 1
        if owner == "many":
            await asyncio.Event().wait()
        return Answer(200, b"{}")

    leader = BatchLeader(store, lambda folder: make_run(folder, ask))
    leader.start()
    try:
        await until(
            lambda: store.batch("late", late.id).status, "the end of the batch", wanted=lambda seen: seen == "completed"
        )
        await until(lambda: begun["many"] == 4, "half of the places")
        assert len([run for run, _ in leader._runs.values() if run.folder.owner == "many"]) == 4
    finally:
        await leader.stop()


@pytest.mark.usefixtures("soon")
async def test_a_batch_that_cannot_be_run_pauses_longer_each_time(
    store: Store, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued(store, 1)
    begun_s = []

    def fail(folder: BatchFolder) -> Batch:
        begun_s.append(time.monotonic())
        raise ValueError("a defect")

    monkeypatch.setattr(BatchFolder, "read", fail)
    leader = BatchLeader(store, lambda folder: make_run(folder, answered))
    leader.start()
    try:
        await until(lambda: len(begun_s) >= 6, "its sixth run")
    finally:
        await leader.stop()
    pauses_s = [late - soon for soon, late in itertools.pairwise(begun_s)]
    assert all(pause_s >= 0.01 * 2**number for number, pause_s in enumerate(pauses_s)), pauses_s


async def test_requests_that_are_refused_again_and_again_hold_up_no_other_owner() -> None:
    clock = MonotonicClock()
    room, asked = Room(BackgroundAdmission(Admission(8, clock, lambda: 1.0), clock, 1.0)), Counter[str]()

    async def refused() -> None:
        while True:
            async with room.one("refused"):
                asked["refused"] += 1
            await room.back_off("refused", 0.0)

    async def fine() -> None:
        for _ in range(20):
            await room.may_begin("fine")
            async with room.one("fine"):
                asked["fine"] += 1
                await asyncio.sleep(0)

    others = [asyncio.create_task(refused()) for _ in range(100)]
    await until(lambda: asked["refused"] >= 100, "all of them")
    asked.clear()
    async with asyncio.timeout(LONG_S):
        await fine()
    assert asked["refused"] <= 30, "they go in turn"
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    assert (room._num_under_way, dict(room._under_way), dict(room._backing_off), room._waiting) == (0, {}, {}, {})


def test_a_line_that_is_nested_too_deeply_is_named(store: Store, checkpoint: Path) -> None:
    config = configuration.load(None, {"model.served_names": ["toy"]})
    card = ModelCard.from_dir(checkpoint, config, Tokenizer.from_dir(checkpoint))
    path = store.directory / "in.jsonl"
    deep = "[" * 1010 + "]" * 1010
    line = '{{"custom_id": "a", "method": {method}, "url": "/v1/completions", "body": {{"prompt": {prompt}}}}}\n'
    path.write_text(line.format(method=deep, prompt='""') + line.format(method='"POST"', prompt="[" * 300 + "]" * 300))
    checked = LineRules(ENDPOINT, card, 100, 10_000).check(path)
    assert {error.code for error in checked.errors} == {"invalid_json_line"}
    assert [error.line for error in checked.errors] == [1, 2]
    assert "nested too deeply: more than 128 objects and lists" in checked.errors[0].message
