"""The logs of every process: the standard library's `logging`, one line an event, as JSON or for a terminal.

    _log = logging.getLogger(__name__)
    with bound(request_id="r-1"):
        _log.info("request admitted with %d prompt tokens", 12)

Beside the sentence (`event`) each line has the process, the level, the logger's name, the time, and what is bound.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path

from tandem.core.config import LoggingConfig

#: Libraries whose `info` lines say what ours say already.
_CHATTY = ("uvicorn", "uvicorn.error", "httpx", "httpcore", "grpc", "asyncio")


def setup_logging(config: LoggingConfig, process: str) -> None:
    """Send this process's logs to stderr, or to `<config.directory>/<process>.log`.

    `process` is on every line, e.g. "router" or "decode-0". Calling again replaces the set-up.
    """
    if config.directory:
        directory = Path(config.directory).expanduser()
        directory.mkdir(parents=True, exist_ok=True)
        handler: logging.Handler = logging.FileHandler(directory / f"{process}.log", encoding="utf-8")
        is_console = config.format == "console"
    else:
        handler = logging.StreamHandler(sys.stderr)
        is_console = config.format == "console" or (config.format == "auto" and sys.stderr.isatty())
    has_colors = not config.directory and sys.stderr.isatty()
    console = _ConsoleFormatter(process, has_colors=has_colors)
    handler.setFormatter(console if is_console else _JsonFormatter(process))
    root = logging.getLogger()
    for old in list(root.handlers):
        if getattr(old, "is_tandem", False):
            root.removeHandler(old)
            old.close()
    handler.is_tandem = True  # type: ignore[attr-defined]
    root.addHandler(handler)
    root.setLevel(config.level.upper())
    for name in _CHATTY:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


@contextmanager
def bound(**values: object) -> Iterator[None]:
    """Put `values` on every line that is logged inside, and by tasks that are started inside."""
    token = _bound.set(_bound.get() | values)
    try:
        yield
    finally:
        _bound.reset(token)


def bound_values() -> dict[str, object]:
    """What is bound here."""
    return dict(_bound.get())


_bound: ContextVar[dict[str, object]] = ContextVar("bound", default={})  # noqa: B039 - it is never changed in place


class _JsonFormatter(logging.Formatter):
    """One object a line."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "event": record.getMessage(),
            **_bound.get(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "timestamp": _time_of(record),
            "process": self._process,
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=repr)


class _ConsoleFormatter(logging.Formatter):
    """The sentence first; then where it comes from, and what is bound. Exceptions follow on lines of their own."""

    def __init__(self, process: str, *, has_colors: bool) -> None:
        super().__init__()
        self._process = process
        self._has_colors = has_colors

    def format(self, record: logging.LogRecord) -> str:
        level, event = record.levelname.lower(), _escape(record.getMessage())
        bound = {"process": self._process, **_bound.get()}
        values = " ".join(f"{name}={_escape(str(value))}" for name, value in sorted(bound.items()))
        color = _COLORS.get(record.levelno, "") if self._has_colors else ""
        level = f"{color}{level:<8}{_PLAIN}" if color else f"{level:<8}"
        line = f"{_time_of(record)} [{level}] {event:<30} [{record.name}] {values}"
        if not record.exc_info:
            return line
        return "\n".join([line, *(f"  {_escape(part)}" for part in self.formatException(record.exc_info).split("\n"))])


#: Of terminals: red, red, yellow, green.
_COLORS = {
    logging.CRITICAL: "\x1b[31m",
    logging.ERROR: "\x1b[31m",
    logging.WARNING: "\x1b[33m",
    logging.INFO: "\x1b[32m",
}
_PLAIN = "\x1b[0m"


def _time_of(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _escape(text: str) -> str:
    """What a client wrote must not command a terminal, nor look like a line of its own. JSON escapes by itself."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
