"""What a session says of its worker's load, from a request's start there to its end."""

from __future__ import annotations

from typing import Any

from kvtransfer.wire import kv_format
from router.request.events import Event
from router.request.mailbox import Mailbox
from router.workers.session import SessionState, WorkerSession
from tandem.rpc.v1.common_pb2 import ROLE_DECODE, ROLE_PREFILL, Layout, PageCounts, WorkerInfo, WorkerStatus
from tandem.rpc.v1.control_pb2 import Member
from tandem.rpc.v1.decode_pb2 import DecodeCommand, DecodeEvents
from tandem.rpc.v1.prefill_pb2 import PrefillEvents
from tests.support.unheard import Unheard

PAGE_SIZE, FREE_PAGES = 16, 100
PROMPT_TOKENS = 40  # three pages


def session_of(role: Any) -> WorkerSession:
    """A session without a stream, whose worker has said that it is idle."""
    session = WorkerSession(Member(worker_id="w", incarnation="1", role=role), lease_s=1.0, observer=Unheard())
    session.info = WorkerInfo(layout=Layout(page_size=PAGE_SIZE))
    session.kv_format = kv_format(session.info)
    hear(session)
    return session


def hear(session: WorkerSession, *, num_commands: int | None = None, **figures: int) -> None:
    """The worker reports these figures; where it says so, with so many commands of this router in them."""
    make: Any = PrefillEvents if session.is_prefill else DecodeEvents
    status = WorkerStatus(pages=PageCounts(free=FREE_PAGES), **figures)
    session.receive(make(status=status, num_commands=num_commands))


def hold(session: WorkerSession, *, computes: bool) -> None:
    mailbox: Mailbox[Event] = Mailbox()
    session.hold("r", mailbox, PROMPT_TOKENS, computes=computes)


def shown(session: WorkerSession) -> tuple[int, int, int, int]:
    """Requests, prompt tokens that wait, requests in its steps, pages that are spoken for."""
    load = session.load()
    return load.num_active, load.num_queued_tokens, load.num_stepping, FREE_PAGES - load.num_available_pages


def test_a_prompt_that_decode_may_compute_is_its_work_until_it_grants_pages_instead() -> None:
    decode = session_of(ROLE_DECODE)
    hold(decode, computes=True)
    assert shown(decode) == (1, PROMPT_TOKENS, 1, 3)
    decode.note_taken_up("r", steps=False)
    assert shown(decode) == (1, 0, 0, 0)
    decode.note_taken_up("r", steps=True)
    assert shown(decode) == (1, 0, 1, 0)
    decode.let_go("r")
    assert shown(decode) == (0, 0, 0, 0)


def test_a_prompt_that_decode_computes_is_in_its_own_figures_once_it_is_admitted() -> None:
    decode = session_of(ROLE_DECODE)
    hold(decode, computes=True)
    decode.note_taken_up("r", steps=True)
    assert shown(decode) == (1, 0, 1, 0)


def test_a_handoff_is_no_work_of_decodes_until_it_is_admitted() -> None:
    decode = session_of(ROLE_DECODE)
    hold(decode, computes=False)
    assert shown(decode) == (1, 0, 0, 3)
    decode.note_taken_up("r", steps=False)
    assert shown(decode) == (1, 0, 0, 0)
    decode.note_taken_up("r", steps=True)
    assert shown(decode) == (1, 0, 1, 0)


def test_prefills_prompt_counts_until_it_has_begun() -> None:
    prefill = session_of(ROLE_PREFILL)
    hold(prefill, computes=True)
    assert shown(prefill) == (1, PROMPT_TOKENS, 1, 0)
    prefill.note_taken_up("r", steps=True)
    assert shown(prefill) == (1, 0, 1, 0)


def test_what_is_not_held_counts_for_nothing() -> None:
    """A worker's late word on a request that was let go."""
    decode = session_of(ROLE_DECODE)
    decode.note_taken_up("gone", steps=True)
    decode.let_go("gone")
    assert shown(decode) == (0, 0, 0, 0)


def test_the_workers_own_figures_count_where_they_are_larger() -> None:
    decode = session_of(ROLE_DECODE)
    hold(decode, computes=True)
    hear(decode, num_running=5, num_queued=2, num_queued_tokens=PROMPT_TOKENS + 1)
    assert shown(decode) == (7, PROMPT_TOKENS + 1, 5, 3)


def test_what_a_report_does_not_show_yet_counts_beside_it() -> None:
    """Most of what it shows may be of other routers."""
    decode = session_of(ROLE_DECODE)
    figures = {"num_running": 5, "num_queued": 1, "num_incoming": 1, "num_queued_tokens": 2 * PROMPT_TOKENS}
    hear(decode, num_commands=0, **figures)
    hold(decode, computes=True)
    decode.send(DecodeCommand())
    assert shown(decode) == (8, 3 * PROMPT_TOKENS, 5, 3)
    hear(decode, num_commands=0, **figures)
    assert shown(decode) == (8, 3 * PROMPT_TOKENS, 5, 3)
    hear(decode, num_commands=1, **figures)
    assert shown(decode) == (7, 2 * PROMPT_TOKENS, 5, 3)


def test_the_number_of_a_command_is_its_own() -> None:
    """Others go to the same worker: only the one that starts the request decides when a report shows it."""
    decode = session_of(ROLE_DECODE)
    decode.state = SessionState.OPEN
    decode.cancel("of before", 1, "")
    hold(decode, computes=True)
    decode.send(DecodeCommand())
    decode.cancel("of after", 1, "")
    hear(decode, num_commands=1)
    assert shown(decode) == (1, PROMPT_TOKENS, 1, 3)
    hear(decode, num_commands=2)
    assert shown(decode)[1] == 0


def test_a_report_that_says_nothing_new_has_no_load_looked_at_again() -> None:
    class Counting(Unheard):
        num_changes = 0

        def load_changed(self, session: WorkerSession) -> None:
            self.num_changes += 1

    observer = Counting()
    session = WorkerSession(Member(worker_id="w", incarnation="1", role=ROLE_DECODE), lease_s=1.0, observer=observer)
    seen, runs = [], {"num_running": 1}
    for figures in ({}, {}, runs, runs, {**runs, "draining": True}, {**runs, "draining": True}):
        hear(session, **figures)
        seen.append(observer.num_changes)
    assert seen == [1, 1, 2, 2, 3, 3]
    hear(session, num_running=1, num_commands=1, draining=True)
    assert observer.num_changes == 4, "what it shows of our commands decides what counts beside it"
