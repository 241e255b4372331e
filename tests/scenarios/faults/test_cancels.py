"""Cancelled at any point of its life, a request leaves nothing within a second, on both sides."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.scenarios.client import RawStream, ask
from tests.scenarios.faults import cases
from tests.scenarios.faults.cases import Case
from tests.scenarios.faults.site import ALLOWED, Site, assert_begins_alike, assert_typed_error, story

pytestmark = pytest.mark.alone

FREE_S = 1.0
ENDLESS = {"max_tokens": 1500, "ignore_eos": True}
"""Much longer than the bounds and the deadline allow, and not too long for the reference."""
BIG = {"n": 8, "max_tokens": 1400, "ignore_eos": True, "logprobs": 5}
"""More bytes than the sockets on the way take in."""
HELD_STEP = 200
"""At this step generating is held: however fast it is, no request ends before its deadline."""


def every_point(part: int) -> list[pytest.ParameterSet]:
    """One case for each point; every `part`th in `make test`."""
    points = {case.point: case for case in cases.of("prefill", "decode", "router")}
    return [
        pytest.param(case, id=point, marks=() if number % part == 0 else pytest.mark.faults)
        for number, (point, case) in enumerate(points.items())
    ]


@pytest.mark.parametrize("case", every_point(3))
def test_a_client_that_leaves_frees_everything(ready_site: Site, case: Case) -> None:
    site = ready_site
    site.points.arm_any(case.point, "hold", case.nth)
    client = RawStream(site.cluster.url, story(f"leave at {case.point}"), **ENDLESS)
    held = site.points.wait_hit_by_any(case.point)
    client.close()
    time.sleep(0.1)  # the router hears of it while the point is held, where it is not itself the one that is held
    site.points.go(held, case.point)
    site.check_baseline(ALLOWED * FREE_S)


@pytest.mark.parametrize("case", every_point(6))
def test_a_deadline_ends_a_request_in_time(ready_site: Site, case: Case) -> None:
    """What is held is the worker; the client hears in time all the same."""
    site, timeout_s, prompt = ready_site, 2.0, story(f"deadline at {case.point}")
    site.points.arm_any("decode.step", "hold", HELD_STEP)
    site.points.arm_any(case.point, "hold", case.nth)
    began = time.time()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, site.cluster.url, prompt, streamed=case.streamed, timeout=timeout_s, **ENDLESS)
        site.points.wait_hit_by_any(case.point)
        time.sleep(max(0.0, began + timeout_s + 0.2 - time.time()))
        site.points.clear()
        answer = asked.result()
    assert_typed_error(answer)
    assert answer.error is not None
    assert answer.error["code"] == "deadline"
    took_s = answer.ended - began
    assert took_s < timeout_s + ALLOWED * FREE_S, f"{took_s:.2f} s; {site.stall_note(began)}"
    assert_begins_alike(answer, ask(site.reference_url, prompt, streamed=False, **ENDLESS))
    site.check_baseline(ALLOWED * FREE_S)


def test_a_reader_that_is_too_slow_is_cut_off(ready_site: Site) -> None:
    """It reads nothing: what waits for it is bounded; beyond that its request ends, and with its socket all is free."""
    site = ready_site
    before = site.cluster.metric("tandem_requests_total", outcome="cancelled")
    client = RawStream(site.cluster.url, story("slow reader", 60), receive_bytes=4096, **BIG)
    site.cluster.wait_for(
        lambda: site.cluster.metric("tandem_requests_total", outcome="cancelled") > before, "the cut", 60
    )
    site.cluster.wait_idle(ALLOWED * FREE_S)
    client.close()
    site.check_baseline(ALLOWED * FREE_S)
