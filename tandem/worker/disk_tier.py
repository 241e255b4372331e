"""Pages in files: one file a page, below a directory of the worker's own.

    DISK_PATH/WORKER_ID/LAYOUT/ab/cdef….kv        LAYOUT: a digest of what the pages are of; abcdef…: the page's key

    TANDEM-KV 1 {"key": …, "weights_sha256": …, "dtype": …, "page_size": …, …}⏎   the header, which names all of that
    8 bytes                                                                       xxh3_64 of the payload
    payload                                                                       [layer][K|V][slot][kv_head][head_dim]

A file appears whole, by renaming. What is not exactly as it should be is removed, counted and logged, and the page is
not there. So two lives of one worker may use the directory at a time: the names say what is in the files, and a file
that one removes is a miss for the other. Pages of other layouts are never read; they are the first to go where bytes
are short.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from urllib.parse import quote

from kvtransfer.digest import digest_bytes
from kvtransfer.layout import LayoutId
from tandem.core.tiers import TierIndex
from tandem.worker.tier_store import TierCounters

_log = logging.getLogger(__name__)

_MAGIC = b"TANDEM-KV 1 "
_DIGEST_BYTES = 8
_SUFFIX, _DRAFT_SUFFIX = ".kv", ".part"
_KEY = re.compile("[0-9a-f]{64}")
# Files that were used within so many seconds of each other are a group, as those of one prompt are.
_GROUP_S = 60
# A file that was not renamed within this time is what a life of the worker that has ended left behind.
_STALE_S = 60.0
# After a write that failed nothing is written for so long.
_PAUSE_S = 60.0

# Of a layout, what says which pages are kept.
_WHICH_ARE_KEPT = ("window", "num_windowed")

Name = bytes | tuple[str, str]
"""Of a file: the page's key; of another layout that one's directory, and the key in hex."""


class DiskTier:
    """The files of one worker. `has` is for any thread, all else for the threads of the tiers.

    Args:
        root: the worker's own directory; made where it is not there.
        most_bytes: of all files in it.

    Raises:
        OSError: the directory cannot be made or entered.
    """

    name = "disk"
    guessed_bytes_per_s = 4e9  # an SSD's, until its own is learnt

    def __init__(
        self, root: Path, layout: LayoutId, most_bytes: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.counters = TierCounters()
        self.on_change: Callable[[Iterable[bytes]], None] = lambda _: None
        # But for what says which pages are kept: it changes no byte of them.
        self._layout = {name: value for name, value in asdict(layout).items() if name not in _WHICH_ARE_KEPT}
        self._layout_name = hashlib.sha256(json.dumps(self._layout, sort_keys=True).encode()).hexdigest()[:16]
        self._page_bytes = layout.num_layers * layout.extent_bytes
        self._root = root
        self._now = clock
        self._paused_until_s = float("-inf")
        self._lock = threading.Lock()
        self._index = TierIndex[Name](most_bytes)  # guarded by the lock
        self._is_closing = False
        _make_private(self._root / self._layout_name)

    # -- what is there

    def has(self, key: bytes) -> bool:
        return key in self._index  # one look into a dictionary: it needs no lock

    def use(self, keys: Sequence[bytes]) -> None:
        """A prompt has these pages, in this order."""
        with self._lock:
            self._index.use(keys)

    def held(self) -> tuple[int, int]:
        """Pages and bytes."""
        return len(self._index), self._index.num_bytes

    def find(self) -> None:
        """Enter what an earlier life of the worker has left. Until then it is not found.

        Ends early when the tier is closed.
        """
        began_s, found = self._now(), []
        for path, stat in self._files():
            if self._is_closing:
                return
            layout, key = path.parent.parent.name, path.parent.name + path.stem
            if path.suffix == _SUFFIX and _KEY.fullmatch(key):
                found.append((layout == self._layout_name, stat.st_mtime, layout, key, stat.st_size))
            elif path.suffix == _DRAFT_SUFFIX and time.time() - stat.st_mtime > _STALE_S:
                _remove(path)
        found.sort()  # others' layouts first, then by the time of use
        groups = (
            [(self._name_in(layout, key), size) for _, _, layout, key, size in group]
            for _, group in groupby(found, key=lambda item: (item[0], item[1] // _GROUP_S))
        )
        with self._lock:
            gone = self._index.add_all(groups)
        self._remove_all(gone)
        self.on_change(bytes.fromhex(key) for is_own, _, _, key, _ in found if is_own)
        _log.info("%d pages are on disk in %s, found in %.2f s", len(found), self._root, self._now() - began_s)

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """All files of all layouts; what vanishes meanwhile is passed over."""
        for layout in _directories(self._root):
            for directory in _directories(layout):
                for entry in _entries(directory):
                    try:
                        yield Path(entry.path), entry.stat(follow_symlinks=False)
                    except OSError:
                        continue

    # -- one page

    def get(self, key: bytes, into: memoryview) -> bool:
        """Read one page. `False`: it is not there; what was there and was not right is there no more."""
        path = self._path(key)
        began_s = self._now()
        try:
            wrong = self._read(path, key, into)
        except FileNotFoundError:
            self._forget(key)
            return False
        except OSError as error:
            wrong = f"it cannot be read: {error}"
        if wrong:
            self.counters.num_corrupt += 1
            _log.warning("%s is of no use, and removed: %s", path, wrong)
            self.discard(key)
            return False
        self.counters.num_read += 1
        self.counters.read_s += self._now() - began_s
        return True

    def _read(self, path: Path, key: bytes, into: memoryview) -> str:
        """What is wrong with the file; empty: nothing is, and `into` has its payload."""
        header = self._header(key)
        head = bytearray(len(header) + _DIGEST_BYTES)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            size = os.fstat(descriptor).st_size
            if size != len(head) + self._page_bytes:
                return f"it has {size} bytes, {len(head) + self._page_bytes} are right"
            _read_all(descriptor, [memoryview(head), into])
            with suppress(OSError):  # where nothing can be written any more, what is there can be read still
                os.utime(descriptor)  # so that the next life knows what was used
        finally:
            os.close(descriptor)
        if head[: len(header)] != header:
            return "its header names another page or layout"
        if int.from_bytes(head[len(header) :], "little") != digest_bytes(into):
            return "its bytes do not match their digest"
        return ""

    def put(self, key: bytes, parent: bytes, data: memoryview) -> None:
        """Write one page, behind its parent. Where that fails it is not there, and nothing is written for a while."""
        began_s = self._now()
        if began_s < self._paused_until_s:
            self.counters.num_lost += 1
            return
        header = self._header(key)
        digest = digest_bytes(data).to_bytes(_DIGEST_BYTES, "little")
        path = self._path(key)
        try:
            if not path.parent.exists():  # the first of its kind, or all has been removed to make room on the disk
                _make_private(self._root / self._layout_name)
            _write_whole(path, [header, digest, data])
        except OSError as error:
            self._paused_until_s = self._now() + _PAUSE_S
            self.counters.num_lost += 1
            _log.warning("no pages are written to %s for %g s: %s", self._root, _PAUSE_S, error)
            return
        with self._lock:
            size = len(header) + len(digest) + len(data)
            gone = self._index.add(key, size, parent or None)
        self._remove_all(gone)
        self.on_change([key, *(name for name in gone if isinstance(name, bytes))])
        self.counters.num_written += 1
        self.counters.write_s += self._now() - began_s

    def discard(self, key: bytes) -> None:
        """Remove one page, if it is there."""
        self._forget(key)
        _remove(self._path(key))

    def close(self) -> None:
        """Let `find` end."""
        self._is_closing = True

    def _forget(self, key: bytes) -> None:
        with self._lock:
            self._index.drop(key)
        self.on_change([key])

    def _remove_all(self, names: Sequence[Name]) -> None:
        for name in names:
            _remove(self._path(name))
        self.counters.num_evicted += len(names)

    def _name_in(self, layout: str, key: str) -> Name:
        return (layout, key) if layout != self._layout_name else bytes.fromhex(key)

    def _path(self, name: Name) -> Path:
        layout, key = (self._layout_name, name.hex()) if isinstance(name, bytes) else name
        return self._root / layout / key[:2] / f"{key[2:]}{_SUFFIX}"

    def _header(self, key: bytes) -> bytes:
        return _MAGIC + json.dumps({"key": key.hex(), **self._layout}).encode() + b"\n"


def disk_directory(disk_path: str, worker_id: str) -> Path:
    """A worker's own directory: the same for all its lives on a host."""
    return Path(disk_path).expanduser() / quote(worker_id, safe="").replace(".", "%2E")


def _make_private(directory: Path) -> None:
    """Pages tell what was in a prompt: nobody but this user enters."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in (directory, directory.parent):
        path.chmod(0o700)


def _directories(directory: Path) -> Iterator[Path]:
    return (Path(entry.path) for entry in _entries(directory) if entry.is_dir(follow_symlinks=False))


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except OSError as error:
        _log.warning("%s cannot be listed: %s", directory, error)
        return []


def _read_all(descriptor: int, parts: list[memoryview]) -> None:
    """Fill all parts. Raises `OSError` where the file ends before."""
    while parts:
        num_bytes = os.readv(descriptor, parts)
        if num_bytes == 0:
            raise OSError("it was truncated while it was read")
        while parts and num_bytes >= len(parts[0]):
            num_bytes -= len(parts.pop(0))
        if parts:
            parts[0] = parts[0][num_bytes:]


def _write_whole(path: Path, parts: Sequence[bytes | memoryview]) -> None:
    """Write a file that others see as a whole or not at all. A crash may leave it damaged: its digest shows that."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}{_DRAFT_SUFFIX}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "wb", buffering=0) as file:
            for part in parts:
                rest = memoryview(part)
                while rest:
                    rest = rest[file.write(rest) :]
        os.replace(draft, path)
    except OSError:
        _remove(draft)
        raise


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("%s cannot be removed: %s", path, error)
