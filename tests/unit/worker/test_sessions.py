"""The worker's end of its sessions, without a wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from tandem.rpc import duplex
from tandem.rpc.v1 import common_pb2 as pb
from tandem.worker.sessions import SessionHub
from tests.support.waiting import until

WAIT_S = 60.0


@dataclass
class Handler:
    commands: list[tuple[int, str]] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None

    def command(self, session: int, command: str) -> None:
        self.commands.append((session, command))
        if self.error is not None:
            raise self.error

    def session_ended(self, session: int) -> None:
        self.ended.append(session)
        self.has_ended.set()


@dataclass
class Message:
    events: list[str]
    status: pb.WorkerStatus | None
    num_commands: int


class Stream:
    """A router's stream: `say` sends a command, `heard` has what came; runs until either side ends."""

    def __init__(self, hub: SessionHub[str, str, Message], *, reads: bool = True) -> None:
        self._commands: asyncio.Queue[str | None] = asyncio.Queue()
        self.heard: list[Message] = []
        self._changed = asyncio.Event()
        self._reads = asyncio.Event()
        if reads:
            self._reads.set()
        self.task = asyncio.create_task(self._run(hub))

    async def _run(self, hub: SessionHub[str, str, Message]) -> None:
        async for message in hub.run(self._said()):
            self.heard.append(message)
            self._changed.set()
            await self._reads.wait()

    async def _said(self) -> AsyncIterator[str]:
        while (command := await self._commands.get()) is not None:
            yield command

    def go_on(self) -> None:
        """Read from now on."""
        self._reads.set()

    def say(self, command: str | None) -> None:
        self._commands.put_nowait(command)

    async def events(self, num: int) -> list[str]:
        async with asyncio.timeout(WAIT_S):
            while len(found := [e for m in self.heard for e in m.events]) < num:
                self._changed.clear()
                await self._changed.wait()
        return found

    async def messages(self, num: int) -> None:
        """Until so many have come."""
        async with asyncio.timeout(WAIT_S):
            while len(self.heard) < num:
                self._changed.clear()
                await self._changed.wait()

    async def ended(self) -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.wait_for(self.task, WAIT_S)


def make_hub(
    handler: Handler,
    *,
    heartbeat_s: float = 60.0,
    interval_s: float = 0.0,
    hello: Callable[[], Sequence[str]] = lambda: ["hello"],
    take_news: Callable[[], Sequence[str]] = lambda: (),
    join: Callable[[Message, Message], bool] = lambda message, later: False,
    read_status: Callable[[], pb.WorkerStatus] | None = None,
) -> SessionHub[str, str, Message]:
    def make(events: Sequence[str], status: pb.WorkerStatus | None, num_commands: int) -> Message:
        return Message(list(events), status, num_commands)

    counter = iter(range(1000))
    return SessionHub(
        handler,
        asyncio.get_running_loop(),
        make,
        hello,
        read_status or (lambda: pb.WorkerStatus(num_running=next(counter))),
        read_status or (lambda: pb.WorkerStatus(num_running=next(counter), links=pb.LinkReport())),
        read_status or (lambda: pb.WorkerStatus(num_queued=1)),  # as never told: each message has a status
        take_news,
        join=join,
        heartbeat_s=heartbeat_s,
        interval_s=interval_s,
    )


async def test_hello_comes_first_and_events_stay_in_order() -> None:
    hub = make_hub(handler := Handler())
    stream = Stream(hub)
    assert await stream.events(1) == ["hello"]
    hub.emit({0: ["a", "b"], 7: ["for nobody"]})
    hub.emit({0: ["c"]})
    assert await stream.events(4) == ["hello", "a", "b", "c"]
    assert [len(m.events) for m in stream.heard] == [1, 2, 1], "one message a step"
    stream.say("do")
    stream.say(None)
    await stream.ended()
    assert handler.commands == [(0, "do")]
    assert handler.ended == [0]


async def test_a_long_hello_comes_in_pieces_before_all_else() -> None:
    hub = make_hub(Handler(), hello=lambda: ["hello", "pages", "more pages"])
    stream = Stream(hub)
    hub.broadcast(["all"])
    assert await stream.events(4) == ["hello", "pages", "more pages", "all"]
    assert [len(message.events) for message in stream.heard] == [1, 1, 1, 1]
    assert [message.status.HasField("links") for message in stream.heard] == [True, False, False, False]


async def test_much_news_is_told_piece_by_piece_without_a_heartbeat() -> None:
    news = ["n0", "n1", "n2", "n3"]
    hub = make_hub(Handler(), hello=lambda: ["hello"], take_news=lambda: [news.pop(0)] if news else [])
    beat = asyncio.create_task(hub.beat())
    try:
        first = Stream(hub)
        assert await first.events(1) == ["hello"]
        assert news == [], "where nobody hears it, all of it is in the hello"
        news += ["n4", "n5", "n6"]
        second = Stream(hub)
        assert await second.events(3) == ["hello", "n5", "n6"]
        assert await first.events(4) == ["hello", "n4", "n5", "n6"]
    finally:
        beat.cancel()


async def test_what_waits_while_a_router_is_behind_goes_to_it_as_one_message() -> None:
    """The newest status with it, and all events in their order."""

    def join(message: Message, later: Message) -> bool:
        if "by itself" in (*message.events, *later.events):
            return False
        message.events += later.events
        message.status, message.num_commands = later.status, later.num_commands
        return True

    hub = make_hub(Handler(), join=join)
    stream = Stream(hub, reads=False)
    await stream.messages(1)
    for number in range(6):
        hub.emit({0: ["by itself" if number == 3 else str(number)]})
    stream.say("do")
    hub.emit({0: ["last"]})
    stream.go_on()
    assert await stream.events(8) == ["hello", "0", "1", "2", "by itself", "4", "5", "last"]
    assert [message.events for message in stream.heard[1:]] == [["0", "1", "2"], ["by itself"], ["4", "5", "last"]]
    statuses = [message.status.num_running for message in stream.heard]
    assert statuses == sorted(statuses)
    assert statuses[-1] - statuses[1] == 4, "that of the last event"


async def test_events_go_without_a_status_where_that_says_nothing_new() -> None:
    load = pb.WorkerStatus(num_running=1)
    hub = make_hub(Handler(), read_status=lambda: pb.WorkerStatus.FromString(load.SerializeToString()))
    stream, other = Stream(hub), Stream(hub)
    await stream.events(1)
    await other.events(1)

    async def told(num: int) -> list[tuple[int, int] | None]:
        """Of each message: what runs by its status, and the commands that this shows."""
        await stream.messages(num)
        return [m.status and (m.status.num_running, m.num_commands) for m in stream.heard]

    hub.emit({0: ["a"]})
    load.decode_tokens = 7  # which nothing is placed by
    hub.emit({0: ["b"]})
    assert await told(3) == [(1, 0), None, None]
    load.num_running = 2
    hub.emit({0: ["c"]})
    hub.emit({0: ["d"]})
    assert await told(5) == [(1, 0), None, None, (2, 0), None]
    stream.say("do")
    await until(lambda: hub._num_commands[0] == 1, "the command")
    hub.emit({0: ["e"], 1: ["e"]})
    hub.emit({0: ["f"], 1: ["f"]})
    assert await told(7) == [(1, 0), None, None, (2, 0), None, (2, 1), None]
    await other.messages(3)
    assert [m.status is not None for m in other.heard] == [True, True, False], "another router had not heard of it"


async def test_what_else_a_status_has_follows_events_in_time() -> None:
    load = pb.WorkerStatus(num_running=1)
    hub = make_hub(Handler(), read_status=lambda: pb.WorkerStatus.FromString(load.SerializeToString()))
    stream = Stream(hub)
    await stream.events(1)
    beat = asyncio.create_task(hub.beat())
    try:
        load.decode_tokens = 7
        hub.emit({0: ["a"]})
        await stream.messages(3)
    finally:
        beat.cancel()
    assert [(m.events, m.status and m.status.decode_tokens) for m in stream.heard[1:]] == [(["a"], None), ([], 7)]


async def test_a_status_may_be_told_at_once() -> None:
    hub = make_hub(Handler())
    stream = Stream(hub)
    await stream.events(1)
    hub.tell_status()
    await stream.messages(2)
    assert stream.heard[1].status is not None


async def test_events_go_to_their_session_and_broadcasts_to_all() -> None:
    hub = make_hub(Handler())
    first, second = Stream(hub), Stream(hub)
    await first.events(1)
    await second.events(1)
    hub.emit({1: ["mine"]})
    hub.broadcast(["all"])
    assert await first.events(2) == ["hello", "all"]
    assert await second.events(3) == ["hello", "mine", "all"]
    hub.close()
    await first.ended()
    await second.ended()


async def test_a_cancelled_stream_ends_once() -> None:
    hub = make_hub(handler := Handler())
    stream = Stream(hub)
    await stream.events(1)
    stream.task.cancel()
    await stream.ended()
    await asyncio.wait_for(handler.has_ended.wait(), WAIT_S)
    assert handler.ended == [0]


async def test_a_router_that_reads_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stuck in a write; its requests end all the same, and its later commands are not heard."""
    monkeypatch.setattr(duplex, "_MAX_PENDING_MESSAGES", 3)
    hub = make_hub(handler := Handler())
    slow, other = Stream(hub, reads=False), Stream(hub)
    await slow.events(1)
    await other.events(1)
    for n in range(5):
        hub.emit({0: [f"e{n}"], 1: [f"e{n}"]})
        await other.events(n + 2)
    await slow.ended()
    assert handler.ended == [0]
    slow.say("too late")
    await asyncio.sleep(0)
    assert handler.commands == []
    assert [m.events for m in slow.heard] == [["hello"]], "what was buffered is dropped"
    other.say(None)
    await other.ended()
    assert handler.ended == [0, 1]


async def test_a_command_that_fails_ends_its_session_only() -> None:
    hub = make_hub(handler := Handler())
    bad, good = Stream(hub), Stream(hub)
    await bad.events(1)
    await good.events(1)
    handler.error = ValueError("no")
    bad.say("bad")
    await bad.ended()
    assert handler.ended == [0]
    handler.error = None
    hub.emit({1: ["still here"]})
    await good.events(2)
    hub.close()
    await good.ended()


async def test_the_status_goes_out_when_it_changes_and_as_a_heartbeat() -> None:
    hub = make_hub(Handler(), heartbeat_s=0.05)
    stream = Stream(hub)
    beat = asyncio.create_task(hub.beat())
    await stream.events(1)

    async def heard(num: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while len(stream.heard) < num:
                stream._changed.clear()
                await stream._changed.wait()

    await heard(3)
    num = len(stream.heard)
    hub.status_changed()
    await heard(num + 1)
    values = [m.status.num_running for m in stream.heard]
    assert values == sorted(set(values)), "each message has a fresh one"
    beat.cancel()
    hub.close()
    await stream.ended()


@pytest.mark.parametrize("num_turns", range(6))
async def test_a_cancel_that_comes_with_a_change_still_ends_the_beat(num_turns: int) -> None:
    hub = make_hub(Handler())
    beat = asyncio.create_task(hub.beat())
    await asyncio.sleep(0.01)
    hub._changed.set()
    for _ in range(num_turns):
        await asyncio.sleep(0)
    beat.cancel()
    done, _ = await asyncio.wait([beat], timeout=WAIT_S)
    assert done, "the cancel was swallowed"


@pytest.mark.long
async def test_a_long_interval_does_not_hold_the_heartbeat_back() -> None:
    """What a router may take for silence is bounded by the heartbeat alone."""
    hub = make_hub(Handler(), heartbeat_s=0.05, interval_s=60.0)
    stream = Stream(hub)
    beat = asyncio.create_task(hub.beat())
    async with asyncio.timeout(WAIT_S):
        while len(stream.heard) < 4:  # hello and three heartbeats
            stream._changed.clear()
            await stream._changed.wait()
    beat.cancel()
    hub.close()


async def test_an_idle_worker_speaks_each_heartbeat_whatever_it_has_slept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as long would be silence to a router with a short lease."""
    waits, timeout = list[float](), asyncio.timeout

    def noted(delay_s: float) -> asyncio.Timeout:
        waits.append(delay_s)
        return timeout(delay_s)

    hub = make_hub(Handler(), heartbeat_s=0.05, interval_s=0.03)
    stream = Stream(hub)
    await stream.messages(1)
    monkeypatch.setattr(asyncio, "timeout", noted)
    beat = asyncio.create_task(hub.beat())
    await until(lambda: len(waits) >= 4, "three heartbeats")
    monkeypatch.undo()
    beat.cancel()
    hub.close()
    assert waits[:4] == [0.05, *[pytest.approx(0.02)] * 3]


async def test_the_last_word_is_the_status() -> None:
    """A router that has not heard yet that the worker drains would take its end for a death."""
    hub = make_hub(Handler())
    streams = [Stream(hub), Stream(hub)]
    for stream in streams:
        await stream.events(1)
    hub.close()
    for stream in streams:
        await stream.ended()
        before, last = (message.status.num_running for message in stream.heard)
        assert last > before, "as it was read at the end"


async def test_what_is_queued_when_the_worker_stops_still_goes_out() -> None:
    """Its drain ends with the last tokens, which a slow stream has not taken yet."""
    hub = make_hub(handler := Handler())
    stream = Stream(hub, reads=False)
    await stream.events(1)
    for n in range(5):
        hub.emit({0: [f"t{n}"]})
    await asyncio.sleep(0)
    hub.close()
    hub.emit({0: ["too late"]})
    stream.say("too late")
    await asyncio.sleep(0)
    stream._reads.set()
    await stream.ended()
    assert await stream.events(6) == ["hello", "t0", "t1", "t2", "t3", "t4"]
    assert handler.commands == []
    assert handler.ended == [0]


async def test_hellos_and_heartbeats_have_the_whole_report_and_events_the_load_only() -> None:
    hub = make_hub(Handler(), heartbeat_s=0.01)
    stream = Stream(hub)
    await stream.events(1)
    hub.emit({0: ["a"]})
    await stream.events(2)
    assert [m.status.HasField("links") for m in stream.heard] == [True, False]
    beats = asyncio.create_task(hub.beat())
    await stream.messages(3)
    beats.cancel()
    assert stream.heard[2].status.HasField("links")
    stream.say(None)
    await stream.ended()


async def test_each_message_says_how_many_commands_of_its_session_the_status_shows() -> None:
    """The handler has taken a command in when it returns."""

    class Echo(Handler):
        def command(self, session: int, command: str) -> None:
            hub.emit({session: [command]})

    hub = make_hub(Echo())
    one, other = Stream(hub), Stream(hub)
    await one.events(1)
    await other.events(1)
    for stream, command, num_events in ((one, "a", 2), (one, "b", 3), (other, "c", 2)):
        stream.say(command)
        await stream.events(num_events)
    assert [(m.events, m.num_commands) for m in one.heard] == [(["hello"], 0), (["a"], 1), (["b"], 2)]
    assert [(m.events, m.num_commands) for m in other.heard] == [(["hello"], 0), (["c"], 1)]
    hub.close()


@pytest.mark.parametrize(("num_routers", "told"), [(1, []), (2, [0, 3, 4])])
async def test_several_routers_hear_at_once_of_requests_that_come_and_go(num_routers: int, told: list[int]) -> None:
    """What else changes with each step waits for the beat; one router knows by itself what it sent."""
    statuses = [pb.WorkerStatus(num_running=2, num_queued_tokens=tokens) for tokens in (10, 9, 8)]
    statuses += [pb.WorkerStatus(num_running=2, num_queued=1), pb.WorkerStatus(num_running=2, num_incoming=2)]
    hub = make_hub(Handler(), interval_s=60.0)
    streams = [Stream(hub) for _ in range(num_routers)]
    for stream in streams:
        await stream.events(1)
    for status in statuses:
        hub._read_status = lambda status=status: status  # type: ignore[misc]
        hub.status_changed()
        await asyncio.sleep(0)
    hub.broadcast(["last"])
    for stream in streams:
        await stream.events(2)
        assert [message.status for message in stream.heard[1:-1]] == [statuses[number] for number in told]
    hub.close()
