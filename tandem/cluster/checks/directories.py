"""Whether what processes of this host will write can be written. Nothing is made: whoever writes knows for whom."""

from __future__ import annotations

import os
from pathlib import Path

from tandem.core.errors import ConfigError


def check_writable(path: Path, key: str) -> None:
    """Raises `ConfigError`: `path`, which `key` names, is no directory that this user may write to, or make."""
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
