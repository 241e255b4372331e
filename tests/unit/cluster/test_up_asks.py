"""What `tandem up` makes of what the head says, before `ray up` would end a cluster that runs there."""

from __future__ import annotations

import pytest

from tandem.cluster.launch.launcher import Answer
from tandem.cluster.launch.up import asked_whether_one_runs
from tandem.core.errors import NOT_RUNNING

RUNS, NONE, NO_SUCH_COMMAND = 0, 1, 127


class Head:
    """A head where the installed Tandem ends with `status`, and the search for processes of Ray with `found`."""

    def __init__(self, status: int | None, found: int | None = None) -> None:
        self._status, self._found = status, found
        self.asked: list[str] = []

    def ask_head(self, question: str) -> Answer:
        self.asked.append(question)
        code = self._status if question.startswith("tandem") else self._found
        return Answer(code, "it broke\n")


@pytest.mark.parametrize(
    ("code", "runs"), [(0, True), (NOT_RUNNING, False), (NO_SUCH_COMMAND, False), (None, None)], ids=str
)
def test_a_head_that_is_clear_or_out_of_reach_is_asked_once(code: int | None, runs: bool | None) -> None:
    head = Head(code)
    assert asked_whether_one_runs(head)[0] is runs
    assert head.asked == ["tandem status --address auto"]


@pytest.mark.parametrize(
    ("found", "runs"), [(NONE, False), (RUNS, None), (NO_SUCH_COMMAND, None), (None, None)], ids=str
)
def test_what_is_installed_may_be_broken_or_old_and_no_cluster_runs_without_ray(
    found: int | None, runs: bool | None
) -> None:
    """`tandem up` installs the new one: it must not depend on what is there."""
    head = Head(1, found)
    known, why = asked_whether_one_runs(head)
    assert known is runs
    assert why == ("no Ray runs on the head" if runs is False else "the head does not say whether one runs (it broke)")
    assert len(head.asked) == 2
