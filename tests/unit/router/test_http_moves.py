"""Workers leave in order: what they hold goes on elsewhere, and no client notices. Scripted workers, real HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from router.lifecycle.migration_slots import MAX_AT_ONCE
from tests.support.router_site import Site, cluster, frames, in_background
from tests.support.scripted_worker import ScriptedDecode, ScriptedPrefill
from tests.support.waiting import nothing, wait_until

MakeSite = Callable[..., Site]


def streamed_text(answer: object) -> str:
    return "".join(frame["choices"][0]["text"] for frame in frames(answer))  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.parametrize("said_by", ["supervisor", "worker"])
def test_a_draining_decode_workers_requests_go_on_at_another(site: Site, said_by: str) -> None:
    site.decode.auto = False
    under_way = in_background(site, stream=True)
    reserve = site.decode.wait_for("reserve")
    site.decode.grant(reserve)
    site.decode.wait_for("attach")
    site.decode.admit(reserve)
    for index in (1, 2):
        site.decode.emit(token=site.decode.token(reserve, 0, index))
    site.until_metric("tandem_itl_seconds_count", 2)
    other, idle = ScriptedDecode("decode-1"), ScriptedPrefill("prefill-1")
    site.add(other, idle)
    site.prefill.status.num_running = 9
    site.until_shown("prefill-0", num_running=9)  # by load alone the idle one would be chosen
    if said_by == "supervisor":
        site.drain(site.decode)
    else:
        site.decode.status.draining = True
    answer = under_way.result()
    assert streamed_text(answer) == "abcde"
    assert answer.text.endswith("data: [DONE]\n\n")
    assert site.decode.wait_for("cancel").attempt == 1
    moved = other.wait_for("reserve")
    assert (moved.attempt, moved.max_local_tokens) == (2, 0)
    assert [(j.choice, list(j.token_ids)) for j in moved.journal] == [(0, [97, 98, 99])]
    assert (site.prefill.wait_for("start", 2).attempt, idle.count("start")) == (2, 0), "prefill kept the pages"
    metrics = site.metrics()
    assert metrics['tandem_moves_total{reason="moved"}'] == 1
    assert not [name for name in metrics if name.startswith("tandem_retries_total")]
    assert metrics['tandem_worker_deaths_total{role="decode"}'] == 0
    assert metrics["tandem_retry_budget_retries"] == 256, "a move costs nothing of the budget"
    assert metrics["tandem_recovery_seconds_count"] == 0


def test_where_there_is_no_other_worker_requests_end_where_they_are(site: Site) -> None:
    site.decode.held_back.clear()
    under_way = in_background(site)
    site.decode.wait_for("attach")
    site.until_metric("tandem_handoff_seconds_count", 1)
    site.drain(site.decode)
    site.until_shown("decode-0", state="draining")
    site.pool.remove(site.decode)  # gone from the membership, still ours until its requests have ended
    site.decode.held_back.set()
    assert under_way.result().json()["choices"][0]["text"] == "abcde"
    wait_until(lambda: cluster(site)["decode"], "no decode worker", wanted=nothing)
    assert site.decode.count("cancel") == 0
    site.decode.kill()


@pytest.mark.long
def test_requests_move_as_soon_as_another_worker_is_ready(site: Site) -> None:
    site.decode.held_back.clear()
    under_way = in_background(site)
    site.decode.wait_for("attach")
    site.until_metric("tandem_handoff_seconds_count", 1)
    site.drain(site.decode)
    site.until_shown("decode-0", state="draining")
    time.sleep(0.2)
    assert site.decode.count("cancel") == 0
    site.pool.add(ScriptedDecode("decode-1"))
    assert under_way.result().json()["choices"][0]["text"] == "abcde"
    assert site.decode.wait_for("cancel").attempt == 1


@pytest.mark.long
def test_what_is_on_its_way_to_a_draining_worker_moves_when_it_has_arrived(site: Site) -> None:
    site.prefill.auto = False
    site.decode.held_back.clear()
    under_way = in_background(site)
    start = site.prefill.wait_for("start")
    site.prefill.wait_for("attach")
    site.add(other := ScriptedDecode("decode-1"))
    site.drain(site.decode)
    time.sleep(0.2)
    assert site.decode.count("cancel") == 0
    site.prefill.auto = True
    site.prefill.first_tokens(start)
    assert under_way.result().json()["choices"][0]["text"] == "abcde"
    assert other.wait_for("reserve").attempt == 2


@pytest.mark.long
def test_many_requests_move_a_few_at_a_time(site: Site) -> None:
    num_requests = 2 * MAX_AT_ONCE + 1
    site.decode.held_back.clear()
    under_way = [in_background(site) for _ in range(num_requests)]
    site.decode.wait_for("attach", num_requests)
    site.until_metric("tandem_handoff_seconds_count", num_requests)
    other = ScriptedDecode("decode-1")
    other.auto = False
    site.add(other)
    site.drain(site.decode)
    for number in range(1, num_requests + 1):
        reserve = other.wait_for("reserve", number)
        assert max(site.decode.count("cancel"), other.count("reserve")) <= number - 1 + MAX_AT_ONCE
        if number == 1:
            time.sleep(0.2)
            assert other.count("reserve") == MAX_AT_ONCE
        other.grant(reserve)
        other.wait_for("attach", number)
        other.admit(reserve)
    for number in range(1, num_requests + 1):  # the moves were done when the pages had come
        other.generate(other.wait_for("reserve", number))
    assert [answer.result().json()["choices"][0]["text"] for answer in under_way] == ["abcde"] * num_requests
    assert site.metrics()['tandem_moves_total{reason="moved"}'] == num_requests


def test_a_move_that_fails_gives_its_turn_to_another_request(site: Site) -> None:
    site.pool.num_routers = MAX_AT_ONCE  # so each moves one request at a time
    site.decode.held_back.clear()
    under_way = [in_background(site) for _ in range(2)]
    site.decode.wait_for("attach", 2)
    site.until_metric("tandem_handoff_seconds_count", 2)
    lost, last = ScriptedDecode("decode-1"), ScriptedDecode("decode-2")
    lost.auto = last.auto = False
    site.add(lost)
    site.drain(site.decode)
    lost.wait_for("reserve")
    lost.kill()
    site.until_metric('tandem_workers_lost_total{role="decode"}', 1)
    site.add(last)
    tried, moved = (last.wait_for("reserve", number) for number in (1, 2))
    assert tried.request_id != moved.request_id
    last.generate(tried)
    last.generate(moved)
    assert [answer.result().json()["choices"][0]["text"] for answer in under_way] == ["abcde"] * 2


def test_prompts_that_a_draining_prefill_worker_refuses_go_elsewhere(make_site: MakeSite) -> None:
    site = make_site({"limits.max_attempts": 1})
    site.prefill.auto = False
    under_way = in_background(site)
    start = site.prefill.wait_for("start")
    site.add(other := ScriptedPrefill("prefill-1"), ScriptedDecode("decode-1"))
    site.prefill.fail(start.request_id, 1, "draining", retryable=True)  # its status says so a little later
    assert under_way.result().json()["choices"][0]["text"] == "abcde"
    assert other.wait_for("start").attempt == 2
    assert site.decode.count("reserve") == 2, "the decode worker is kept"
    metrics = site.metrics()
    assert metrics['tandem_moves_total{reason="refused"}'] == 1
    assert metrics["tandem_retry_budget_retries"] == 256


def test_a_worker_that_leaves_before_its_requests_have_ended_has_not_died(site: Site) -> None:
    site.decode.auto = False
    under_way = in_background(site)
    site.decode.wait_for("reserve")
    site.add(other := ScriptedDecode("decode-1"))
    site.drain(site.decode)
    site.until_shown("decode-0", state="draining")
    site.decode.kill()
    assert under_way.result().json()["choices"][0]["text"] == "abcde"
    assert other.count("reserve") == 1
    metrics = site.metrics()
    assert metrics['tandem_moves_total{reason="left"}'] == 1
    assert metrics['tandem_worker_deaths_total{role="decode"}'] == 0


def test_two_choices_move_and_the_ended_one_stays_ended(site: Site) -> None:
    """Choice 0 ends by a stop string before the move; choice 1 goes on behind it."""
    site.prefill.script = site.decode.script = lambda prompt, choice, index: (120 if choice == 0 else 97) + index
    site.decode.auto = False
    under_way = in_background(site, n=2, stop=["y"], max_tokens=4)
    reserve = site.decode.wait_for("reserve")
    site.decode.grant(reserve)
    site.decode.wait_for("attach")
    site.decode.admit(reserve)
    site.decode.emit_all([site.decode._event(token=site.decode.token(reserve, choice, 1)) for choice in (0, 1)])
    site.until_metric("tandem_itl_seconds_count", 2)
    site.add(other := ScriptedDecode("decode-1"))
    other.script = site.decode.script
    site.drain(site.decode)
    choices = under_way.result().json()["choices"]
    assert [(c["text"], c["finish_reason"]) for c in choices] == [("x", "stop"), ("abcd", "length")]
    assert [(j.choice, j.finished) for j in other.wait_for("reserve").journal] == [(0, True), (1, False)]
