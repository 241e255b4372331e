"""Ports that nobody gets by chance while their owner starts again."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tandem.core import ports
from tandem.core.ports import free_port


@pytest.mark.long
@pytest.mark.parametrize("given", ["32768\t60999", "20000\t60999", "1024\t65000"])
def test_none_is_of_those_that_the_kernel_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    file = tmp_path / "ip_local_port_range"
    file.write_text(given + "\n")
    monkeypatch.setattr(ports, "_GIVEN", file)
    first, last = map(int, given.split())
    found = {free_port() for _ in range(200)}
    assert len(found) > 100, "two who ask at once seldom get the same"
    if given != "1024\t65000":  # which leaves hardly any
        assert not [port for port in found if first <= port <= last]
    assert all(20_000 <= port < 65_536 for port in found)


def test_who_listens_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        asked = iter([taken, taken, 21_000, 21_001, 21_002])
        monkeypatch.setattr(ports._random, "choice", lambda _: next(asked))
        assert free_port() != taken
