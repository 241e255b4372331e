"""Points at which tests inject faults: how often one is passed before it acts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tandem.core import fault_points
from tandem.core.errors import InternalError


@pytest.fixture
def armed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(fault_points, "_armed", fault_points._Armed(tmp_path))
    fault_points.name_process("decode-0")
    return tmp_path


def test_a_point_acts_the_nth_time_and_then_no_more(armed: Path) -> None:
    (armed / "decode.step").write_text("3 raise")
    for _ in range(2):
        fault_points.reach("decode.step")
    with pytest.raises(InternalError, match=r"decode-0\.decode\.step"):
        fault_points.reach("decode.step")
    assert [file.name for file in armed.iterdir()] == ["decode-0.decode.step.hit"]
    fault_points.reach("decode.step")


def test_a_point_that_is_armed_anew_counts_anew_also_in_a_file_with_the_same_number(armed: Path) -> None:
    """File systems give the number of a file that has gone to the next one."""
    file = armed / "decode.step"
    file.write_text("3 raise")
    for _ in range(2):
        fault_points.reach("decode.step")
    before = file.stat()
    file.write_text("3 raise")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))  # clocks of files are coarse
    assert file.stat().st_ino == before.st_ino
    for _ in range(2):
        fault_points.reach("decode.step")
    with pytest.raises(InternalError):
        fault_points.reach("decode.step")
