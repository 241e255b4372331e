"""The output and error files of a batch, in the order of its input. Blocks."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator

import orjson

from router.batches.disk import replacing
from router.batches.journal import ResultsJournal
from router.batches.lines import Line
from router.batches.records import Batch, StoredFile
from router.batches.store import Store

_UNANSWERED = {
    "expired": ("batch_expired", "this request could not be executed before the completion window expired"),
    "cancelled": ("batch_cancelled", "the batch was cancelled before this request was executed"),
}


def result_line(custom_id: str, response: object = None, error: object = None) -> bytes:
    """One line of an output or error file, without its end."""
    identity = f"batch_req_{secrets.token_hex(16)}"
    return orjson.dumps({"id": identity, "custom_id": custom_id, "response": response, "error": error})


def write_outputs(store: Store, owner: str, batch: Batch, journal: ResultsJournal, lines: Iterator[Line]) -> None:
    """Write the files that `batch` names. What a run before this one wrote of them is replaced."""
    folder = store.folder_of_files(owner)
    ids = {True: batch.output_file_id, False: batch.error_file_id}
    with contextlib.ExitStack() as stack:
        files = {
            good: stack.enter_context(replacing(folder / f"{file_id}.data")) for good, file_id in ids.items() if file_id
        }
        for line, (_, is_good, result) in zip(lines, journal.in_order(), strict=True):
            if result is None:
                code, message = _UNANSWERED[batch.becomes]
                result = result_line(line.custom_id, error={"code": code, "message": message}) + b"\n"
            files[is_good].write(result)
    for good, file_id in ids.items():
        if file_id:
            num_bytes = (folder / f"{file_id}.data").stat().st_size
            name = f"{batch.id}_{'output' if good else 'error'}.jsonl"
            store.add_file(owner, StoredFile(file_id, num_bytes, int(time.time()), name, "batch_output"))
