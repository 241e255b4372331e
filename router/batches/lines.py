"""The lines of a batch's input: what each asks for, and what is wrong with it, by number as OpenAI tells it."""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from router.batches.records import LineError
from router.openai.depth import MAX_DEPTH, is_deep_json
from router.openai.model_card import ModelCard
from router.openai.refusal import shown
from tandem.core.errors import ModelNotFoundError

_MAX_ERRORS = 100
_MAX_ID_CHARS = 512
_FIELDS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True)
class Line:
    """A valid line."""

    number: int  # from 0, blank lines left out
    custom_id: str
    body: dict[str, Any]


@dataclass(frozen=True)
class Checked:
    """What an input turned out to be. With errors it is not run."""

    num_lines: int
    errors: tuple[LineError, ...]


@dataclass(frozen=True)
class LineRules:
    """What the lines of one batch must keep to."""

    endpoint: str
    card: ModelCard
    max_lines: int
    max_line_bytes: int

    def check(self, path: Path) -> Checked:
        """Read all of it, line by line: memory grows by a digest a line. Blocks."""
        errors: list[LineError] = []
        seen: set[bytes] = set()
        num_lines = 0
        for row, raw in _rows(path, self.max_line_bytes):
            num_lines += 1
            if num_lines > self.max_lines:
                text = f"the file has more than {self.max_lines} lines (batches.max_requests); split it"
                return Checked(num_lines, (LineError("too_many_requests", text, row),))
            error = self._wrong(row, raw, seen)
            if error is not None:
                errors.append(error)
                if len(errors) == _MAX_ERRORS:
                    break
        if not num_lines:
            errors.append(LineError("empty_file", "the file has no lines; write one request a line"))
        return Checked(num_lines, tuple(errors))

    def _wrong(self, row: int, raw: bytes | None, seen: set[bytes]) -> LineError | None:
        if raw is None:
            text = f"this line is longer than {self.max_line_bytes} bytes (limits.max_body_bytes)"
            return LineError("line_too_large", text, row)
        try:
            line = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            return LineError("invalid_json_line", f"this line is not parseable as valid JSON: {error}", row)
        if is_deep_json(raw, line):
            text = f"this line is nested too deeply: more than {MAX_DEPTH} objects and lists in another"
            return LineError("invalid_json_line", text, row)
        if not isinstance(line, dict):
            return LineError("invalid_json_line", f"this line must be a JSON object, not {shown(line)}", row)
        missing = next((name for name in _FIELDS if name not in line), None)
        if missing is not None:
            return LineError("missing_required_parameter", f"this line lacks {missing!r}", row, missing)
        return self._wrong_field(row, line, seen)

    def _wrong_field(self, row: int, line: dict[str, Any], seen: set[bytes]) -> LineError | None:
        custom_id, body = line["custom_id"], line["body"]
        if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MAX_ID_CHARS:
            text = f"custom_id must be a text of 1 to {_MAX_ID_CHARS} characters, not {shown(custom_id)}"
            return LineError("invalid_custom_id", text, row, "custom_id")
        digest = hashlib.sha256(custom_id.encode()).digest()[:16]
        if digest in seen:
            text = f"the custom_id {shown(custom_id)} stands on an earlier line too; each must be unique"
            return LineError("duplicate_custom_id", text, row, "custom_id")
        seen.add(digest)
        if line["method"] != "POST":
            return LineError("invalid_method", f"method must be POST, not {shown(line['method'])}", row, "method")
        if line["url"] != self.endpoint:
            text = f"the URL {shown(line['url'])} does not match the batch's endpoint, {self.endpoint}"
            return LineError("invalid_url", text, row, "url")
        if not isinstance(body, dict):
            return LineError("invalid_type", f"body must be a JSON object, not {shown(body)}", row, "body")
        return self._wrong_body(row, body)

    def _wrong_body(self, row: int, body: dict[str, Any]) -> LineError | None:
        if body.get("stream"):
            return LineError("unsupported_parameter", "a batch has no streams; leave `stream` out", row, "body.stream")
        model = body.get("model")
        if isinstance(model, str):
            try:
                self.card.check_name(model)
            except ModelNotFoundError as error:
                return LineError(error.code, error.message, row, "body.model")
        return None


def lines_of(path: Path, max_line_bytes: int) -> Iterator[Line]:
    """The lines of an input that was found valid. Blocks."""
    for number, (_, raw) in enumerate(_rows(path, max_line_bytes)):
        line = orjson.loads(raw or b"null")
        yield Line(number, line["custom_id"], line["body"])


def _rows(path: Path, max_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """Each line that is not blank, with its number from 1; `None` for one that is too long to be held."""
    row = 0
    with path.open("rb") as file:
        while raw := file.readline(max_bytes + 1):
            row += 1
            if row == 1:
                raw = raw.removeprefix(codecs.BOM_UTF8)  # editors on Windows write it
            if len(raw) > max_bytes and not raw.endswith(b"\n"):
                while raw and not raw.endswith(b"\n"):
                    raw = file.readline(max_bytes)
                yield row, None
            elif raw.strip():
                yield row, raw
