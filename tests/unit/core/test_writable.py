"""Whether a file can be written, before there is anything to write."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.core.errors import ConfigError
from tandem.core.writable import check_writable


def test_a_file_that_can_be_written_is_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("kept")
    check_writable(tmp_path / "old", "--json")
    check_writable(tmp_path / "new", "--json")
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old").read_text() == "kept"


@pytest.mark.parametrize("name", ["", "nowhere/file", "x" * 300], ids=["directory", "no directory", "long"])
def test_one_that_cannot_is_told_with_the_option(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be written: .*; name another --json"):
        check_writable(tmp_path / name, "--json")
    assert not list(tmp_path.iterdir())
