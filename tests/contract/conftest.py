from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from transport_peer import Agent, Pair, PeerProcess, RemoteAgent

_NUMBERS = itertools.count()
OPTIONS: dict[str, dict[str, Any]] = {"nccl": {"timeout_s": 10.0}}


@pytest.fixture(scope="module")
def peer_process() -> Iterator[PeerProcess]:
    """A process for the readers of all tests that do not harm it."""
    host = PeerProcess()
    yield host
    host.end()


@pytest.fixture
def own_process() -> Iterator[PeerProcess]:
    """A process that the test may stop and kill."""
    host = PeerProcess()
    yield host
    host.signal(signal.SIGCONT) if host.process.is_alive() else None
    host.end()


@pytest.fixture
def make_pair() -> Iterator[Callable[..., Pair]]:
    """Connected agents with new names, the reader in `host` or here; closed in the end."""
    made: list[Agent | RemoteAgent] = []

    def make(name: str, host: PeerProcess | None = None, **more: Any) -> Pair:
        number = next(_NUMBERS)
        options = OPTIONS.get(name, {}) | more
        writer = Agent.make(name, f"writer-{number}#1", options)
        reader: Agent | RemoteAgent
        if host is None:
            reader = Agent.make(name, f"reader-{number}#1", options)
        else:
            reader = RemoteAgent.make(host, name, f"reader-{number}#1", options)
        made.extend((writer, reader))
        peer = writer.connect(reader.metadata())
        reader.expect("grant", reader.connect(writer.metadata()))
        return Pair(name, writer, reader, peer)

    yield make
    for agent in made:
        if not isinstance(agent, RemoteAgent) or agent.host.process.is_alive():
            agent.close()
