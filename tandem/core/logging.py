"""The logs of every process: the standard library's `logging`, one line an event, as JSON or for a terminal.

    _log = logging.getLogger(__name__)
    with bound(request_id="r-1"):
        _log.info("request admitted with %d prompt tokens", 12)

Beside the sentence (`event`) each line has the process, the level, the logger's name, the time, and what is bound.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog

from tandem.core.config import LoggingConfig

#: Libraries whose `info` lines say what ours say already.
_CHATTY = ("uvicorn", "uvicorn.error", "httpx", "httpcore", "grpc", "asyncio")


def setup_logging(config: LoggingConfig, process: str) -> None:
    """Send this process's logs to stderr, or to `<config.directory>/<process>.log`.

    `process` is on every line, e.g. "router" or "decode-0". Calling again replaces the set-up.
    """
    if config.directory:
        directory = Path(config.directory)
        directory.mkdir(parents=True, exist_ok=True)
        handler: logging.Handler = logging.FileHandler(directory / f"{process}.log", encoding="utf-8")
        is_console = config.format == "console"
    else:
        handler = logging.StreamHandler(sys.stderr)
        is_console = config.format == "console" or (config.format == "auto" and sys.stderr.isatty())
    handler.setFormatter(_formatter(process, is_console=is_console))
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
def bound(**values: Any) -> Iterator[None]:
    """Put `values` on every line that is logged inside, and by tasks that are started inside."""
    tokens = structlog.contextvars.bind_contextvars(**values)
    try:
        yield
    finally:
        structlog.contextvars.reset_contextvars(**tokens)


def _formatter(process: str, *, is_console: bool) -> logging.Formatter:
    def add_process(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event["process"] = process
        return event

    if is_console:
        last: list[Any] = [_escape, structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    else:
        last = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    return structlog.stdlib.ProcessorFormatter(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.stdlib.add_log_level,
            structlog.stdlib.add_logger_name,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            add_process,
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            *last,
        ]
    )


def _escape(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """What a client wrote must not command a terminal, nor look like a line of its own. JSON escapes by itself."""
    event["event"] = "".join(char if char.isprintable() else repr(char)[1:-1] for char in event["event"])
    return event
