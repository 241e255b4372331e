"""Whether a file or a directory can be written, asked before the work whose results are to stand there."""

from __future__ import annotations

import os
from pathlib import Path

from tandem.core.errors import ConfigError


def check_writable(file: Path, key: str) -> None:
    """Leaves no trace. Raises `ConfigError`: it cannot be written; says why, and names `key`, the option of it."""
    try:
        is_new = not file.exists()
        if is_new or file.is_file() or file.is_dir():  # whoever reads a pipe would take this for its end
            with file.open("ab"):
                pass
        if is_new:
            file.unlink()
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}; name another {key}", key=key) from error


def check_writable_directory(path: Path, key: str) -> None:
    """Nothing is made: whoever writes there knows for whom.

    Raises:
        ConfigError: `path`, which `key` names, is no directory that this user may write to, or make.
    """
    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    why = "" if os.access(there, os.W_OK | os.X_OK) else f"this user may not write to {there}"
    if not there.is_dir():
        why = f"{there} is no directory"
    if why:
        raise ConfigError(
            f"{key} is {path}, which cannot be used ({why}); name a directory that this user may write to", key=key
        )
