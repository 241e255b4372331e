"""`python -m benchmarks host`, on sizes that take no time."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest

from benchmarks import docs
from benchmarks.host import command
from benchmarks.host.command import Sizes
from benchmarks.host.section import FORMAT
from benchmarks.host.steps import PAGE_SIZE, Steps
from tandem.bench.report.json_file import read_format

SMALL = Sizes(batch=2, vocab_size=300, steps=((3, 100),), num_open=4, num_steps=4, budget_s=0.0)

pytestmark = pytest.mark.processes  # asks git which code it is


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """What is written, and what is said."""
    path = tmp_path_factory.mktemp("host") / "host.json"
    with contextlib.redirect_stdout(io.StringIO()) as said:
        command.run(path, sizes=SMALL)
    return read_format(path, FORMAT, "this"), said.getvalue()


def test_each_part_is_measured_written_and_shown(measured: tuple[dict[str, Any], str]) -> None:
    content, said = measured
    titles = [figure["title"] for figure in content["figures"]]
    assert len(titles) == len(set(titles)) == 5 + 3 + 1
    assert all(figure["median_s"] > 0 for figure in content["figures"])
    page = docs.page(None, of_host=content)
    for text in (said, page):
        assert all(f"| {title} | " in text for title in titles)
        assert "of 2 rows over 300 tokens" in " ".join(text.split())


def test_a_figure_beyond_its_goal_is_said_to_miss_it(measured: tuple[dict[str, Any], str]) -> None:
    content = dict(measured[0])
    for median_s, said in ((0.008, "≤ 8 ms: reached"), (0.0081, "≤ 8 ms: **missed**")):
        content["figures"] = [{"title": "this", "median_s": median_s, "goal_ms": 8.0}]
        assert said in docs.page(None, of_host=content)


def test_steps_are_those_of_a_decode_worker() -> None:
    """All sequences generate, and their full pages are in the prefix cache."""
    steps = Steps(3, 100)
    steps.admit()
    steps.times_s(PAGE_SIZE)
    running = steps._scheduler.running
    assert [sequence.num_output for sequence in running] == [PAGE_SIZE + 1] * 3
    assert [sequence.num_published for sequence in running] == [(100 - n + PAGE_SIZE) // PAGE_SIZE for n in range(3)]
    steps.times_between_s(PAGE_SIZE - 1)  # planned ahead, and the step before them
    assert [sequence.num_output for sequence in running] == [2 * PAGE_SIZE + 1] * 3
