"""Structured logs of every process: one line an event, with the process's name and the request's id.

    log = get_logger(__name__)
    with bound(request_id="r-1"):
        log.info("request admitted", num_prompt_tokens=12)

Lines of libraries that use the standard `logging` module go the same way.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import structlog

from tandem.core.config import LoggingConfig

#: Libraries whose `info` lines say what ours say already.
_CHATTY = ("uvicorn", "uvicorn.error", "httpx", "httpcore", "grpc", "asyncio")


def setup_logging(config: LoggingConfig, process: str, *, stream: TextIO | None = None) -> None:
    """Send this process's logs to `stream` (default stderr), or to `<config.directory>/<process>.log`.

    `process` is on every line, e.g. "router" or "decode-0". Calling again replaces the set-up.
    """
    if config.directory:
        directory = Path(config.directory)
        directory.mkdir(parents=True, exist_ok=True)
        handler: logging.Handler = logging.FileHandler(directory / f"{process}.log", encoding="utf-8")
        is_console = config.format == "console"
    else:
        target = stream or sys.stderr
        handler = logging.StreamHandler(target)
        is_console = config.format == "console" or (config.format == "auto" and target.isatty())
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _process_adder(process),
    ]
    handler.setFormatter(_formatter(shared, is_console=is_console))
    root = logging.getLogger()
    for old in list(root.handlers):
        if getattr(old, "is_tandem", False):
            root.removeHandler(old)
            old.close()
    handler.is_tandem = True  # type: ignore[attr-defined]
    root.addHandler(handler)
    level = config.level.upper()
    root.setLevel(level)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """The logger of a module; usable before `setup_logging`."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger


@contextmanager
def bound(**values: Any) -> Iterator[None]:
    """Put `values` on every line that is logged inside, tasks that are started inside included."""
    tokens = structlog.contextvars.bind_contextvars(**values)
    try:
        yield
    finally:
        structlog.contextvars.reset_contextvars(**tokens)


def _process_adder(process: str) -> Any:
    def add_process(_: Any, __: str, event: dict[str, Any]) -> dict[str, Any]:
        event["process"] = process
        return event

    return add_process


def _formatter(shared: list[Any], *, is_console: bool) -> structlog.stdlib.ProcessorFormatter:
    if is_console:
        last: list[Any] = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    else:
        last = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
    )
