"""The switch's rules say what the faults say, and the failure contract what was seen of them."""

from __future__ import annotations

from tests.hosts import report
from tests.hosts.faults import Faults


def test_nothing_is_dropped_without_faults() -> None:
    assert "drop" not in Faults().rules()


def test_faults_survive_being_written() -> None:
    faults = Faults({1}, set(), {2: 0.5})
    faults.part(3, 2)
    assert Faults.from_json(faults.as_json()) == faults
    assert faults.parted == {(2, 3)}


def test_the_failure_contract_has_the_figures_as_they_were_measured() -> None:
    assert report.page() == report.PAGE.read_text()
    assert report.table([]).splitlines()[0] in report.PAGE.read_text()
