"""JSON files that say of themselves what they are. Imports no HTTP client: some measurements run where none is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tandem.core.errors import ConfigError
from tandem.core.writable import check_writable


def check_before(path: Path | None, key: str = "--json") -> None:
    """Where there is a `path`, whether results can be written there: asked before they are measured, as nobody wants to
    wait for them twice. Raises `ConfigError`."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; name another {key}", key=key) from error
    check_writable(path, key)


def write(path: Path, content: dict[str, Any]) -> None:
    """Raises `ConfigError` where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"the results cannot be written: {error}", key="--json") from error


def read_format(path: Path, file_format: str, whose: str, *, key: str | None = None) -> dict[str, Any]:
    """The content of a JSON file whose `format` is `file_format`.

    Raises:
        ConfigError: it is no such file; names `key`.
    """
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}", key=key) from error
    if not isinstance(content, dict) or content.get("format") != file_format:
        raise ConfigError(f"{path} is no file of {whose} (its format is not {file_format!r})", key=key)
    return content
