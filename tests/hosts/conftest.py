"""Test hosts for a module's tests. Where they cannot be had, those tests are skipped, and say what is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.hosts.hosts import Hosts
from tests.hosts.leftovers import left_of
from tests.hosts.needs import missing

StartHosts = Callable[..., Hosts]


@pytest.fixture(scope="module")
def start_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartHosts]:
    """Starts a rack, with the options of `Hosts.start`; nothing of any is left after the module's tests."""
    if reason := missing():
        pytest.skip(reason)
    started: list[Hosts] = []

    def start(**options: Any) -> Hosts:
        started.append(Hosts.start(tmp_path_factory.mktemp("hosts") / "rack", **options))
        return started[-1]

    yield start
    for hosts in started:
        hosts.stop()
    assert not [left for hosts in started for left in left_of(hosts.directory)]
