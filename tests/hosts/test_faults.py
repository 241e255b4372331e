"""The switch's rules say what the faults say."""

from __future__ import annotations

from tests.hosts.faults import Faults


def test_nothing_is_dropped_without_faults() -> None:
    assert "drop" not in Faults().rules()


def test_faults_survive_being_written() -> None:
    faults = Faults({1}, set(), {2: 0.5})
    faults.part(3, 2)
    assert Faults.from_json(faults.as_json()) == faults
    assert faults.parted == {(2, 3)}
