"""What a line of the log says, as JSON and for a terminal."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tandem.core.config import LoggingConfig
from tandem.core.logging import bound, setup_logging

_log = logging.getLogger("some.module")


@pytest.fixture
def lines(tmp_path: Path) -> Iterator[Callable[[str], list[str]]]:
    """Logs three events in a format, and returns the lines of the file."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)

    def logged(format: str) -> list[str]:
        setup_logging(LoggingConfig(format=format, directory=str(tmp_path)), "decode-0")
        _log.debug("below the level")
        with bound(request_id="r-1"):
            _log.info("%d pages are %s", 3, "free")
        try:
            raise ValueError("no such page")
        except ValueError:
            _log.exception("a step failed")
        return (tmp_path / "decode-0.log").read_text().splitlines()

    yield logged
    for handler in set(root.handlers) - set(handlers):
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)


def test_a_line_of_json_has_the_sentence_and_where_it_comes_from(lines: Callable[[str], list[str]]) -> None:
    first, second = (json.loads(line) for line in lines("auto"))
    assert first.pop("timestamp").endswith("Z")
    expected = {"event": "3 pages are free", "level": "info", "logger": "some.module", "process": "decode-0"}
    assert first == {**expected, "request_id": "r-1"}
    assert second["event"] == "a step failed"
    assert second["level"] == "error"
    assert "request_id" not in second
    assert second["exception"].splitlines()[-1] == "ValueError: no such page"


def test_a_terminal_gets_the_same(lines: Callable[[str], list[str]]) -> None:
    first, *rest = lines("console")
    for fact in ("3 pages are free", "info", "some.module", "process=decode-0", "request_id=r-1"):
        assert fact in first
    assert any("ValueError: no such page" in line for line in rest)


def test_a_second_set_up_takes_the_place_of_the_first(lines: Callable[[str], list[str]]) -> None:
    assert len(lines("json")) == 2
    assert len(lines("json")) == 4


def test_what_a_client_wrote_commands_no_terminal_and_is_no_line_of_its_own(
    lines: Callable[[str], list[str]], tmp_path: Path
) -> None:
    lines("console")
    _log.info("refused: %s", "a\x1b[2J\nerror: the disk is full")
    (line,) = (line for line in (tmp_path / "decode-0.log").read_text().splitlines() if "refused" in line)
    assert r"refused: a\x1b[2J\nerror: the disk is full" in line
