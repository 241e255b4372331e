"""Whether a file can be written, asked before the work whose results are to stand there."""

from __future__ import annotations

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
