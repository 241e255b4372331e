"""The directory of files and batches. What is on disk is the truth: routers keep nothing of it in memory. Blocks.

    DIR/lease                               locked by the router that leads the queue
    DIR/wake                                a pipe: a byte tells the leader to look
    DIR/queue/BATCH                         one for each batch that is not final, before it is there; holds its owner
    DIR/owners/OWNER/files/FILE.{data,json} a file is there once its .json is
    DIR/owners/OWNER/batches/BATCH/         batch.json, input.jsonl (a link), results.jsonl, progress, cancel

Only the leader writes `batch.json` once a batch is in the queue; whoever cancels makes the mark `cancel`. An owner is a
digest: what belongs to another one is not found, since it is not looked for.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from router.batches.disk import PARTIAL, sync_directory, write_whole
from router.batches.journal import read_progress
from router.batches.records import BATCH_ID, FILE_ID, Batch, StoredFile, batch_of, file_of, to_json
from tandem.core.errors import ConfigError, InvalidRequestError

_STALE_S = 86_400.0  # an upload that was not touched for so long is nobody's any more


class NotFoundError(InvalidRequestError):
    """No such file or batch, or it is another owner's."""

    code = "not_found"
    http_status = 404


@dataclass(frozen=True)
class Page:
    """A part of a listing."""

    items: list[StoredFile] | list[Batch]
    has_more: bool


class BatchFolder:
    """What is on disk of one batch."""

    def __init__(self, path: Path, owner: str) -> None:
        self.path, self.owner = path, owner
        self.input, self.results = path / "input.jsonl", path / "results.jsonl"
        self.progress = path / "progress"
        self._record, self._cancel = path / "batch.json", path / "cancel"

    @property
    def is_there(self) -> bool:
        """Else it is being made, or who made it has ended."""
        return self._record.exists()

    def read(self) -> Batch:
        """As clients see it: with the marks and counts that its record lacks. Raises `FileNotFoundError`."""
        batch = self.recorded()
        if batch.is_final:
            return batch
        if batch.num_lines:
            num_completed, num_failed = read_progress(self.progress)
            batch = replace(batch, num_completed=num_completed, num_failed=num_failed)
        since = self.cancelled_at()
        return batch if since is None else replace(batch, status="cancelling", cancelling_at=since)

    def recorded(self) -> Batch:
        """As the leader wrote it last. Raises `FileNotFoundError`."""
        return batch_of(self._record.read_bytes())

    def clear(self) -> None:
        """It is final: what it was made from goes."""
        for path in (self.input, self.results, self.progress, self._cancel):
            path.unlink(missing_ok=True)

    def write(self, batch: Batch) -> None:
        write_whole(self._record, to_json(batch))

    def cancel(self) -> None:
        """Leave the mark; a second one changes nothing."""
        with contextlib.suppress(FileExistsError):  # its time is that of the first
            self._cancel.touch(exist_ok=False)
        sync_directory(self.path)

    def cancelled_at(self) -> int | None:
        """When the mark was first made, in seconds since the epoch."""
        try:
            return int(self._cancel.stat().st_mtime)
        except FileNotFoundError:
            return None


class Store:
    """All of it; every router has one of the same directory."""

    def __init__(self, directory: Path) -> None:
        """Raises `ConfigError`: the directory cannot be used."""
        self.directory = directory.expanduser()
        self._owners, self._queue = self.directory / "owners", self.directory / "queue"
        try:
            for path in (self.directory, self._owners, self._queue):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"batches.directory: {self.directory} cannot be used: {error.strerror}; name a directory that the "
                "router may write",
                key="batches.directory",
            ) from error

    # -- files

    def folder_of_files(self, owner: str) -> Path:
        path = self._owners / owner / "files"
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path

    def data_of(self, owner: str, file_id: str) -> Path:
        return self._owners / owner / "files" / f"{_checked(FILE_ID, file_id, 'file')}.data"

    def add_file(self, owner: str, file: StoredFile) -> None:
        """Its data is in its place; from now on it is there."""
        write_whole(self.folder_of_files(owner) / f"{file.id}.json", to_json(file))

    def file(self, owner: str, file_id: str) -> StoredFile:
        """Raises `NotFoundError`."""
        try:
            return file_of(self.data_of(owner, file_id).with_suffix(".json").read_bytes())
        except FileNotFoundError:
            raise _missing("file", file_id) from None

    def delete_file(self, owner: str, file_id: str) -> None:
        """A batch that is under way keeps its input. Raises `NotFoundError`."""
        data = self.data_of(owner, file_id)
        try:
            data.with_suffix(".json").unlink()
        except FileNotFoundError:
            raise _missing("file", file_id) from None
        data.unlink(missing_ok=True)

    def files(self, owner: str, *, after: str, limit: int, newest_first: bool, purpose: str) -> Page:
        """Raises `NotFoundError`: there is no `after`."""
        if after:
            self.file(owner, after)
        names = _names(self.folder_of_files(owner), ".json")
        found = (
            file
            for file_id in _behind(names, after, newest_first=newest_first)
            if (file := self._file_or_none(owner, file_id)) is not None and purpose in ("", file.purpose)
        )
        some = list(islice(found, limit + 1))
        return Page(some[:limit], len(some) > limit)

    def _file_or_none(self, owner: str, file_id: str) -> StoredFile | None:
        try:
            return self.file(owner, file_id)
        except NotFoundError:  # deleted meanwhile
            return None

    # -- batches

    def _folder(self, owner: str, batch_id: str) -> BatchFolder:
        return BatchFolder(self._owners / owner / "batches" / _checked(BATCH_ID, batch_id, "batch"), owner)

    def add_batch(self, owner: str, batch: Batch) -> None:
        """Into the queue; it is there once its record is. Raises `NotFoundError`: there is no such input file."""
        folder = self._folder(owner, batch.id)
        folder.path.mkdir(mode=0o700, parents=True)
        try:
            os.link(self.data_of(owner, batch.input_file_id), folder.input)
        except FileNotFoundError:
            folder.path.rmdir()
            raise _missing("file", batch.input_file_id) from None
        # In the queue first: a record that nobody would ever take up must not be seen, whenever this router ends.
        write_whole(self._queue / batch.id, owner.encode())
        folder.write(batch)
        sync_directory(folder.path.parent)

    def batch(self, owner: str, batch_id: str) -> Batch:
        """Raises `NotFoundError`."""
        try:
            return self._folder(owner, batch_id).read()
        except FileNotFoundError:
            raise _missing("batch", batch_id) from None

    def cancel(self, owner: str, batch_id: str) -> Batch:
        """Raises `NotFoundError`; what is final already cannot be cancelled."""
        batch = self.batch(owner, batch_id)
        if batch.is_final:
            raise InvalidRequestError(f"the batch is {batch.status}; only one that is not over can be cancelled")
        self._folder(owner, batch_id).cancel()
        return self.batch(owner, batch_id)

    def batches(self, owner: str, *, after: str, limit: int) -> Page:
        """Newest first. Raises `NotFoundError`: there is no `after`."""
        if after:
            self.batch(owner, after)
        folder = self._owners / owner / "batches"
        names = _names(folder, "") if folder.is_dir() else []
        found = (
            batch
            for name in _behind(names, after, newest_first=True)
            if (batch := self._batch_or_none(owner, name)) is not None
        )
        some = list(islice(found, limit + 1))
        return Page(some[:limit], len(some) > limit)

    def _batch_or_none(self, owner: str, batch_id: str) -> Batch | None:
        try:
            return self.batch(owner, batch_id)
        except NotFoundError:  # it is being made, or a crash left a part of one
            return None

    # -- the queue

    def queued(self) -> list[BatchFolder]:
        """Batches that are not final, the oldest first."""
        return [folder for folder in self._in_queue() if folder.is_there]

    def _in_queue(self) -> Iterator[BatchFolder]:
        for name in sorted(entry for entry in os.listdir(self._queue) if BATCH_ID.fullmatch(entry)):
            yield self._folder((self._queue / name).read_text(), name)

    def unqueue(self, batch_id: str) -> None:
        """It is final."""
        (self._queue / batch_id).unlink(missing_ok=True)

    def clear_stale(self) -> None:
        """Remove what uploads, writes and batches in the making left that ended with their router."""
        for path in self.directory.rglob(f"{PARTIAL}*"):
            if _is_stale(path):
                path.unlink(missing_ok=True)
        for folder in self._in_queue():
            if not folder.is_there and _is_stale(self._queue / folder.path.name):
                shutil.rmtree(folder.path, ignore_errors=True)
                self.unqueue(folder.path.name)


def _is_stale(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime > _STALE_S
    except FileNotFoundError:  # whole by now
        return False


def _checked(pattern: re.Pattern[str], name: str, kind: str) -> str:
    """`name`, if it is an id: nothing else becomes part of a path."""
    if not pattern.fullmatch(name):
        raise _missing(kind, name)
    return name


def _missing(kind: str, name: str) -> NotFoundError:
    return NotFoundError(f"there is no {kind} {name[:64]!r}; ids are as the answer to its creation has them")


def _names(folder: Path, suffix: str) -> list[str]:
    return sorted(
        name.removesuffix(suffix)
        for name in os.listdir(folder)
        if name.endswith(suffix) and not name.startswith(PARTIAL)
    )


def _behind(names: list[str], after: str, *, newest_first: bool) -> Iterator[str]:
    ordered = reversed(names) if newest_first else iter(names)
    return (name for name in ordered if not after or (name < after if newest_first else name > after))
