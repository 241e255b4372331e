"""The kill matrix: each role × each point × SIGKILL and SIGSTOP × streamed and whole × greedy and seeded.

`docs/failure-contract.md` says what is asserted here; the supervisor's part needs Ray: `test_under_ray.py`.
"""

from __future__ import annotations

import json
import time

import pytest

from tests.scenarios.client import Answer, complete
from tests.scenarios.faults import cases
from tests.scenarios.faults.cases import Case, matrix
from tests.scenarios.faults.report import record
from tests.scenarios.faults.site import (
    ALLOWED,
    MAX_TOKENS,
    NOTICE_S,
    Site,
    assert_begins_alike,
    assert_same,
    assert_typed_error,
    story,
)

pytestmark = pytest.mark.alone


@matrix(cases.of("prefill", "decode"))
def test_a_struck_worker_changes_nothing_for_the_client(
    ready_site: Site, case: Case, request: pytest.FixtureRequest
) -> None:
    _assert_nothing_changes(ready_site, case, request)


@matrix(cases.of_json())
def test_a_worker_struck_in_mid_json_changes_no_byte_of_it(
    ready_site: Site, case: Case, request: pytest.FixtureRequest
) -> None:
    """The next worker gets the tokens that the client has, and its matcher goes on behind them."""
    answer = _assert_nothing_changes(ready_site, case, request)
    assert answer.finish_reasons == ["stop"] * len(answer.texts)
    for text in answer.texts:
        assert set(json.loads(text)) == {"n", "k"}


@matrix(cases.of_guesses())
def test_a_worker_struck_while_it_guesses_changes_no_token(
    ready_site: Site, case: Case, request: pytest.FixtureRequest
) -> None:
    """Guesses die with it: the next worker gets what the client has, and guesses anew."""

    before = ready_site.cluster.statuses()
    _assert_nothing_changes(ready_site, case, request)
    after = ready_site.cluster.statuses()
    assert any(after[name].right_guesses > before[name].right_guesses for name in before.keys() & after.keys())


def _assert_nothing_changes(site: Site, case: Case, request: pytest.FixtureRequest) -> Answer:
    """Strike; the answer is that of an undisturbed run, comes in time, and leaves nothing behind."""
    prompt = story(str(case))
    expected = site.expected(prompt, case.fields)
    outcome = site.strike(case, prompt)
    record(request, case, recovery_s=outcome.recovery_s, saw=outcome.saw)
    assert_same(outcome.answer, expected)
    site.check_in_time(case, outcome)
    freed_s = site.check_freed(case)
    record(request, case, freed_s=freed_s)
    return outcome.answer


@matrix(cases.of("router", signal="kill"))
def test_a_killed_router_breaks_the_connection_and_comes_back(
    ready_site: Site, case: Case, request: pytest.FixtureRequest
) -> None:
    prompt = story(str(case))
    expected = ready_site.expected(prompt, case.fields)
    outcome = ready_site.strike(case, prompt)
    record(request, case, saw=outcome.saw)
    assert outcome.answer.broken, f"a clean end: {outcome.answer}"
    assert not outcome.answer.done
    assert_begins_alike(outcome.answer, expected)
    freed_s = ready_site.check_baseline(ALLOWED * NOTICE_S)
    ready_site.overseer.wait_whole()
    record(request, case, freed_s=freed_s, recovery_s=time.time() - outcome.struck_at)
    again = complete(ready_site.cluster.url, prompt, max_tokens=MAX_TOKENS, **case.fields)
    assert_same(again, expected)


@matrix(cases.of("router", signal="stop"))
def test_a_stopped_router_goes_on_or_says_what_it_lost(
    ready_site: Site, case: Case, request: pytest.FixtureRequest
) -> None:
    prompt = story(str(case))
    expected = ready_site.expected(prompt, case.fields)
    outcome = ready_site.strike(case, prompt)
    record(request, case, recovery_s=outcome.recovery_s, saw=outcome.saw)
    if outcome.answer.error is not None:
        assert_typed_error(outcome.answer)
        assert_begins_alike(outcome.answer, expected)
    else:
        assert_same(outcome.answer, expected)
    ready_site.check_in_time(case, outcome)
    freed_s = ready_site.check_freed(case)
    record(request, case, freed_s=freed_s)
