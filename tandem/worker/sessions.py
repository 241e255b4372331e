"""The worker's end of its sessions with routers: commands in, events out, status as the heartbeat.

One bidirectional stream per router. Events of one step leave in one message, those of several where the router is
behind, with a status where requests came, went or went on. The end of a stream, however it comes, ends all that the
router had started here: no request outlives the router that wants it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

from tandem.rpc.duplex import ServedStream
from tandem.rpc.v1 import common_pb2 as pb
from tandem.worker.load import LoadSnapshot

Command = TypeVar("Command", contravariant=True)
Event = TypeVar("Event")
Events = TypeVar("Events")


# The requests that there are: of a status, and of what it is made of.
_figures = attrgetter("num_running", "num_queued", "num_queued_tokens", "num_incoming")


class SessionHandler(Protocol[Command]):
    """What the worker does with its routers' commands. Called in the event loop; must not block."""

    def command(self, session: int, command: Command) -> None:
        """A router sent `command`."""

    def session_ended(self, session: int) -> None:
        """A router's stream is over: end everything that it had started."""


class SessionHub(Generic[Command, Event, Events]):
    """All sessions of one worker.

    Args:
        handler: gets the commands, and has each in the status when it returns. Its sessions begin once it is complete.
        loop: the worker's event loop.
        make_events: builds a message of events, and maybe a status and how many of the session's commands that shows.
        hello: the first events of every session.
        take_news: events for all routers that have come up since the last call; asked for before each status of all.
        read_status: a fresh snapshot of the worker's load; must be safe to call from the event loop.
        read_report: the same, with what is too long for every message: for hellos and heartbeats.
        read_load: of the status how many requests there are, and what they wait for. Where that is as it was last told,
            events go without a status, which would cost more than a token: the rest of it is told with the next one.
        join: adds its second message to the first one, and says so, where they may go as one.
        heartbeat_s: longest silence towards a router, in seconds.
        interval_s: shortest time between two messages that carry a changed status only, in seconds.
    """

    def __init__(
        self,
        handler: SessionHandler[Command],
        loop: asyncio.AbstractEventLoop,
        make_events: Callable[[Sequence[Event], pb.WorkerStatus | None, int | None], Events],
        hello: Callable[[], Sequence[Event]],
        read_status: Callable[[], pb.WorkerStatus],
        read_report: Callable[[], pb.WorkerStatus],
        read_load: Callable[[], LoadSnapshot],
        take_news: Callable[[], Sequence[Event]] = lambda: (),
        *,
        join: Callable[[Events, Events], bool],
        heartbeat_s: float,
        interval_s: float,
    ) -> None:
        self._handler = handler
        self._loop = loop
        self._make_events = make_events
        self._join = join
        self._hello = hello
        self._read_status = read_status
        self._read_report = read_report
        self._read_load = read_load
        self._take_news = take_news
        self._heartbeat_s = heartbeat_s
        self._interval_s = interval_s
        self._sessions: dict[int, ServedStream[Events]] = {}
        self._num_commands: dict[int, int] = {}  # of each session, that were taken in
        # Of each session: the load as it was last told, and how many of its commands that shows.
        self._told: dict[int, tuple[Any, int]] = {}
        self._next = 0
        self._changed = asyncio.Event()
        self._num_told = 0  # requests, as all routers were last told

    # -- from other threads

    def emit(self, events_by_session: Mapping[int, Sequence[Event]]) -> None:
        """Send events, in order; thread-safe."""
        self._loop.call_soon_threadsafe(self._deliver, events_by_session)

    def broadcast(self, events: Sequence[Event]) -> None:
        """Send events to every router; thread-safe."""
        self._loop.call_soon_threadsafe(lambda: self._deliver(dict.fromkeys(self._sessions, events)))

    def status_changed(self) -> None:
        """Let routers have the load soon; thread-safe."""
        self._loop.call_soon_threadsafe(self._note_change)

    def tell_status(self) -> None:
        """Let routers have the status at once; thread-safe."""
        self._loop.call_soon_threadsafe(lambda: self._tell_all(self._read_status()))

    # -- in the event loop

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def _deliver(self, events_by_session: Mapping[int, Sequence[Event]]) -> None:
        load, status = _figures(self._read_load()), None
        for number, events in events_by_session.items():
            session = self._sessions.get(number)
            if session is None:
                continue
            if self._told.get(number) == (load, self._num_commands[number]):
                session.put(self._make_events(events, None, None))
                self._changed.set()  # what else the status has is told in time
                continue
            status = status or self._read_status()
            self._put(session, events, status)

    def _note_change(self) -> None:
        """Several routers must hear at once of requests that come and go: else all send theirs to one idle worker."""
        self._changed.set()
        if len(self._sessions) > 1 and _num_requests(status := self._read_status()) != self._num_told:
            self._tell_all(status)

    def _tell_all(self, status: pb.WorkerStatus) -> None:
        self._num_told = _num_requests(status)
        news = self._take_news()
        if news:  # there may be more, which need not wait for a heartbeat
            self._changed.set()
        for session in list(self._sessions.values()):
            self._put(session, news, status)

    def _put(self, session: ServedStream[Events], events: Sequence[Event], status: pb.WorkerStatus) -> None:
        num_commands = self._num_commands[session.number]
        self._told[session.number] = _figures(status), num_commands
        session.put(self._make_events(events, status, num_commands))

    async def run(self, commands: AsyncIterator[Command]) -> AsyncIterator[Events]:
        """Serve one router until either side ends."""
        task = asyncio.current_task()
        assert task is not None

        def cut_off() -> None:
            # The stream may be stuck in a write that nobody reads: neither it nor its requests wait for that.
            self._end(session)
            task.cancel()

        # The others' next news begin where this hello ends. Where there are none, all of it is in this hello.
        while news := self._take_news():
            self._deliver(dict.fromkeys(self._sessions, news))
            if self._sessions:
                self._changed.set()  # as in `_tell_all`
                break
        session: ServedStream[Events] = ServedStream(self._next, cut_off, self._join)
        self._next += 1
        self._sessions[session.number] = session
        self._num_commands[session.number] = 0
        status = self._read_report()
        for event in self._hello():  # each in its own message: all that a cache holds is too much for one
            self._put(session, [event], status)
            status = self._read_status()
        try:
            with session.reading(commands, lambda command: self._take(session.number, command)):
                async for message in session.messages():
                    yield message
        finally:
            self._end(session)

    def _take(self, number: int, command: Command) -> None:
        self._handler.command(number, command)
        if number in self._num_commands:  # it may have ended its own session
            self._num_commands[number] += 1

    def _end(self, session: ServedStream[Events]) -> None:
        """Tell the handler, once."""
        session.drop()
        if self._sessions.pop(session.number, None) is not None:
            del self._num_commands[session.number]
            self._told.pop(session.number, None)
            self._handler.session_ended(session.number)

    async def beat(self) -> None:
        """Send the status when it changed, and as a heartbeat; runs as long as the worker."""
        slept_s = 0.0  # since the last one
        while True:
            with suppress(TimeoutError):  # nothing changed: the status goes out as a heartbeat
                # Not `wait_for`: in Python 3.11 it swallows a cancel that comes together with the event.
                async with asyncio.timeout(self._heartbeat_s - slept_s):
                    await self._changed.wait()
            self._changed.clear()
            if self._sessions:
                self._tell_all(self._read_report())
            # A busy worker changes at every step; routers need it a few times a second.
            slept_s = min(self._interval_s, self._heartbeat_s)
            await asyncio.sleep(slept_s)

    def close(self) -> None:
        """End every session once what is queued has gone out; the server bounds how long that may take.

        The last word is the status. A router may not have heard yet that the worker drains, and without it would take
        the end for a death, of which a request survives one.
        """
        self._tell_all(self._read_status())
        for session in list(self._sessions.values()):
            session.end()


def _num_requests(status: pb.WorkerStatus) -> int:
    return status.num_running + status.num_queued + status.num_incoming
