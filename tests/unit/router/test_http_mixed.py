"""The mixed pool over HTTP: a prompt that would wait for prefill is computed at decode, and the client can see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tandem.rpc.v1.common_pb2 import CachedPages
from tests.support.router_site import Site, frames, in_background
from tests.support.scripted_worker import ScriptedDecode, ScriptedPrefill

MakeSite = Callable[..., Site]

LONG = "x" * 150
HEADER = "tandem-prompt-computed-by"


@pytest.fixture
def mixed(make_site: MakeSite) -> Site:
    return make_site({"scheduling.mixed_pool": True})


def with_a_busy_prefill_worker(site: Site) -> Any:
    """A long prompt is computed at prefill-0, and does not end."""
    site.prefill.auto = site.decode.auto = False
    under_way = in_background(site, prompt=LONG)
    site.prefill.wait_for("start")
    assert site.decode.wait_for("reserve").max_local_tokens == 0
    site.decode.auto = True
    site.decode.num_missing_tokens = 1  # it computes whatever it may
    return under_way


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_behind_a_long_one_is_computed_at_decode(mixed: Site, stream: bool) -> None:
    with_a_busy_prefill_worker(mixed)
    answer = mixed.post(prompt="x" * 8, max_tokens=5, stream=stream)
    assert answer.status_code == 200
    assert answer.headers[HEADER] == "decode"
    if stream:
        assert "".join(f["choices"][0]["text"] for f in frames(answer) if f["choices"]) == "abcde"
    else:
        assert answer.json()["choices"][0]["text"] == "abcde"
    assert mixed.decode.wait_for("reserve", 2).max_local_tokens >= 8
    assert mixed.prefill.count("start") == 1
    metrics = mixed.metrics()
    assert metrics['tandem_local_prefills_total{reason="mixed_pool"}'] == 1
    assert metrics.get('tandem_local_prefills_total{reason="recovery"}', 0) == 0
    assert metrics["tandem_prompt_tokens_recomputed_total"] == 0
    assert metrics["tandem_second_token_seconds_count"] == 1, "once for each choice of several tokens"
    assert metrics["tandem_itl_seconds_count"] == 4


def test_it_is_off_by_one_key(make_site: MakeSite) -> None:
    site = make_site()
    with_a_busy_prefill_worker(site)
    site.prefill.auto = True
    answer = site.post(prompt="x" * 8, max_tokens=5)
    assert site.decode.wait_for("reserve", 2).max_local_tokens == 0
    assert answer.headers[HEADER] == "prefill"


def test_without_a_queue_every_prompt_is_handed_off(mixed: Site) -> None:
    answer = mixed.post(prompt=LONG, max_tokens=5)
    assert answer.headers[HEADER] == "prefill"
    assert mixed.decode.wait_for("reserve").max_local_tokens == 0
    assert mixed.metrics().get('tandem_local_prefills_total{reason="mixed_pool"}', 0) == 0


def test_what_is_left_of_a_prompt_that_has_begun_is_as_prefill_reports_it(mixed: Site) -> None:
    with_a_busy_prefill_worker(mixed)
    mixed.prefill.started(mixed.prefill.wait_for("start"))  # and its load says that no token waits any more
    mixed.until_metric("tandem_router_waiting_requests", 0)
    in_background(mixed, prompt="x" * 8)
    assert mixed.decode.wait_for("reserve", 2).max_local_tokens == 0


def test_what_decode_was_asked_to_compute_counts_until_it_is_done(mixed: Site) -> None:
    """The second prompt of a burst goes to decode; with that before it, the third waits for prefill."""
    with_a_busy_prefill_worker(mixed)
    mixed.decode.auto = False
    in_background(mixed, prompt="y" * 150)
    assert mixed.decode.wait_for("reserve", 2).max_local_tokens > 0
    in_background(mixed, prompt="z" * 150)
    assert mixed.decode.wait_for("reserve", 3).max_local_tokens == 0
    mixed.prefill.wait_for("start", 2)


def test_a_decode_worker_that_dies_over_a_prompt_is_replaced(mixed: Site) -> None:
    with_a_busy_prefill_worker(mixed)
    mixed.decode.held_back.clear()
    under_way = in_background(mixed, prompt="x" * 8)
    assert mixed.decode.wait_for("reserve", 2).max_local_tokens > 0
    mixed.until_metric('tandem_local_prefills_total{reason="mixed_pool"}', 1)
    other = ScriptedDecode("decode-1")
    other.num_missing_tokens = 1
    mixed.add(other)
    mixed.prefill.auto = True
    mixed.decode.kill()
    assert under_way.result().json()["choices"][0]["text"] == "abcde"
    assert other.wait_for("reserve").max_local_tokens == 0, "a retry is handed off"


def test_an_urgent_request_is_not_given_to_the_slower_way(make_site: MakeSite) -> None:
    site = make_site({"scheduling.mixed_pool": True, "limits.most_urgent_priority": -1})
    with_a_busy_prefill_worker(site)
    in_background(site, prompt="x" * 8, priority=-1)
    assert site.decode.wait_for("reserve", 2).max_local_tokens == 0


def test_a_prompt_longer_than_the_bound_is_handed_off(make_site: MakeSite) -> None:
    site = make_site({"scheduling.mixed_pool": True, "scheduling.mixed_prompt_tokens": 8})
    with_a_busy_prefill_worker(site)
    in_background(site, prompt="x" * 9)
    assert site.decode.wait_for("reserve", 2).max_local_tokens == 0
    in_background(site, prompt="x" * 8)
    assert site.decode.wait_for("reserve", 3).max_local_tokens == 8


def test_choices_of_a_prompt_that_decode_computes(mixed: Site) -> None:
    with_a_busy_prefill_worker(mixed)
    answer = mixed.post(prompt="x" * 8, max_tokens=3, n=2)
    assert [choice["text"] for choice in answer.json()["choices"]] == ["abc", "bcd"]
    assert answer.headers[HEADER] == "decode"


@pytest.mark.long
def test_a_client_that_leaves_is_cancelled_at_decode(mixed: Site) -> None:
    with_a_busy_prefill_worker(mixed)
    mixed.decode.held_back.clear()
    answer = mixed.post(prompt="x" * 8, timeout=0.3)
    assert answer.status_code == 504
    assert mixed.decode.wait_for("cancel").request_id == mixed.decode.wait_for("reserve", 2).request_id


def test_many_prompts_are_counted_in_the_header(mixed: Site) -> None:
    answer = mixed.post(prompt=["x"] * 9, max_tokens=1)
    assert answer.status_code == 200
    named = dict(part.split(" ") for part in answer.headers[HEADER].split(", "))
    assert set(named) <= {"prefill", "decode"}
    assert sum(map(int, named.values())) == 9


def test_decode_whose_targets_leave_no_time_computes_nothing_beside_and_the_router_says_why(mixed: Site) -> None:
    mixed.decode.status.prompt_steps.num_tokens = 0
    mixed.decode.status.num_queued_tokens = 1
    mixed.until_shown("decode-0", num_queued_tokens=1)
    with_a_busy_prefill_worker(mixed)
    mixed.prefill.auto = True
    answer = mixed.post(prompt="x" * 8)
    assert mixed.decode.wait_for("reserve", 2).max_local_tokens == 0
    with mixed.http() as client:
        (shown,) = client.get(f"/v1/requests/{answer.json()['id']}/explain").json()["data"]
    (decode,) = [one for one in shown["attempts"][0]["candidates"] if one["worker"] == "decode-0"]
    assert "targets" in decode["why_not_alone"]
    assert "cost_alone_tokens" not in decode


def test_a_retry_that_is_handed_off_is_no_work_of_decodes(mixed: Site) -> None:
    with_a_busy_prefill_worker(mixed)
    mixed.decode.auto = False  # it grants by hand, and never admits: no later event corrects what the grant left
    other = ScriptedPrefill("prefill-1")
    other.auto = False
    mixed.add(other)
    mixed.prefill.kill()
    retry = mixed.decode.wait_for("reserve", 2)
    assert retry.max_local_tokens >= len(LONG)
    mixed.decode.grant(retry)
    other.wait_for("start")
    in_background(mixed, prompt="x" * 8)
    assert mixed.decode.wait_for("reserve", 3).max_local_tokens == 8


def test_both_workers_hear_for_how_long_a_prompt_gives_way_to_shorter_ones(mixed: Site) -> None:
    """That they will have its own pages does not make it shorter."""
    for worker in (mixed.prefill, mixed.decode):
        worker.emit(cached=CachedPages(is_first=True, came=bytes(8)))
    mixed.until_metric("tandem_known_pages", 1)
    mixed.post(prompt="a" * 60)
    assert mixed.prefill.wait_for("start").slack_s == mixed.decode.wait_for("reserve").slack_s == 0
    mixed.until_metric("tandem_prefill_compute_seconds_count", 1)  # three tokens in 10 ms
    mixed.post(prompt="b" * 60)
    assert mixed.prefill.wait_for("start", 2).slack_s == pytest.approx(16 * 60 / 300)
    assert mixed.decode.wait_for("reserve", 2).slack_s == pytest.approx(16 * 60 / 300)
