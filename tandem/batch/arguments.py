"""The command line of `tandem batch`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tandem.core.arguments import whole

_MAX_CONCURRENCY = 1024


def add_command_to(commands: Any, add_command: Callable[..., argparse.ArgumentParser]) -> None:
    command = add_command(
        commands,
        "batch",
        "answer a file of requests, one JSON object a line as in OpenAI's batches, in the order of the file",
        "tandem batch requests.jsonl\ntandem batch requests.jsonl --url http://head:8000 --output answers.jsonl",
        _run,
    )
    command.add_argument("file", type=Path, metavar="FILE", help="requests: custom_id, method, url and body a line")
    command.add_argument(
        "--url", default="http://127.0.0.1:8000",
        help="the server; its API key is read from TANDEM_API_KEY or OPENAI_API_KEY (default: http://127.0.0.1:8000)",
    )
    command.add_argument(
        "--output", type=Path, metavar="FILE", help="where answers and errors go (default: FILE.answers.jsonl)"
    )
    command.add_argument(
        "--window", default="24h", metavar="TIME",
        help="time in which a server's batch must be answered, such as 24h (default: 24h)",
    )
    command.add_argument(
        "--directly", action="store_true",
        help="send each request by itself, also where the server has batches of its own",
    )
    command.add_argument(
        "--concurrency", type=whole(1, _MAX_CONCURRENCY), default=16, metavar="N",
        help="requests at a time where they are sent by themselves (default: 16)",
    )


def _run(options: argparse.Namespace) -> int:
    from tandem.batch.command import answer

    return answer(
        options.file,
        options.output or options.file.with_name(options.file.name + ".answers.jsonl"),
        url=options.url,
        window=options.window,
        directly=options.directly,
        concurrency=options.concurrency,
    )
