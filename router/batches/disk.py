"""Writing so that a crash leaves the old or the new, and never a part. Blocks."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

PARTIAL = ".partial-"
"""How names of files begin that are not whole yet."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of `path` where the block ends well, and else leaves no trace."""
    partial = path.parent / f"{PARTIAL}{secrets.token_hex(8)}"
    try:
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write_whole(path: Path, content: bytes) -> None:
    with replacing(path) as file:
        file.write(content)


def sync_directory(directory: Path) -> None:
    """Names in it outlast the host's end."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
