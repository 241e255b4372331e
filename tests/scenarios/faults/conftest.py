"""One cluster for all cases that plain processes can show, one that says what is right, and the figures of a run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scenarios.faults import report
from tests.scenarios.faults.site import Site, site, undisturbed_cluster

_FIGURES = "KILL_MATRIX"
"""Names the file that the figures of the run go to; without it they are not kept."""


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where a cluster with the embedded model answers that nothing happens to."""
    with undisturbed_cluster(tmp_path_factory.mktemp("faults") / "undisturbed") as url:
        yield url


@pytest.fixture(scope="session")
def shared_site(undisturbed: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """2P2D with an overseer; every case leaves it whole or about to be."""
    with site(tmp_path_factory.mktemp("faults"), undisturbed=undisturbed) as found:
        yield found
        # Once more with all connections there are: what leaked a little in each case shows.
        found.points.clear()
        found.prepare()
        found.use_all_pairs("at the end")
        found.check_baseline(10.0)


@pytest.fixture
def ready_site(shared_site: Site) -> Site:
    """The shared site, whole and idle, with nothing armed."""
    return shared_site.ready()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and any(name == "case" for name, _ in report.user_properties):
        _REPORTS.append(report)


_REPORTS: list[pytest.TestReport] = []


def pytest_sessionfinish() -> None:
    if (target := os.environ.get(_FIGURES)) and _REPORTS:
        report.write(Path(target), _REPORTS)
