"""Test hosts for a module's tests. Where they cannot be had, those tests are skipped, and say what is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.hosts.hosts import Hosts
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
        assert_nothing_is_left(hosts.directory)


def assert_nothing_is_left(directory: Path) -> None:
    """No process, mount, network link or file of a rack."""
    named = str(directory)
    left = [p for p in psutil.process_iter(["cmdline"]) if any(named in word for word in p.info["cmdline"] or ())]
    assert not left
    assert named not in Path("/proc/self/mountinfo").read_text()
    assert not any(line.strip().startswith(("port", "lan")) for line in Path("/proc/net/dev").read_text().splitlines())
    assert not any((directory / "rack").iterdir())
