"""A cluster without prefill workers is struck: its requests go on at another decode worker with the same tokens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.scenarios.client import ask
from tests.scenarios.faults.cases import Case
from tests.scenarios.faults.site import (
    ALLOWED,
    MAX_TOKENS,
    NOTICE_S,
    Site,
    assert_same,
    assert_typed_error,
    site,
    story,
)

pytestmark = pytest.mark.alone


class MidPrompt(Case):
    """In the third of the four steps that compute its prompt."""

    @property
    def nth(self) -> int:
        return 3

    def __str__(self) -> str:
        return f"mid-prompt-{super().__str__()}"


CASES = [
    MidPrompt("decode", "decode.step", "kill", True, "seeded", "n2"),
    Case("decode", "decode.step", "stop", False, "greedy", "one"),
    Case("decode", "decode.queued", "kill", False, "greedy", "one"),
    MidPrompt("decode", "decode.step", "stop", False, "greedy", "stop"),
    Case("decode", "decode.step", "kill", True, "seeded", "n2"),
    Case("decode", "decode.step", "kill", True, "seeded", "json-n2"),
    Case("decode", "decode.admitted", "stop", False, "seeded", "one"),
]
"""The first two in `make test`."""


@pytest.fixture(scope="module")
def shared_colocated_site(undisturbed: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("colocated"), 0, 2, undisturbed=undisturbed) as found:
        yield found


@pytest.fixture
def colocated_site(shared_colocated_site: Site) -> Site:
    return shared_colocated_site.ready()


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=() if number < 2 else pytest.mark.faults)
        for number, case in enumerate(CASES)
    ],
)
def test_a_struck_decode_worker_changes_nothing_for_the_client(colocated_site: Site, case: Case) -> None:
    prompt = story(f"colocated {case}")
    expected = colocated_site.expected(prompt, case.fields)
    outcome = colocated_site.strike(case, prompt)
    assert_same(outcome.answer, expected)
    colocated_site.check_in_time(case, outcome)
    colocated_site.check_freed(case)


@pytest.mark.faults
def test_a_prompt_that_outlives_two_decode_workers_is_not_tried_again(colocated_site: Site) -> None:
    for worker in ("decode-0", "decode-1"):
        colocated_site.points.arm(worker, "decode.step", "kill")
    answer = ask(colocated_site.cluster.url, story("colocated poison"), streamed=False, max_tokens=MAX_TOKENS)
    assert_typed_error(answer)
    assert answer.error is not None
    assert (answer.status, answer.error["code"], answer.error["retryable"]) == (500, "workers_died", False)
    colocated_site.overseer.wait_whole()
    colocated_site.check_baseline(ALLOWED * NOTICE_S)
