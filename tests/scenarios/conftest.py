"""Clusters that many scenarios share: starting one takes longer than most of what is asked of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.scenarios.processes import ProcessCluster, running


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    """1P1D with the embedded model. Leave it idle and whole."""
    with running(tmp_path_factory.mktemp("1p1d"), config={"model": {"served_names": ["*"]}}) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: ProcessCluster) -> Iterator[ProcessCluster]:
    """The shared cluster; the test fails when it leaves pages behind."""
    yield shared_cluster
    shared_cluster.wait_idle()
