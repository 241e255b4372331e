"""A request goes on after a fault: scripted workers, real HTTP and gRPC. Who retries where, and what a client sees."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.router_site import Site, frames, in_background
from tests.support.scripted_worker import ScriptedDecode, ScriptedPrefill

MakeSite = Callable[..., Site]


def test_a_lost_decode_worker_is_replaced_and_the_text_goes_on(site: Site) -> None:
    site.decode.script = lambda prompt, choice, index: 97 + index
    site.decode.held_back.clear()
    under_way = in_background(site, stream=True)
    reserve = site.decode.wait_for("reserve")
    began_s = time.monotonic()
    site.decode.wait_for("attach")
    for index in (1, 2):
        site.decode.emit(token=site.decode.token(reserve, 0, index))
    other = ScriptedDecode("decode-1")
    site.add(other)
    site.until_metric("tandem_itl_seconds_count", 2)
    least_s = time.monotonic() - began_s
    site.decode.kill()
    answer = under_way.result()
    assert "".join(f["choices"][0]["text"] for f in frames(answer)) == "abcde"
    again, second = other.wait_for("reserve"), site.prefill.wait_for("start", 2)
    for command in (again, second):
        assert command.attempt == 2
        assert command.sampling.seed == reserve.sampling.seed
        assert [(j.choice, list(j.token_ids)) for j in command.journal] == [(0, [97, 98, 99])]
        assert command.age_s > reserve.age_s + least_s, "it does not begin to wait anew"
    metrics = site.metrics()
    assert metrics['tandem_retries_total{reason="worker_lost"}'] == 1
    assert metrics['tandem_workers_lost_total{role="decode"}'] == 1


@pytest.fixture
def halted(site: Site) -> tuple[Site, Any]:
    """A request whose prompt prefill-0 computes, never to end; decode-0 has the reservation, decode-1 is idle."""
    site.prefill.auto = site.decode.auto = False
    under_way = in_background(site)
    site.prefill.started(site.prefill.wait_for("start"))
    site.decode.wait_for("reserve")
    site.decode.auto = True
    site.add(ScriptedDecode("decode-1"))
    return site, under_way


def test_after_prefill_is_lost_decode_computes_the_rest_where_that_is_short(halted: tuple[Site, Any]) -> None:
    site, under_way = halted
    site.decode.num_missing_tokens = 512
    site.prefill.kill()
    answer = under_way.result().json()
    assert answer["choices"][0]["text"] == "abcde"
    again = site.decode.wait_for("reserve", 2)
    assert (again.attempt, again.max_local_tokens) == (2, 512)
    assert site.decode.wait_for("cancel").attempt == 1
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 1, "what the first attempt found"
    metrics = site.metrics()
    assert metrics['tandem_local_prefills_total{reason="recovery"}'] == 1
    assert metrics["tandem_prompt_tokens_recomputed_total"] == 512
    assert metrics["tandem_recovery_seconds_count"] == 1
    assert metrics['tandem_worker_deaths_total{role="prefill"}'] == 1
    phases = [value for name, value in metrics.items() if name.startswith("tandem_request_phase_seconds_sum")]
    assert sum(phases) == pytest.approx(metrics["tandem_request_seconds_sum"])


def test_after_prefill_is_lost_another_fills_what_the_same_decode_worker_grants(halted: tuple[Site, Any]) -> None:
    site, under_way = halted
    site.decode.auto = False
    other = ScriptedPrefill("prefill-1")
    site.add(other)
    site.prefill.kill()
    again = site.decode.wait_for("reserve", 2)
    assert (again.attempt, again.max_local_tokens) == (2, 512)
    assert other.count("start") == 0, "not before decode has said that it needs one"
    site.decode.auto = True
    site.decode.answer(site.decode.received[-1])
    assert under_way.result().json()["choices"][0]["text"] == "abcde"
    assert other.wait_for("start").attempt == other.wait_for("attach").attempt == 2
    assert other.wait_for("start").decode == site.decode.info
    assert site.metrics()["tandem_prompt_tokens_recomputed_total"] == 3


def test_after_prefill_is_lost_a_decode_worker_that_leaves_is_not_asked(halted: tuple[Site, Any]) -> None:
    """Another pair takes the whole request over, and its decode worker may not compute what its prefill worker does."""
    site, under_way = halted
    pair = ScriptedPrefill("prefill-1"), ScriptedDecode("decode-2")
    site.add(*pair)
    site.drain(site.decode)
    site.until_shown("decode-0", state="draining")
    site.prefill.kill()
    assert under_way.result().json()["choices"][0]["text"] == "abcde"
    others = [w for w in site.pool.workers if isinstance(w, ScriptedDecode) and w is not site.decode]
    (reserve,) = [c.reserve for d in others for c in d.received if c.WhichOneof("command") == "reserve"]
    assert (reserve.attempt, reserve.max_local_tokens) == (2, 0)
    assert site.decode.count("reserve") == 1


def test_a_grant_that_nobody_can_fill_goes_back_and_the_request_waits(halted: tuple[Site, Any]) -> None:
    site, under_way = halted
    site.prefill.kill()
    assert site.decode.wait_for("cancel", 2).attempt == 2
    other = ScriptedPrefill("prefill-1")
    site.add(other)
    assert under_way.result().json()["choices"][0]["text"] == "abcde"
    third = site.decode.wait_for("reserve", 3)
    assert (third.attempt, third.max_local_tokens) == (3, 0)
    assert other.wait_for("start").attempt == 3


def test_prefills_exit_as_decode_sees_it_is_its_death(halted: tuple[Site, Any]) -> None:
    """Decode is on prefill's host; the router's own stream to prefill has not broken yet."""
    site, under_way = halted
    site.decode.num_missing_tokens = 100
    site.decode.fail(site.decode.wait_for("reserve").request_id, 1, "handoff", retryable=True, reason="writer_exited")
    assert under_way.result().json()["choices"][0]["text"] == "abcde"
    assert site.decode.wait_for("reserve", 2).max_local_tokens == 512
    assert site.metrics()['tandem_retries_total{reason="worker_lost"}'] == 1


@pytest.mark.long
def test_after_decode_is_lost_the_same_prefill_worker_hands_off_anew(site: Site) -> None:
    """It kept the pages. Another one is idle, and would be chosen otherwise."""
    site.decode.held_back.clear()
    under_way = in_background(site)
    site.decode.wait_for("attach")
    site.until_metric("tandem_handoff_seconds_count", 1)
    other, idle = ScriptedDecode("decode-1"), ScriptedPrefill("prefill-1")
    site.add(other, idle)
    site.prefill.status.num_running = 9
    site.prefill.num_computed_tokens = 0
    site.until_shown("prefill-0", num_running=9)
    site.decode.kill()
    answer = under_way.result().json()
    assert answer["choices"][0]["text"] == "abcde"
    assert (site.prefill.count("start"), idle.count("start")) == (2, 0)
    assert site.metrics()["tandem_prompt_tokens_recomputed_total"] == 0
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 1


@pytest.mark.long
def test_a_router_that_stood_still_does_not_take_its_workers_for_silent(site: Site) -> None:
    site.decode.token_gap_s = 0.6
    under_way = in_background(site)
    site.decode.wait_for("attach")
    site.server._loop.call_soon_threadsafe(time.sleep, 1.5)  # the lease is 1 s
    assert under_way.result().json()["choices"][0]["text"] == "abcde"
    assert site.metrics()["tandem_request_seconds_count"] == 1
    lost = {name: number for name, number in site.metrics().items() if name.startswith("tandem_workers_lost_total")}
    assert lost
    assert not any(lost.values())


def test_the_next_life_of_a_worker_says_that_the_last_one_has_ended(site: Site) -> None:
    """The supervisor has seen it exit; the stream to its vanished host would hang until the lease is over."""
    site.decode.held_back.clear()
    under_way = in_background(site)
    site.decode.wait_for("attach")
    heir = ScriptedDecode("decode-0", incarnation="2")
    site.pool.workers.remove(site.decode)
    began_s = time.monotonic()
    site.pool.add(heir)
    assert under_way.result().json()["choices"][0]["text"] == "abcde"
    assert time.monotonic() - began_s < 0.8
    assert site.metrics()['tandem_worker_deaths_total{role="decode"}'] == 1
    site.decode.kill()


def test_a_prefill_worker_lost_after_admission_is_not_missed(site: Site) -> None:
    site.decode.held_back.clear()
    under_way = in_background(site)
    site.decode.wait_for("attach")
    site.until_metric("tandem_handoff_seconds_count", 1)
    site.prefill.kill()
    site.until_metric('tandem_workers_lost_total{role="prefill"}', 1)
    site.decode.held_back.set()
    assert under_way.result().json()["choices"][0]["text"] == "abcde"
    assert site.decode.count("reserve") == 1


def test_a_prefill_worker_lost_between_admission_and_acknowledgement_is_not_missed(site: Site) -> None:
    site.prefill.auto = False
    site.decode.held_back.clear()
    under_way = in_background(site)
    site.prefill.first_tokens(site.prefill.wait_for("start"))
    site.decode.wait_for("attach")
    site.until_metric("tandem_ttft_seconds_count", 1)
    site.prefill.kill()
    site.until_metric('tandem_workers_lost_total{role="prefill"}', 1)
    site.decode.held_back.set()
    assert under_way.result().json()["choices"][0]["text"] == "abcde"
    assert site.decode.count("reserve") == 1


@pytest.mark.long
@pytest.mark.parametrize("verdict", ["admitted", "refused", "none"])
def test_a_prefill_worker_lost_after_its_commit_but_before_decodes_word_is_not_missed(site: Site, verdict: str) -> None:
    """Its end and decode's admission come on two streams, in any order."""
    site.prefill.auto = site.decode.auto = False
    under_way = in_background(site)
    start, reserve = site.prefill.wait_for("start"), site.decode.wait_for("reserve")
    site.prefill.first_tokens(start)
    site.decode.grant(reserve)
    site.decode.wait_for("attach")
    site.until_metric("tandem_ttft_seconds_count", 1)
    site.prefill.kill()
    site.until_metric('tandem_workers_lost_total{role="prefill"}', 1)
    lost_s = time.monotonic()
    site.decode.auto, site.decode.num_missing_tokens = True, 5
    if verdict == "admitted":
        site.decode.generate(reserve)
    elif verdict == "refused":
        site.decode.fail(reserve.request_id, 1, "handoff", retryable=True, reason="writer_exited")
    assert under_way.result().json()["choices"][0]["text"] == "abcde"
    assert time.monotonic() - lost_s < 3
    assert site.decode.count("reserve") == (1 if verdict == "admitted" else 2)
    assert site.metrics().get('tandem_local_prefills_total{reason="recovery"}', 0) == (verdict != "admitted")


@pytest.mark.long
def test_a_silent_worker_is_taken_for_lost_after_the_lease(site: Site) -> None:
    site.decode.held_back.clear()
    under_way = in_background(site)
    site.decode.wait_for("attach")
    other = ScriptedDecode("decode-1")
    site.add(other)
    began_s = time.monotonic()
    site.decode.go_silent()
    assert under_way.result().json()["choices"][0]["text"] == "abcde"
    assert 0.7 < time.monotonic() - began_s < 2.5  # the lease is 1 s
    assert other.count("reserve") == 1


@pytest.mark.long
def test_a_refused_handoff_is_tried_again(site: Site) -> None:
    site.decode.auto = False
    under_way = in_background(site)
    first = site.decode.wait_for("reserve")
    site.decode.status.refused["digest_mismatch"] = 1  # it says so itself; both workers tell of the failed attempt
    site.decode.fail(first.request_id, 1, "handoff", retryable=True, reason="digest_mismatch")
    site.prefill.fail(first.request_id, 1, "handoff", retryable=True, reason="digest_mismatch")
    site.decode.auto = True
    second = site.decode.wait_for("reserve", 2)
    site.decode.answer(site.decode.received[-1])
    assert second.attempt == 2
    assert under_way.result().json()["choices"][0]["text"] == "abcde"
    refused = 'tandem_handoffs_refused_total{reason="digest_mismatch"}'
    site.until_metric(refused, 1)  # counted where it was refused
    metrics = site.metrics()
    assert metrics[refused] == 1
    assert metrics['tandem_retries_total{reason="handoff"}'] == 1


def test_a_retry_avoids_the_worker_that_failed(site: Site) -> None:
    site.decode.auto = False
    under_way = in_background(site)
    first = site.decode.wait_for("reserve")
    other = ScriptedDecode("decode-1")
    site.add(other)
    site.decode.fail(first.request_id, 1, "handoff", retryable=True, reason="timeout")
    assert under_way.result().json()["choices"][0]["text"] == "abcde"
    assert (other.count("reserve"), site.decode.count("reserve")) == (1, 1)


def test_after_the_last_attempt_the_error_is_the_clients(site: Site) -> None:
    site.decode.auto = False
    under_way = in_background(site)
    for attempt in (1, 2, 3):
        reserve = site.decode.wait_for("reserve", attempt)
        assert reserve.attempt == attempt
        site.decode.fail(reserve.request_id, attempt, "transport", retryable=True)
    answer = under_way.result()
    assert answer.status_code == 502
    assert answer.json()["error"]["code"] == "transport"
    assert site.prefill.wait_for("cancel", 3).attempt == 3
    assert site.decode.count("reserve") == 3


def test_an_error_that_no_retry_mends_is_the_clients_at_once(site: Site) -> None:
    site.prefill.auto = False
    under_way = in_background(site)
    start = site.prefill.wait_for("start")
    site.prefill.fail(start.request_id, 1, "invalid_request", retryable=False)
    answer = under_way.result()
    assert answer.status_code == 400
    assert site.decode.wait_for("cancel").attempt == 1
    site.until_metric('tandem_requests_total{outcome="invalid"}', 1)


def test_a_worker_that_comes_back_within_the_lease_serves_the_retry(site: Site) -> None:
    site.decode.held_back.clear()
    under_way = in_background(site)
    site.decode.wait_for("attach")
    site.decode.kill()
    heir = ScriptedDecode("decode-0", incarnation="2")
    site.pool.workers.remove(site.decode)
    site.pool.add(heir)
    assert under_way.result().json()["choices"][0]["text"] == "abcde"
    assert heir.wait_for("reserve").attempt == 2


@pytest.mark.long
def test_no_worker_for_as_long_as_a_request_waits_is_an_error_frame(make_site: MakeSite) -> None:
    site = make_site({"limits.wait_for_worker_s": 1.0})
    site.decode.held_back.clear()
    under_way = in_background(site, stream=True)
    site.decode.wait_for("attach")
    site.until_metric("tandem_ttft_seconds_count", 1)
    site.decode.kill()
    answer = under_way.result()
    assert frames(answer)[0]["choices"][0]["text"] == "a"
    assert frames(answer)[-1]["error"]["code"] == "no_worker"
    assert "[DONE]" not in answer.text


@pytest.mark.parametrize("n", [1, 2])
def test_decode_is_told_once_of_a_choice_that_has_come_to_a_stop_string(site: Site, n: int) -> None:
    """While another one goes on: with the last one the attempt is cancelled, unless decode has ended each by itself."""
    site.prefill.script = site.decode.script = lambda prompt, choice, index: (120 if choice == 0 else 97) + index
    answer = in_background(site, n=n, stop=["z"], max_tokens=9).result().json()
    assert [c["finish_reason"] for c in answer["choices"]] == ["stop", "length"][:n]
    site.decode.wait_for("cancel" if n == 1 else "end_choice")
    told = [c.end_choice.choice for c in site.decode.received if c.WhichOneof("command") == "end_choice"]
    assert told == [0] * (n - 1)


def test_a_retry_tells_the_workers_which_choices_have_ended(site: Site) -> None:
    """Choice 0 ends by a stop string, which no worker can know, before choice 1's worker is lost."""
    site.prefill.script = site.decode.script = lambda prompt, choice, index: (120 if choice == 0 else 97) + index
    site.decode.auto = False
    under_way = in_background(site, n=2, stop=["y"], max_tokens=4)
    reserve = site.decode.wait_for("reserve")
    site.decode.grant(reserve)
    site.decode.admit(reserve)
    site.decode.emit_all([site.decode._event(token=site.decode.token(reserve, choice, 1)) for choice in (0, 1)])
    site.until_metric("tandem_itl_seconds_count", 2)
    end = site.decode.wait_for("end_choice")
    assert (end.request_id, end.attempt, end.choice) == (reserve.request_id, 1, 0), "decode need not go on with it"
    site.decode.auto = True
    site.decode.fail(reserve.request_id, 1, "internal", retryable=True)
    again = site.decode.wait_for("reserve", 2)
    assert [(j.choice, list(j.token_ids), j.finished) for j in again.journal] == [
        (0, [120, 121], True),
        (1, [97, 98], False),
    ]
    choices = under_way.result().json()["choices"]
    assert [(c["text"], c["finish_reason"]) for c in choices] == [("x", "stop"), ("abcd", "length")]


@pytest.mark.parametrize(("code", "may_be_wrong"), [("internal", True), ("handoff", False)])
def test_decode_keeps_nothing_of_what_prefill_may_have_computed_wrongly(
    site: Site, code: str, may_be_wrong: bool
) -> None:
    site.prefill.auto = False
    under_way = in_background(site)
    start = site.prefill.wait_for("start")
    site.prefill.auto = True
    site.prefill.fail(start.request_id, 1, code, retryable=True)
    assert site.decode.wait_for("cancel").discards is may_be_wrong
    assert under_way.result().status_code == 200


def test_a_stream_that_cannot_be_read_is_a_lost_worker(site: Site) -> None:
    site.decode.held_back.clear()
    under_way = in_background(site)
    reserve = site.decode.wait_for("reserve")
    site.decode.wait_for("attach")
    broken = site.decode.token(reserve, 0, 1)
    broken.finish_reason = 77  # of a newer version
    site.decode.held_back.set()
    site.decode.emit(token=broken)
    assert under_way.result().json()["choices"][0]["text"] == "abcde"
    assert site.metrics()['tandem_workers_lost_total{role="decode"}'] == 1


def test_a_failure_between_two_workers_makes_the_retry_avoid_both(site: Site) -> None:
    """Prefill says that it cannot reach decode-0, which looks idle and would be chosen again and again."""
    site.prefill.auto = site.decode.auto = False
    under_way = in_background(site)
    start = site.prefill.wait_for("start")
    other = ScriptedDecode("decode-1")
    site.add(other)
    site.prefill.auto = True
    site.prefill.fail(start.request_id, start.attempt, "handoff", retryable=True, reason="write_failed")
    assert under_way.result().status_code == 200
    assert other.count("reserve") == 1
    assert site.decode.count("reserve") == 1
    other.kill()


@pytest.mark.long
def test_nothing_new_goes_to_a_worker_that_is_late_with_its_status_before_its_lease_is_over(
    make_site: MakeSite,
) -> None:
    lease_s = 10.0
    site = make_site({"transport.lease_s": lease_s})
    other = ScriptedDecode("decode-1")
    site.add(other)
    began_s = time.monotonic()
    site.decode.go_silent()
    site.until_shown("decode-0", state="silent")
    assert time.monotonic() - began_s < 0.8 * lease_s
    answers = [in_background(site) for _ in range(4)]
    assert [answer.result().json()["choices"][0]["text"] for answer in answers] == ["abcde"] * 4
    assert other.count("reserve") == 4
    assert time.monotonic() - began_s < 0.9 * lease_s  # they did not wait for the lease


@pytest.mark.long
def test_a_worker_that_is_heard_again_in_time_gets_requests_as_before(make_site: MakeSite) -> None:
    site = make_site({"transport.lease_s": 10.0})
    site.decode.go_silent()
    site.until_shown("decode-0", state="silent")
    waiting = in_background(site)  # there is no other: it waits for what the membership promises
    site.decode.speak_again()
    assert waiting.result().json()["choices"][0]["text"] == "abcde"
    assert site.metrics().get('tandem_workers_lost_total{role="decode"}', 0) == 0
