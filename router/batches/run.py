"""One batch from its place in the queue to its end.

    validating ──wrong──> failed
        └──> in_progress ──all answered──> finalizing ──> completed
                 ├──its window ends──────> finalizing ──> expired
                 └──cancel───────────────> finalizing ──> cancelled       (clients see `cancelling` meanwhile)

Each step is written before the next begins, so whoever leads the queue next goes on where this one ended: lines that
have results are not run again.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import orjson

from router.batches.journal import ResultsJournal
from router.batches.lines import Line, LineRules, lines_of
from router.batches.output import result_line, write_outputs
from router.batches.records import Batch, new_id
from router.batches.room import Room
from router.batches.store import BatchFolder, Store

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

_FIRST_BACK_OFF_S, _MAX_BACK_OFF_S = 1.0, 60.0
_OK = 200


@dataclass(frozen=True)
class Answer:
    """What a request came to. `body` is JSON; `retry_after_s` is 0 where the answer gives no time; `ignored_fields`
    names those of the request that nobody knows."""

    status: int
    body: bytes
    is_retryable: bool = False
    retry_after_s: float = 0.0
    ignored_fields: str = ""


#: From owner, endpoint, body and request id to the answer, by the way that a body of HTTP goes.
Ask = Callable[[str, str, bytes, str], Awaitable[Answer]]


class BatchRun:
    """Runs one batch; a router does so only while it holds the lease."""

    def __init__(self, folder: BatchFolder, store: Store, rules: Callable[[str], LineRules], room: Room, ask: Ask):
        """`rules`: of an endpoint."""
        self.folder = folder
        self._store, self._rules, self._room, self._ask = store, rules, room, ask
        self._cancel_asked = asyncio.Event()
        # What it reads and writes on disk, in order.
        self._disk = ThreadPoolExecutor(1, "batch disk")

    def look(self) -> None:
        """Whether it is to be cancelled may have changed."""
        if self.folder.cancelled_at() is not None:
            self._cancel_asked.set()

    async def run(self) -> None:
        """To its end. Cancelled, it leaves what the next run needs. Raises `OSError`: the disk failed."""
        try:
            self.look()
            batch = await self._on_disk(self.folder.read)
            if batch.status == "cancelling":  # a mark, not what its record says
                batch = await self._on_disk(self.folder.recorded)
            if not batch.is_final:
                batch = await self._validated(batch)
            if not batch.is_final:
                batch = await self._finished(batch)
            await self._on_disk(self.folder.clear)
            self._store.unqueue(batch.id)
            _log.info("batch %s is %s", batch.id, batch.status)
        finally:
            # Whoever leads next opens the journal: nothing is written behind its back.
            await asyncio.to_thread(self._disk.shutdown)

    async def _on_disk(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._disk, work)

    async def _write(self, batch: Batch) -> Batch:
        await self._on_disk(lambda: self.folder.write(batch))
        return batch

    async def _validated(self, batch: Batch) -> Batch:
        if batch.status != "validating":
            return batch
        rules = self._rules(batch.endpoint)
        checked = await self._on_disk(lambda: rules.check(self.folder.input))
        if checked.errors:
            return await self._write(replace(batch, status="failed", failed_at=_now(), errors=checked.errors))
        return await self._write(
            replace(batch, status="in_progress", in_progress_at=_now(), num_lines=checked.num_lines)
        )

    async def _finished(self, batch: Batch) -> Batch:
        journal = await self._on_disk(
            lambda: ResultsJournal(self.folder.results, self.folder.progress, batch.num_lines)
        )
        try:
            if batch.status == "in_progress":
                becomes = await self._run_lines(batch, journal)
                # Behind the last result: of a line that was ended it may still have been on its way.
                batch = await self._on_disk(lambda: _stopped(batch, journal, becomes))
                batch = await self._write(batch)
            rules = self._rules(batch.endpoint)
            lines = lines_of(self.folder.input, rules.max_line_bytes)
            await self._on_disk(lambda: write_outputs(self._store, self.folder.owner, batch, journal, lines))
            cancelling_at = self.folder.cancelled_at() if batch.becomes == "cancelled" else None
            ended = {"status": batch.becomes, f"{batch.becomes}_at": _now(), "cancelling_at": cancelling_at}
            return await self._write(replace(batch, **ended))  # type: ignore[arg-type]  # its own fields
        finally:
            # Behind all that is still to be written.
            self._disk.submit(journal.close)

    async def _run_lines(self, batch: Batch, journal: ResultsJournal) -> str:
        """Until all are answered, its window ends or it is cancelled; returns what it becomes."""
        work = asyncio.create_task(self._answer_all(batch, journal), name="batch lines")
        cancel = asyncio.create_task(self._cancel_asked.wait())
        try:
            left_s = max(0.0, batch.expires_at - time.time())
            await asyncio.wait({work, cancel}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if self._cancel_asked.is_set():
                return "cancelled"
            if work.done():
                work.result()
                return "completed"
            return "expired"
        finally:
            for task in (work, cancel):
                task.cancel()
            await asyncio.wait({work, cancel})

    async def _answer_all(self, batch: Batch, journal: ResultsJournal) -> None:
        rules = self._rules(batch.endpoint)
        lines = lines_of(self.folder.input, rules.max_line_bytes)

        def next_line() -> Line | None:
            return next((line for line in lines if not journal.has(line.number)), None)

        async with asyncio.TaskGroup() as group:
            while True:
                await self._room.may_begin(self.folder.owner)
                line = await self._on_disk(next_line)
                if line is None:
                    break
                group.create_task(self._answer(batch.endpoint, line, journal))
                await asyncio.sleep(0)  # it takes its room before the next one looks for some

    async def _answer(self, endpoint: str, line: Line, journal: ResultsJournal) -> None:
        body, tried, owner = orjson.dumps(line.body), 0, self.folder.owner
        while True:
            request_id = secrets.token_hex(16)
            async with self._room.one(owner):
                answer = await self._ask(owner, endpoint, body, request_id)
            if not answer.is_retryable:
                break
            await self._room.back_off(owner, _back_off_s(tried, answer.retry_after_s))
            tried += 1
        said = {"status_code": answer.status, "request_id": request_id, "body": orjson.Fragment(answer.body)}
        if answer.ignored_fields:  # as the header of an answer says it
            said["tandem-ignored-fields"] = answer.ignored_fields
        result = result_line(line.custom_id, said)
        await self._on_disk(lambda: journal.append(line.number, result, is_good=answer.status == _OK))


def _stopped(batch: Batch, journal: ResultsJournal, becomes: str) -> Batch:
    """What is to be written of a batch that has stopped running. Blocks: its results outlast the host then, too."""
    journal.settle()
    return replace(
        batch,
        status="finalizing",
        finalizing_at=_now(),
        becomes=becomes,
        num_completed=journal.num_completed,
        num_failed=journal.num_failed,
        output_file_id=new_id("file-", time.time()) if journal.num_completed else None,
        error_file_id=new_id("file-", time.time()) if batch.num_lines > journal.num_completed else None,
    )


def _back_off_s(tried: int, retry_after_s: float) -> float:
    """Doubles, and differs between requests that failed together."""
    longest_s: float = min(_FIRST_BACK_OFF_S * 2 ** min(tried, 10), _MAX_BACK_OFF_S)
    return max(retry_after_s, longest_s * random.uniform(0.5, 1.0))


def _now() -> int:
    return int(time.time())
