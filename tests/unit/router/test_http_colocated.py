"""A cluster without prefill workers over HTTP: the same API, with scripted decode workers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.pooling_models import write_modules
from tests.support.router_site import Site, cluster, frames, in_background, opened_site
from tests.support.scripted_worker import ScriptedDecode
from tests.support.waiting import wait_until

MakeSite = Callable[..., Site]

HEADER = "tandem-prompt-computed-by"


def colocate(site: Site) -> Site:
    """Only decode workers join, which compute whatever they may."""
    site.pool.colocated = True
    site.decode.num_missing_tokens = 1
    site.pool.add(site.decode)
    site.wait_ready()
    return site


@pytest.fixture
def colocated(make_site: MakeSite) -> Site:
    return colocate(make_site(with_workers=False))


@pytest.mark.long
def test_it_is_healthy_with_a_decode_worker_alone(make_site: MakeSite) -> None:
    site = make_site(with_workers=False)
    site.pool.colocated = True
    site.pool.push()
    site.wait_ready(503)
    assert site.post(prompt="x").status_code == 503
    colocate(site)
    site.drain(site.decode)
    site.wait_ready(503)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_computed_where_it_is_decoded(colocated: Site, stream: bool) -> None:
    """Though the mixed pool is off here, and nothing is known of how fast anything is."""
    answer = colocated.post(prompt="x" * 200, max_tokens=5, stream=stream)
    assert answer.status_code == 200
    assert answer.headers[HEADER] == "decode"
    if stream:
        assert "".join(f["choices"][0]["text"] for f in frames(answer) if f["choices"]) == "abcde"
    else:
        assert answer.json()["choices"][0]["text"] == "abcde"
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
    reserve = colocated.decode.wait_for("reserve")
    assert (reserve.max_local_tokens, reserve.unpaced) == (200, True)
    metrics = colocated.metrics()
    assert metrics["tandem_colocated"] == 1
    assert metrics['tandem_local_prefills_total{reason="colocated"}'] == 1
    assert metrics['tandem_request_phase_seconds_count{phase="handoff"}'] == 1
    assert metrics['tandem_request_phase_seconds_sum{phase="handoff"}'] == 0


def test_choices_scores_and_why(colocated: Site) -> None:
    answer = colocated.post(prompt="xyz", max_tokens=3, n=2, prompt_logprobs=1, logprobs=1)
    body = answer.json()
    assert [choice["text"] for choice in body["choices"]] == ["abc", "bcd"]
    assert len(body["choices"][0]["prompt_logprobs"]) == 3
    with colocated.http() as client:
        (shown,) = client.get(f"/v1/requests/{body['id']}/explain").json()["data"]
    (attempt,) = shown["attempts"]
    assert (attempt["prefill"], attempt["decode"], attempt["why"]) == (None, "decode-0", "colocated")
    assert [candidate["worker"] for candidate in attempt["candidates"]] == ["decode-0"]


def test_the_speed_of_prompts_is_learnt_from_decode(colocated: Site) -> None:
    """By it a prompt gives way to shorter ones: for sixteen times its own computation."""
    colocated.post(prompt="a" * 60)
    assert colocated.decode.wait_for("reserve").slack_s == 0, "nothing is known yet"
    colocated.decode.status.chunk_tokens += 600
    colocated.decode.status.chunk_s += 2.0
    colocated.decode.status.num_queued_tokens = 1
    colocated.until_shown("decode-0", num_queued_tokens=1)
    colocated.post(prompt="b" * 60)
    assert colocated.decode.wait_for("reserve", 2).slack_s == pytest.approx(16 * 60 / 300)


def test_a_decode_worker_that_dies_over_a_prompt_is_replaced_by_another(colocated: Site) -> None:
    colocated.decode.held_back.clear()
    under_way = in_background(colocated, prompt="x" * 200)
    colocated.decode.wait_for("reserve")
    other = ScriptedDecode("decode-1")
    other.num_missing_tokens = 1
    colocated.add(other)
    colocated.kill(colocated.decode)
    assert under_way.result().json()["choices"][0]["text"] == "abcde"
    again = other.wait_for("reserve")
    assert (again.attempt, again.max_local_tokens, again.unpaced) == (2, 200, True)


def test_one_that_dies_while_it_generates_costs_no_token(colocated: Site) -> None:
    colocated.decode.auto = False
    under_way = in_background(colocated, stream=True)
    reserve = colocated.decode.wait_for("reserve")
    for index in (0, 1):
        colocated.decode.emit(token=colocated.decode.token(reserve, 0, index))
    colocated.until_metric("tandem_itl_seconds_count", 1)
    other = ScriptedDecode("decode-1")
    other.num_missing_tokens = 1
    colocated.add(other)
    colocated.kill(colocated.decode)
    text = "".join(f["choices"][0]["text"] for f in frames(under_way.result()) if f["choices"])
    assert text == "abcde"
    assert [(j.choice, list(j.token_ids)) for j in other.wait_for("reserve").journal] == [(0, [97, 98])]


@pytest.mark.long
def test_without_another_worker_it_ends_with_a_typed_error(make_site: MakeSite) -> None:
    site = colocate(make_site({"limits.wait_for_worker_s": 0.5}, with_workers=False))
    site.decode.held_back.clear()
    under_way = in_background(site)
    site.decode.wait_for("reserve")
    site.kill(site.decode)
    error = under_way.result().json()["error"]
    assert (error["code"], error["retryable"]) == ("no_worker", True)
    assert "no decode worker is ready" in error["message"]


def test_a_split_cluster_becomes_colocated_and_split_again(site: Site) -> None:
    """The last prefill worker drains for as long as it computes; what comes meanwhile does not wait for it."""
    site.decode.num_missing_tokens = 1
    assert site.post(prompt="x").headers[HEADER] == "prefill"
    site.pool.colocated = True
    site.drain(site.prefill)
    site.until_shown("prefill-0", state="draining")
    assert cluster(site)["colocated"]
    assert site.post(prompt="x").headers[HEADER] == "decode"
    site.pool.colocated = False
    site.pool.states["prefill-0"] = "ready"
    site.pool.push()
    site.until_shown("prefill-0", state="ready")
    assert not cluster(site)["colocated"]
    assert site.post(prompt="x").headers[HEADER] == "prefill"


def test_pages_that_were_granted_for_a_prefill_worker_that_left_are_given_back(site: Site) -> None:
    """The prompt is then computed where they were granted."""
    site.prefill.auto = site.decode.auto = False
    under_way = in_background(site)
    reserve = site.decode.wait_for("reserve")
    site.prefill.wait_for("start")
    site.decode.num_missing_tokens = 1
    site.decode.auto = True
    site.pool.colocated = True
    site.pool.remove(site.prefill)
    site.prefill.kill()
    assert under_way.result().json()["choices"][0]["text"] == "abcde"
    again = site.decode.wait_for("reserve", 2)
    assert (again.attempt, again.unpaced) == (reserve.attempt + 1, True)


@pytest.mark.long
def test_vectors_are_refused_with_what_to_do(checkpoint: Path, tmp_path: Path) -> None:
    directory = tmp_path / "embedder"
    shutil.copytree(checkpoint, directory)
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "hidden_size": 2}))
    write_modules(directory, "last")
    with opened_site(directory, with_workers=False) as site:
        site.pool.colocated = True
        site.pool.add(site.decode)
        site.until_shown("decode-0", state="ready")
        answer: dict[str, Any] = site.post("/v1/embeddings", input="ab").json()["error"]
        assert (answer["code"], answer["retryable"]) == ("no_worker", False)
        assert "tandem scale --prefill 1" in answer["message"]


def test_a_burst_beyond_the_queue_bound_is_refused(make_site: MakeSite) -> None:
    """What decode computes waits, and counts, as what prefill does."""
    site = colocate(make_site({"scheduling.max_queued_requests": 4}, with_workers=False))
    site.decode.auto = False
    waiting = []
    for number in range(1, 5):  # one after the other: whose turn is before that of one that is placed is placed, too
        waiting.append(in_background(site, timeout=5))
        site.until_metric("tandem_router_waiting_requests", number)
    refused = site.post(prompt="x")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
    assert int(refused.headers["retry-after"]) >= 1
    assert site.decode.count("reserve") == 2, "no more is placed ahead than keeps the worker busy"
    site.decode.auto = True
    for number in (1, 2):
        site.decode.compute_locally(site.decode.wait_for("reserve", number))
    wait_until(lambda: all(each.done() for each in waiting), "their ends", 10)
    assert [each.result().status_code for each in waiting] == [200] * 4
