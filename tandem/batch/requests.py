"""The file of requests, and the file of answers in its order."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tandem.core.errors import ConfigError

_PATH = re.compile(r"/v1/[!-~]+")  # as it can stand in the first line of a request


@dataclass(frozen=True)
class AskedLine:
    custom_id: str
    url: str  # the path of an endpoint
    body: dict[str, Any]


def read_requests(file: Path) -> list[AskedLine]:
    """All of them.

    Raises:
        ConfigError: the file cannot be read, or a line is wrong; names its number and what is wrong.
    """
    asked: list[AskedLine] = []
    seen: dict[str, int] = {}
    try:
        with file.open(encoding="utf-8-sig") as lines:
            for number, text in enumerate(lines, start=1):
                if text.strip():
                    line = _line(text, f"{file}: line {number}")
                    if (first := seen.setdefault(line.custom_id, number)) != number:
                        raise ConfigError(f"{file}: line {number} has the custom_id of line {first}; each is its own")
                    asked.append(line)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not asked:
        raise ConfigError(f"{file} has no requests; write one JSON object a line")
    return asked


def _line(text: str, where: str) -> AskedLine:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is no JSON: {error}") from error
    if not isinstance(line, dict):
        raise ConfigError(f"{where} is no JSON object")
    custom_id, url, body = (line.get(name) for name in ("custom_id", "url", "body"))
    if not isinstance(custom_id, str) or not custom_id:
        raise ConfigError(f"{where} has no custom_id, a text that names its answer")
    if line.get("method", "POST") != "POST" or not isinstance(url, str) or not _PATH.fullmatch(url):
        raise ConfigError(f"{where} must have the method POST and a url such as /v1/chat/completions")
    if not isinstance(body, dict):
        raise ConfigError(f"{where} has no body, the request as a JSON object")
    if body.get("stream"):
        raise ConfigError(f"{where} asks for a stream; leave `stream` out")
    return AskedLine(custom_id, url, body)


def read_answers(journal: BinaryIO) -> dict[str, bytes]:
    """By custom_id, the lines of an earlier run; a line that was cut off is taken away from the file."""
    answers: dict[str, bytes] = {}
    journal.seek(0)
    size = 0
    for raw in journal:
        if not raw.endswith(b"\n"):
            journal.truncate(size)
            break
        size += len(raw)
        answers.setdefault(str(json.loads(raw)["custom_id"]), raw)
    return answers


def write_answers(file: Path, asked: list[AskedLine], answer_of: Callable[[str], bytes]) -> int:
    """All answers in the order of the requests, whole or not at all. Returns how many of them are no 200."""
    partial, num_failed = file.with_name(file.name + ".new"), 0
    with partial.open("wb") as lines:
        for line in asked:
            raw = answer_of(line.custom_id)
            num_failed += not _is_good(raw)
            lines.write(raw.rstrip(b"\n") + b"\n")
        lines.flush()
        os.fsync(lines.fileno())
    partial.replace(file)
    return num_failed


def _is_good(raw: bytes) -> bool:
    response = json.loads(raw).get("response")
    return response is not None and response["status_code"] == 200


def lines_of(content: bytes) -> Iterator[tuple[str, bytes]]:
    """Of a file of answers, each line and its custom_id."""
    for raw in content.splitlines():
        yield str(json.loads(raw)["custom_id"]), raw
