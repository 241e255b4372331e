"""`python -m benchmarks host`, on sizes that take no time."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import docs
from benchmarks.host import command
from benchmarks.host.command import Sizes
from benchmarks.host.section import FORMAT
from benchmarks.host.steps import PAGE_SIZE, Steps
from tandem.bench.report.json_file import read_format

SMALL = Sizes(batch=2, vocab_size=300, steps=((3, 100),), num_open=4, num_steps=4, budget_s=0.0)


@pytest.mark.processes  # asks git which code it is
def test_each_part_is_measured_written_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "host.json"
    command.run(path, sizes=SMALL)
    content = read_format(path, FORMAT, "this")
    titles = [figure["title"] for figure in content["figures"]]
    assert len(titles) == len(set(titles)) == 5 + 2 + 1
    assert all(figure["median_s"] > 0 for figure in content["figures"])
    page = docs.page(None, of_host=content)
    for text in (capsys.readouterr().out, page):
        assert all(f"| {title} | " in text for title in titles)
        assert "of 2 rows over 300 tokens" in " ".join(text.split())


def test_a_figure_beyond_its_goal_is_said_to_miss_it() -> None:
    content = {"date": "2026-01-01", "code": {"digest": "abc"}, **command.measure(SMALL, lambda _: None)}
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
