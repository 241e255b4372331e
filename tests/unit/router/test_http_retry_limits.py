"""When a request is not tried again, or later: deaths, the budget, overload; and what is told at its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tandem.rpc.v1 import common_pb2
from tests.support.router_site import Site, frames, in_background
from tests.support.scripted_worker import ScriptedDecode, ScriptedPrefill

MakeSite = Callable[..., Site]


@dataclass
class TwoLost:
    """A request that has lost a second decode worker; a third one is idle."""

    site: Site
    first: ScriptedDecode
    second: ScriptedDecode
    third: ScriptedDecode
    under_way: Any


LoseTwo = Callable[..., TwoLost]


@pytest.fixture
def lose_two(make_site: MakeSite) -> LoseTwo:
    """Connections to two decode workers break, one after the other; nobody knows more."""

    def lose(overrides: dict[str, Any] | None = None, **body: Any) -> TwoLost:
        site = make_site(overrides)
        site.decode.held_back.clear()
        under_way = in_background(site, **body)
        site.decode.wait_for("attach")
        site.until_metric("tandem_ttft_seconds_count", 1)
        second, third = ScriptedDecode("decode-1", incarnation="2"), ScriptedDecode("decode-2", incarnation="3")
        second.held_back.clear()
        site.add(second)
        site.decode.kill()
        second.wait_for("attach")
        site.add(third)
        second.kill()
        site.until_metric('tandem_workers_lost_total{role="decode"}', 2)
        site.metrics()  # one turn of the router later
        assert third.count("reserve") == 0
        return TwoLost(site, site.decode, second, third, under_way)

    return lose


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True])
def test_two_deaths_end_a_request_for_good(lose_two: LoseTwo, stream: bool) -> None:
    lost = lose_two(stream=stream)
    lost.site.seen_to_end(lost.first)
    assert not lost.under_way.done()
    lost.site.seen_to_end(lost.second)
    answer = lost.under_way.result()
    error = frames(answer)[-1]["error"] if stream else answer.json()["error"]
    assert (error["code"], error["retryable"]) == ("workers_died", False)
    assert "decode-0/1 and decode-1/2" in error["message"]
    assert error["request_id"] == answer.headers["x-request-id"]
    assert answer.status_code == (200 if stream else 500)
    assert "[DONE]" not in answer.text
    assert lost.third.count("reserve") == 0
    assert lost.site.metrics()['tandem_worker_deaths_total{role="decode"}'] == 2


@pytest.mark.long
@pytest.mark.parametrize("which", ["first", "second"])
def test_a_worker_that_is_heard_again_has_not_died_and_the_request_goes_on(lose_two: LoseTwo, which: str) -> None:
    lost = lose_two()
    cut_off: ScriptedDecode = getattr(lost, which)
    lost.site.reach_again(cut_off)
    answer = lost.under_way.result()
    assert answer.json()["choices"][0]["text"] == "abcde"
    assert lost.third.wait_for("reserve").attempt == 3


@pytest.mark.long
def test_without_word_of_two_lost_workers_the_client_may_try_again(lose_two: LoseTwo) -> None:
    lost = lose_two({"transport.grace_s": 0.2})
    answer = lost.under_way.result()
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["retryable"]) == (502, "worker_lost", True)
    assert "decode-0/1 and decode-1/2 were lost" in error["message"]
    assert error["request_id"] == answer.headers["x-request-id"]
    assert lost.third.count("reserve") == 0


@pytest.mark.long
def test_two_workers_that_the_supervisor_has_only_decided_to_kill_may_live_on(lose_two: LoseTwo) -> None:
    """Of hosts that are cut off nobody sees an end: not before successors have their places, and not after."""
    lost = lose_two({"transport.grace_s": 0.2})
    lost.site.given_up(lost.first, lost.second)
    lost.site.pool.workers.remove(lost.first)
    del lost.site.pool.states["decode-0"]
    lost.site.add(ScriptedDecode("decode-0", incarnation="4"))
    error = lost.under_way.result().json()["error"]
    assert (error["code"], error["retryable"]) == ("worker_lost", True)
    assert lost.third.count("reserve") == 0


def test_an_end_that_is_proven_once_a_successor_has_the_place_counts(lose_two: LoseTwo) -> None:
    lost = lose_two()
    lost.site.seen_to_end(lost.first)
    lost.site.pool.remove(lost.second)
    lost.site.metrics()  # some turns of the router later
    assert not lost.under_way.done()
    lost.site.pool.ended.append(lost.second.info.incarnation)
    lost.site.pool.push()
    assert lost.under_way.result().json()["error"]["code"] == "workers_died"


@pytest.mark.long
def test_the_clients_deadline_holds_while_word_of_lost_workers_is_awaited(lose_two: LoseTwo) -> None:
    lost = lose_two({"transport.grace_s": 30.0}, timeout=3.0)
    assert lost.under_way.result().json()["error"]["code"] == "deadline"


@pytest.mark.long
def test_in_the_last_attempt_too_two_deaths_say_that_it_must_not_be_tried_again(lose_two: LoseTwo) -> None:
    lost = lose_two({"limits.max_attempts": 2})
    lost.site.seen_to_end(lost.first, lost.second)
    assert lost.under_way.result().json()["error"]["code"] == "workers_died"


def test_an_error_that_nobody_may_try_again_waits_for_no_word_of_lost_workers(make_site: MakeSite) -> None:
    site = make_site({"transport.grace_s": 0.2})
    site.decode.held_back.clear()
    under_way = in_background(site)
    site.decode.wait_for("attach")
    site.until_metric("tandem_ttft_seconds_count", 1)
    second = ScriptedDecode("decode-1", incarnation="2")
    second.auto = site.prefill.auto = False
    site.add(second)
    site.decode.kill()
    reserve = second.wait_for("reserve")
    second.grant(reserve)
    site.prefill.wait_for("attach", 2)
    second.admit(reserve)
    second.emit(token=second.token(reserve, 0, 1))
    site.until_metric("tandem_itl_seconds_count", 1)
    site.prefill.kill()
    site.until_metric('tandem_workers_lost_total{role="prefill"}', 1)
    second.fail(reserve.request_id, 2, "transport", retryable=False)
    assert under_way.result().json()["error"]["code"] == "transport"


@pytest.mark.long
def test_both_workers_dying_at_once_are_two_deaths(site: Site) -> None:
    site.prefill.auto = site.decode.auto = False
    under_way = in_background(site)
    site.prefill.started(site.prefill.wait_for("start"))
    site.decode.wait_for("reserve")
    both_are_dead = threading.Event()  # the router hears of both in one turn of its loop
    site.server._loop.call_soon_threadsafe(both_are_dead.wait, 10)
    site.prefill.kill()
    site.decode.kill()
    both_are_dead.set()
    site.seen_to_end(site.prefill, site.decode)
    # gRPC's own thread may still tell of them in two turns: then the request has let go of the second when it dies,
    # and waits for a worker.
    assert under_way.result().json()["error"]["code"] in ("workers_died", "no_worker")
    assert site.prefill.count("start") == 1


def test_the_exit_of_a_draining_worker_as_the_other_sees_it_costs_no_attempt(make_site: MakeSite) -> None:
    site = make_site({"limits.max_attempts": 1, "limits.retry_budget": 0})
    site.decode.auto = site.prefill.auto = False
    under_way = in_background(site)
    reserve = site.decode.wait_for("reserve")
    other = ScriptedPrefill("prefill-1")
    site.add(other)
    site.drain(site.prefill)
    site.until_shown("prefill-0", state="draining")
    site.decode.auto = True
    site.decode.fail(reserve.request_id, 1, "handoff", retryable=True, reason="writer_exited")
    assert under_way.result().json()["choices"][0]["text"] == "abcde"
    assert other.wait_for("start").attempt == 2
    assert site.metrics()['tandem_moves_total{reason="left"}'] == 1


def test_after_its_admission_decodes_own_error_is_not_taken_for_prefills_loss(make_site: MakeSite) -> None:
    site = make_site({"limits.max_attempts": 1})
    site.decode.auto = site.prefill.auto = False
    under_way = in_background(site)
    start, reserve = site.prefill.wait_for("start"), site.decode.wait_for("reserve")
    site.prefill.first_tokens(start)
    site.decode.grant(reserve)
    site.prefill.wait_for("attach")
    site.until_metric("tandem_ttft_seconds_count", 1)
    site.prefill.kill()
    site.until_metric('tandem_workers_lost_total{role="prefill"}', 1)
    site.decode.admit(reserve)
    site.decode.fail(reserve.request_id, 1, "transport", retryable=True)
    error = under_way.result().json()["error"]
    assert (error["code"], error["message"]) == ("transport", "scripted transport")


def test_a_spent_budget_ends_requests_with_their_own_error(make_site: MakeSite) -> None:
    site = make_site({"limits.retry_budget": 0, "scheduling.max_num_seqs": 1, "limits.max_attempts": 20})
    site.decode.auto = False
    under_way = in_background(site)
    for attempt in range(1, 12):
        reserve = site.decode.wait_for("reserve", attempt)
        site.decode.fail(reserve.request_id, attempt, "transport", retryable=True)
    answer = under_way.result()
    assert answer.status_code == 502
    assert answer.json()["error"]["code"] == "transport"
    assert answer.json()["error"]["retryable"] is True
    assert "retry budget" in answer.json()["error"]["message"]
    metrics = site.metrics()
    assert metrics['tandem_retries_total{reason="transport"}'] == 10
    assert metrics["tandem_retry_budget_exhausted_total"] == 1
    assert metrics["tandem_retry_budget_retries"] < 1


@pytest.mark.long
def test_an_overloaded_worker_is_left_in_peace_for_as_long_as_it_asks(site: Site) -> None:
    site.decode.auto = False
    under_way = in_background(site)
    refuse(site.decode, 1, retry_after_s=0.6)
    refused_s = time.monotonic()
    site.decode.wait_for("reserve", 2)
    assert 0.55 < time.monotonic() - refused_s < 3
    refuse(site.decode, 2, retry_after_s=60)
    site.add(other := ScriptedDecode("decode-1"))
    assert under_way.result().json()["choices"][0]["text"] == "abcde"
    assert (other.count("reserve"), site.decode.count("reserve")) == (1, 2)


@pytest.mark.long
def test_a_worker_that_stays_overloaded_is_the_clients_429(site: Site) -> None:
    site.decode.auto = False
    under_way = in_background(site)
    for number in (1, 2, 3):
        refuse(site.decode, number, retry_after_s=0.1 if number < 3 else 7.2)
    answer = under_way.result()
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "8")


def refuse(decode: ScriptedDecode, number: int, *, retry_after_s: float) -> None:
    """Answer the `number`th reservation as a worker whose queue is full does."""
    reserve = decode.wait_for("reserve", number)
    error = common_pb2.Error(code="overloaded", message="full", retryable=True, retry_after_s=retry_after_s)
    decode.emit(failed=common_pb2.AttemptFailed(request_id=reserve.request_id, attempt=reserve.attempt, error=error))


@pytest.mark.long
@pytest.mark.parametrize("end", ["finished", "stopped", "failed", "gone"])
def test_every_prefill_worker_that_had_the_prompt_may_forget_it_at_the_end_and_once(site: Site, end: str) -> None:
    site.decode.auto = False
    options = {"stop": ["b"]} if end == "stopped" else {"timeout": 1.0} if end == "gone" else {}
    under_way = in_background(site, **options)
    first = site.decode.wait_for("reserve")
    site.add(other := ScriptedPrefill("prefill-1"))
    site.decode.fail(first.request_id, 1, "transport", retryable=True)
    second = site.decode.wait_for("reserve", 2)
    assert site.prefill.count("release") == other.count("release") == 0
    if end == "failed":
        site.decode.fail(first.request_id, 2, "transport", retryable=False)
    elif end != "gone":
        site.decode.generate(second)
    assert under_way.result().status_code == {"failed": 502, "gone": 504}.get(end, 200)
    for prefill in (site.prefill, other):
        assert prefill.wait_for("release").request_id == first.request_id
        kinds = [command.WhichOneof("command") for command in prefill.received]
        assert kinds[-1] == "release"
        assert kinds.count("release") == 1
