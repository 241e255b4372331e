"""The connections by which a prefill worker writes to a decode worker, over a real transport in its thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from decode_worker.links import WriterLinks
from kvtransfer.transfer_thread import TransferThread
from kvtransfer.transports.base import Transport
from kvtransfer.transports.events import Greeting, GreetingArrived, PeerId, ThreadEvent
from kvtransfer.transports.registry import create_transport
from tandem.core.errors import TransportError
from tests.support.waiting import until

WAIT_S = 60.0


@dataclass
class Decode:
    """What a decode worker has of its links; `closed` counts connections whose bytes may be on their way."""

    name: str
    arenas: list[np.ndarray] = field(default_factory=list)
    num_closed: int = 0
    errors: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.transport, self.writer = (self._make(f"{who}-of-{self.name}#{id(self)}") for who in ("decode", "prefill"))
        self.peer = PeerId(self.writer.agent_name)
        self.thread = TransferThread(self.transport, self._heard, self.errors.append, idle_poll_s=0.01)
        self.links = WriterLinks(self.thread.submit)
        self.loop = asyncio.get_running_loop()
        self.thread.start()

    def _make(self, agent_name: str) -> Transport:
        transport, arena = create_transport(self.name, agent_name), np.zeros(64, np.uint8)
        self.arenas.append(arena)
        transport.register(arena.ctypes.data, arena.nbytes, owner=arena)
        return transport

    def _heard(self, event: ThreadEvent) -> None:
        if isinstance(event, GreetingArrived):
            self.loop.call_soon_threadsafe(self.links.greeted, event.peer, event.greeting)

    def _closed(self) -> None:
        assert threading.current_thread() is self.thread._thread
        self.num_closed += 1

    async def connect(self, number: int) -> None:
        """As the prefill worker asks for it: it has closed its end, and connects when it has the answer."""
        if number:
            self.writer.hang_up(PeerId(self.transport.agent_name))
        await self.links.connect(self.peer, number, self.writer.metadata(), self._closed)
        self.writer.connect(self.transport.metadata())

    async def greet(self, number: int) -> None:
        self.writer.greet(PeerId(self.transport.agent_name), Greeting(number))
        assert await self.links.await_greeting(self.peer, Greeting(number), WAIT_S)

    def awaited(self) -> set[str]:
        return set(self.transport._expected)

    def close(self) -> None:
        self.thread.stop()
        self.writer.close()
        assert not self.errors


@pytest.fixture
async def decode(request: pytest.FixtureRequest) -> AsyncIterator[Decode]:
    site = Decode(getattr(request, "param", "loopback"))
    yield site
    site.close()


async def test_bytes_may_be_on_their_way_by_what_was_first_or_greeted_and_by_nothing_else(decode: Decode) -> None:
    await decode.connect(0)
    assert decode.num_closed == 0
    await decode.connect(1)
    assert decode.num_closed == 1, "on its first connection a writer posts at once"
    await decode.connect(2)
    assert decode.num_closed == 1, "nothing went by one that never came up"
    await decode.greet(2)
    await decode.connect(3)
    assert decode.num_closed == 2
    await decode.connect(3)
    await decode.links.connect(decode.peer, 2, decode.writer.metadata(), decode._closed)
    assert decode.num_closed == 2, "a call that is repeated, or late, closes nothing"


async def test_a_connection_that_an_earlier_worker_at_this_address_had_counts_for_nothing(decode: Decode) -> None:
    with pytest.raises(TransportError, match="no connection to this worker"):
        await decode.connect(3)
    await decode.connect(0)
    await decode.connect(1)
    assert decode.num_closed == 1
    await decode.greet(1)


@pytest.mark.parametrize("decode", ["nccl"], indirect=True)
async def test_where_nobody_greets_bytes_may_be_on_their_way_by_each_connection(decode: Decode) -> None:
    for number in range(4):
        await decode.connect(number)
        assert decode.num_closed == number


async def test_a_connection_is_closed_even_if_whoever_asked_for_it_has_gone(decode: Decode) -> None:
    """His call is over: the transfer thread was busy for longer. The next one counts on its having been carried out."""
    await decode.connect(0)
    is_free = threading.Event()
    decode.thread.submit(lambda _: is_free.wait(WAIT_S))
    asked = asyncio.create_task(decode.connect(1))
    await asyncio.sleep(0)
    asked.cancel()
    await asyncio.wait([asked])
    is_free.set()
    await decode.connect(2)
    assert decode.num_closed == 1


async def test_an_older_greeting_that_is_given_up_leaves_the_newer_one_awaited(decode: Decode) -> None:
    await decode.connect(0)
    older = asyncio.create_task(decode.links.await_greeting(decode.peer, Greeting(0), WAIT_S))
    await until(decode.awaited, "the first wait")
    await decode.connect(1)
    newer = asyncio.create_task(decode.links.await_greeting(decode.peer, Greeting(1), WAIT_S))
    await until(lambda: len(decode.awaited()) == 2, "both waits")
    older.cancel()
    await asyncio.wait([older])
    await until(lambda: len(decode.awaited()) == 1, "the end of one")
    decode.writer.greet(PeerId(decode.transport.agent_name), Greeting(1))
    assert await newer
    await until(lambda: not decode.awaited(), "the end of both")


async def test_a_greeting_of_another_connection_is_not_waited_for(decode: Decode) -> None:
    assert not await decode.links.await_greeting(decode.peer, Greeting(0), WAIT_S)
    await decode.connect(0)
    assert not await decode.links.await_greeting(decode.peer, Greeting(1), WAIT_S)
    assert not await decode.links.await_greeting(decode.peer, Greeting(0), 0.01)
    decode.links.forget(decode.peer)
    assert not await decode.links.await_greeting(decode.peer, Greeting(0), WAIT_S)


async def test_each_trial_of_a_connection_is_heard_of_itself(decode: Decode) -> None:
    """That the connection came up once says nothing of whether it still carries."""
    await decode.connect(0)
    await decode.greet(0)
    assert not await decode.links.await_greeting(decode.peer, Greeting(0, trial=1), 0.01)
    for trial in (1, 2):
        waiting = asyncio.create_task(decode.links.await_greeting(decode.peer, Greeting(0, trial), WAIT_S))
        await until(decode.awaited, "the wait")
        decode.writer.greet(PeerId(decode.transport.agent_name), Greeting(0, trial))
        assert await waiting
    decode.writer.greet(PeerId(decode.transport.agent_name), Greeting(0, 3))  # before anybody waits
    assert await decode.links.await_greeting(decode.peer, Greeting(0, 3), WAIT_S)
    assert await decode.links.await_greeting(decode.peer, Greeting(0), WAIT_S), "it has come up"
    newest = asyncio.create_task(decode.links.await_greeting(decode.peer, Greeting(0, 5), WAIT_S))
    await until(decode.awaited, "the wait")
    for trial in (4, 0):
        decode.writer.greet(PeerId(decode.transport.agent_name), Greeting(0, trial))
    for _ in range(2):  # with the second one's end what came before the first is heard
        await asyncio.wrap_future(decode.thread.submit(lambda _: None))
    await asyncio.sleep(0)
    assert not newest.done(), "those that come late count for nothing"
    decode.writer.greet(PeerId(decode.transport.agent_name), Greeting(0, 5))
    assert await newest
    await decode.connect(1)
    assert decode.num_closed == 1
    assert not await decode.links.await_greeting(decode.peer, Greeting(0, 3), WAIT_S), "another one counts"
