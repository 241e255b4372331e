"""What stands on disk of files and batches, and how clients read it. Pure."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import orjson

FILE_ID, BATCH_ID = re.compile(r"file-[0-9a-f]{32}"), re.compile(r"batch_[0-9a-f]{32}")
_TIME_DIGITS = 12  # hexadecimal, of milliseconds: ids of later things are greater

#: Statuses after which nothing of a batch changes any more.
FINAL = frozenset({"completed", "failed", "expired", "cancelled"})


@dataclass(frozen=True)
class StoredFile:
    """A file that is whole. `created_at`: seconds since the epoch."""

    id: str
    num_bytes: int
    created_at: int
    filename: str
    purpose: str

    def shown(self) -> dict[str, Any]:
        """As `GET /v1/files/{id}` has it."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


@dataclass(frozen=True)
class LineError:
    """What is wrong with a line of an input, or with all of it (`line` is `None`)."""

    code: str
    message: str
    line: int | None = None  # counted from 1
    param: str | None = None


@dataclass(frozen=True)
class Batch:
    """A batch as the router that leads the queue has written it last. Times are seconds since the epoch."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    status: str = "validating"
    num_lines: int = 0  # known once it is valid
    num_completed: int = 0  # of an ended batch; while it runs the journal counts
    num_failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    errors: tuple[LineError, ...] = ()
    #: What it becomes once its files are written, decided when it stopped running.
    becomes: str = ""

    @property
    def is_final(self) -> bool:
        return self.status in FINAL

    def shown(self) -> dict[str, Any]:
        """As `GET /v1/batches/{id}` has it."""
        errors = {"object": "list", "data": [asdict(error) for error in self.errors]} if self.errors else None
        # Files are there once they can be read.
        output, error = (self.output_file_id, self.error_file_id) if self.is_final else (None, None)
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": errors,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": output,
            "error_file_id": error,
            "created_at": self.created_at,
            "in_progress_at": self.in_progress_at,
            "expires_at": self.expires_at,
            "finalizing_at": self.finalizing_at,
            "completed_at": self.completed_at,
            "failed_at": self.failed_at,
            "expired_at": self.expired_at,
            "cancelling_at": self.cancelling_at,
            "cancelled_at": self.cancelled_at,
            "request_counts": {
                "total": self.num_lines, "completed": self.num_completed, "failed": self.num_failed
            },
            "metadata": self.metadata,
        }  # fmt: skip


def new_id(prefix: str, now_s: float) -> str:
    """An id that nobody guesses. Those of later milliseconds sort behind."""
    return f"{prefix}{int(now_s * 1000):0{_TIME_DIGITS}x}{secrets.token_hex(10)}"


def to_json(record: StoredFile | Batch) -> bytes:
    """What `file_of` and `batch_of` read."""
    return orjson.dumps(asdict(record))


def file_of(raw: bytes) -> StoredFile:
    return StoredFile(**orjson.loads(raw))


def batch_of(raw: bytes) -> Batch:
    fields: Mapping[str, Any] = orjson.loads(raw)
    errors = tuple(LineError(**error) for error in fields["errors"])
    return Batch(**{**fields, "errors": errors})
