"""Faults under `tandem serve`: the supervisor's points, and that it brings back what a fault has ended.

What an undisturbed cluster answers is asked afterwards, so that the struck request finds nothing in a cache. In
`make test` a supervisor is struck in tests/cluster/test_serve_struck.py, and a `serve` is killed in test_stop.py there.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import psutil
import pytest

from tests.scenarios.client import Answer, ask, complete
from tests.scenarios.faults import cases
from tests.scenarios.faults.cases import Case, matrix
from tests.scenarios.faults.ray_site import RaySite, ray_site
from tests.scenarios.faults.report import record
from tests.scenarios.faults.site import (
    ALLOWED,
    GRACE_S,
    LEASE_S,
    MAX_TOKENS,
    NOTICE_S,
    Outcome,
    assert_begins_alike,
    assert_same,
    story,
)

pytestmark = [pytest.mark.alone, pytest.mark.faults, pytest.mark.timeout(240)]

HEARTBEAT_S = LEASE_S / 5
"""By which the supervisor hears whom the router suspects."""

RESTART_S = 10.0
"""A router is back after so long, its own start included: it loads no model."""


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RaySite]:
    with ray_site(tmp_path_factory.mktemp("ray")) as found:
        yield found


@matrix(cases.of("supervisor"))
def test_requests_go_on_without_a_supervisor(serving: RaySite, case: Case, request: pytest.FixtureRequest) -> None:
    """The worker that decodes is killed, and the supervisor is struck while it deals with that."""
    cluster = serving.prepare()
    census = serving.census()
    supervisor = psutil.Process(serving.pid(cluster, "supervisor"))
    serving.points.arm("supervisor", case.point, case.signal)
    with asked_and_held(serving, case, "decode.step") as (asked, decoder):
        killed_at = time.time()
        psutil.Process(serving.pid(cluster, decoder)).kill()
        struck_at = serving.points.wait_hit("supervisor", case.point)
        if case.signal == "stop":
            time.sleep(max(0.0, struck_at + LEASE_S + 0.2 - time.time()))
            with contextlib.suppress(psutil.NoSuchProcess):  # killed as one that hangs
                supervisor.resume()
        outcome = Outcome(asked.result(), decoder, killed_at)
    record(request, case, recovery_s=outcome.recovery_s, saw="same tokens")
    after = serving.settled()
    if case.signal == "kill":
        assert after["pid"] != supervisor.pid
    assert_same(outcome.answer, undisturbed(serving, case))
    assert_bounded(outcome, NOTICE_S)
    serving.check_baseline(after, census)


@pytest.mark.parametrize("point", ["prefill.chunk", "prefill.written", "decode.granted", "decode.admitted"])
def test_a_killed_worker_is_replaced_and_the_request_goes_on(serving: RaySite, point: str) -> None:
    case = Case(cases.role_of(point), point, "kill", True, "seeded", "n2")
    cluster = serving.prepare()
    census = serving.census()
    with asked_and_held(serving, case, point) as (asked, worker):
        killed_at = time.time()
        psutil.Process(serving.pid(cluster, worker)).kill()
        outcome = Outcome(asked.result(), worker, killed_at)
    after = serving.until_replaced(cluster, worker)
    assert_same(outcome.answer, undisturbed(serving, case))
    assert_bounded(outcome, NOTICE_S)
    serving.check_baseline(after, census)


@pytest.mark.parametrize("signal", cases.SIGNALS)
def test_a_router_that_is_gone_or_hangs_is_replaced_at_its_url(serving: RaySite, signal: cases.Signal) -> None:
    """Nobody wakes a stopped one: the supervisor kills it."""
    case = Case("router", "router.token", signal, True, "greedy", "one")
    cluster = serving.prepare()
    census = serving.census()
    router = psutil.Process(serving.pid(cluster, "router"))
    serving.points.arm("router-0", case.point, signal, case.nth)
    began = time.time()
    answer = ask(serving.url, story(str(case)), streamed=True, max_tokens=MAX_TOKENS, **case.fields)
    assert answer.broken
    assert not answer.done
    router.wait(ALLOWED * (LEASE_S + NOTICE_S))
    after = serving.until_replaced(cluster, "router")
    assert time.time() - began < ALLOWED * RESTART_S
    assert_begins_alike(answer, undisturbed(serving, case))
    serving.check_baseline(after, census)


def test_a_writer_that_answers_only_the_supervisor_is_killed(serving: RaySite) -> None:
    """Its transfers hang. That it is silent decode tells the router, and the router the supervisor."""
    cluster = serving.prepare()
    census = serving.census()
    serving.points.arm_any("prefill.sending", "hold")
    prompt = story("held writer")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, serving.url, prompt, streamed=True, max_tokens=MAX_TOKENS, timeout=NOTICE_S)
        held = serving.points.wait_hit_by_any("prefill.sending")
        writer = psutil.Process(serving.pid(cluster, held))
        answer = asked.result()
    assert answer.error is not None
    assert answer.error["code"] == "deadline"
    writer.wait(ALLOWED * (NOTICE_S + LEASE_S + GRACE_S + HEARTBEAT_S))
    after = serving.until_replaced(cluster, held)
    (end,) = [w["last_error"]["message"] for w in after["workers"] if w["member"]["worker_id"] == held]
    assert "it is silent beyond its lease" in end
    serving.check_baseline(after, census)


def test_a_kill_of_serve_takes_everything_with_it(serving: RaySite) -> None:
    """The last test: it ends the cluster."""
    serving.prepare()
    serve, family = serving.serve, serving.serve.processes()
    ours = [p for p in family if "Actor" in " ".join(p.cmdline())]
    assert len(ours) == 6  # supervisor, router and four workers
    serve.process.kill()
    _, alive = psutil.wait_procs(family, timeout=10)  # Ray's own agents too, which would try for long to report it
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
    assert serve.processes() == []


@contextlib.contextmanager
def asked_and_held(serving: RaySite, case: Case, point: str) -> Iterator[tuple[Future[Answer], str]]:
    """The case's request under way, and the process that is held at `point` of it."""
    serving.points.arm_any(point, "hold", cases.nth_of(point))
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(
            ask, serving.url, story(str(case)), streamed=case.streamed, max_tokens=MAX_TOKENS, **case.fields
        )
        yield asked, serving.points.wait_hit_by_any(point)


def undisturbed(serving: RaySite, case: Case) -> Answer:
    return complete(serving.url, story(str(case)), max_tokens=MAX_TOKENS, **case.fields)


def assert_bounded(outcome: Outcome, bound_s: float) -> None:
    assert outcome.recovery_s is not None
    assert outcome.recovery_s <= ALLOWED * bound_s, f"{outcome.recovery_s:.2f} s to the next token, bound {bound_s:g} s"
