"""Faults beyond the matrix: several in a row, processes that never come back, and what recovery costs."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.client import ask
from tests.scenarios.faults.cases import EXTRAS, SAMPLINGS, Case
from tests.scenarios.faults.site import (
    ALLOWED,
    GRACE_S,
    LEASE_S,
    MAX_TOKENS,
    NOTICE_S,
    SERVED,
    Site,
    assert_same,
    assert_typed_error,
    site,
    story,
)

pytestmark = pytest.mark.alone

DEFAULT_LEASE_S, DEFAULT_GRACE_S = 10.0, 2.0


def test_a_request_that_outlives_two_workers_is_not_tried_again(ready_site: Site) -> None:
    """It may be what kills them: 500, not retryable."""
    for worker in ("prefill-0", "prefill-1"):
        ready_site.points.arm(worker, "prefill.chunk", "kill")
    answer = ask(ready_site.cluster.url, story("poison"), streamed=False, max_tokens=4)
    assert all(ready_site.points.hit_at(w, "prefill.chunk") for w in ("prefill-0", "prefill-1"))
    assert_typed_error(answer)
    assert answer.error is not None
    assert (answer.status, answer.error["code"], answer.error["retryable"]) == (500, "workers_died", False)
    ready_site.overseer.wait_whole()
    ready_site.check_baseline(ALLOWED * NOTICE_S)


@pytest.mark.parametrize("point", ["prefill.sending", pytest.param("prefill.written", marks=pytest.mark.faults)])
def test_a_writer_that_stays_silent_is_killed_and_its_pages_come_back(ready_site: Site, point: str) -> None:
    """Nobody wakes it: beyond lease and grace decode suspects it, and its end is the fence."""
    prompt = story(f"silent at {point}")
    expected = ready_site.expected(prompt, {})
    ready_site.points.arm_any(point, "stop")
    began = time.time()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, ready_site.cluster.url, prompt, streamed=True, max_tokens=MAX_TOKENS)
        victim = ready_site.process(ready_site.points.wait_hit_by_any(point))
        answer = asked.result()
    assert_same(answer, expected)
    victim.popen.wait(ALLOWED * (LEASE_S + GRACE_S))
    assert victim.popen.returncode == -signal.SIGKILL, ready_site.stall_note(began)
    assert victim.incarnation in ready_site.overseer.killed
    ready_site.check_baseline(ALLOWED * NOTICE_S)


def every_request() -> list[pytest.ParameterSet]:
    """All kinds of sampling; the hardest in `make test`."""
    return [
        pytest.param(*kind, id="-".join(kind), marks=() if kind == ("seeded", "n2") else pytest.mark.faults)
        for kind in product(SAMPLINGS, EXTRAS)
    ]


@pytest.mark.parametrize(("sampling", "extra"), every_request())
def test_a_move_to_another_decode_worker_computes_no_prompt_token_again(
    ready_site: Site, sampling: str, extra: str
) -> None:
    """Prefill kept the pages: all that is computed after decode's death is what had been generated.

    With another prefill worker at hand, which does not have them.
    """
    case = Case("decode", "decode.step", "kill", True, sampling, extra)
    prompt = story(f"moved {case}")
    expected = ready_site.expected(prompt, case.fields)
    before = _computed(ready_site)
    recomputed = ready_site.cluster.metric("tandem_prompt_tokens_recomputed_total")
    outcome = ready_site.strike(case, prompt)
    assert_same(outcome.answer, expected)
    ready_site.cluster.wait_idle()
    after = _computed(ready_site)
    computed = {name: after[name] - before[name] for name in after.keys() - {outcome.struck}}
    assert sum(computed.values()) == len(prompt), (
        f"computed of {len(prompt)} prompt tokens: {computed}; struck: {outcome.struck}; "
        + ready_site.stall_note(outcome.struck_at - 5)
    )
    assert ready_site.cluster.metric("tandem_prompt_tokens_recomputed_total") == recomputed


def _computed(found: Site) -> dict[str, int]:
    """Prompt tokens that each worker has computed."""
    return {name: status.prompt_tokens_computed for name, status in found.cluster.statuses().items()}


@pytest.mark.faults
@pytest.mark.timeout(240)
def test_the_default_lease_bounds_a_stopped_worker(tmp_path: Path) -> None:
    """1P1D with the configuration as it is delivered: decode computes what the stopped prefill worker owes."""
    with site(tmp_path, 1, 1, config=dict[str, Any](SERVED), warm=False) as found:
        prompt = story("default lease")
        expected = found.expected(prompt, {})
        victim = found.process("prefill-0")
        found.points.arm("prefill-0", "prefill.sending", "stop")
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(ask, found.cluster.url, prompt, streamed=True, max_tokens=MAX_TOKENS)
            stopped_at = found.points.wait_hit("prefill-0", "prefill.sending")
            answer = asked.result()
        assert_same(answer, expected)
        next_token_s = min(at for at in answer.token_times if at > stopped_at) - stopped_at
        assert next_token_s <= ALLOWED * DEFAULT_LEASE_S, found.stall_note(stopped_at)
        if victim.lives:
            victim.kill(signal.SIGCONT)
        found.overseer.wait_whole()
        found.cluster.wait_idle(ALLOWED * (DEFAULT_LEASE_S + DEFAULT_GRACE_S))
