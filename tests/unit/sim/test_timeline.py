"""What workers did over time: kept in bounded parts, and drawn."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem import cli
from tandem.core.identity import Role, WorkerKey
from tandem.sim.fleet import Life
from tandem.sim.load import Arrival
from tandem.sim.outcome import Outcome
from tandem.sim.timeline import Timeline
from tandem.sim.timeline_plot import Drawn, write

SCENARIO = """
prefill: {workers: 2, tokens: 20000}
decode: {workers: 1, tokens: 20000}
times: fitted
fitted: {base_ms: 5, token_us: 50}
load: {requests: 60, rate: 20, input_median: 200, output_median: 20}
"""


@pytest.mark.long
@given(
    st.lists(st.tuples(st.floats(0.0, 3.0), st.floats(0.001, 40.0), st.booleans()), min_size=1, max_size=40),
    st.integers(1, 300),
)
def test_nothing_is_lost_however_long_it_takes_and_memory_is_bounded(
    steps: list[tuple[float, float, bool]], num: int
) -> None:
    timeline, now_s, computed_s = Timeline(part_s=0.01), 0.0, {True: 0.0, False: 0.0}
    for idle_s, seconds, with_prompts in steps:
        timeline.note("decode-0", now_s + idle_s, now_s + idle_s + seconds, with_prompts=with_prompts)
        now_s += idle_s + seconds
        computed_s[with_prompts] += seconds
    assert timeline.end_s / timeline.part_s <= 2048
    until_s = max(now_s, timeline.end_s)
    shares = timeline.shares("decode-0", num, until_s)
    assert len(shares) == num
    for kind, with_prompts in ((0, True), (1, False)):
        assert sum(share[kind] for share in shares) * until_s / num == pytest.approx(computed_s[with_prompts], rel=1e-6)


def test_each_part_has_its_own_share() -> None:
    timeline = Timeline(part_s=1.0)
    timeline.note("prefill-0", 0.5, 2.0, with_prompts=True)
    timeline.note("prefill-0", 3.0, 3.25, with_prompts=False)
    assert timeline.shares("prefill-0", 4, 4.0) == [(0.5, 0.0), (1.0, 0.0), (0.0, 0.0), (0.0, 0.25)]
    assert timeline.shares("prefill-1", 2, 4.0) == [(0.0, 0.0)] * 2, "it has done nothing"


def drawn(num_workers: int) -> Drawn:
    timeline, lives = Timeline(), []
    for number in range(num_workers):
        life = Life(WorkerKey(f"decode-{number}", "1"), Role.DECODE, 0.0, Role.DECODE, ready_s=0.0)
        timeline.note(life.key.worker_id, 10.0 * number, 3600.0, with_prompts=number % 2 == 0)
        lives.append(life)
    lives.append(Life(WorkerKey("prefill-0", "1"), Role.PREFILL, 60.0, Role.PREFILL, ready_s=120.0, left_s=600.0))
    outcome = Outcome(Arrival(0, 5.0, 10, 2), first_token_s=1800.0, last_token_s=3600.0)
    return Drawn("a <load>", timeline, lives, [outcome], 3600.0)


def test_a_page_of_many_workers_and_an_hour_is_small_and_needs_nothing_else(tmp_path: Path) -> None:
    write(tmp_path / "new" / "found.html", drawn(64))
    page = (tmp_path / "new" / "found.html").read_text()
    assert len(page) < 200_000
    assert "a &lt;load&gt;" in page
    assert not re.search(r"(src|href)=|https?://|@import", page)
    svg = ET.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    titles = [title.text or "" for title in svg.iter("title")]
    assert len(titles) == 65
    assert titles[0] == "prefill-0: computed prompts 0% of its time, only generated 0%", "prefill is above"
    assert titles[1] == "decode-0: computed prompts 100% of its time, only generated 0%"
    assert titles[2] == "decode-1: computed prompts 0% of its time, only generated 100%"
    greys = [rect for rect in svg.iter("rect") if rect.get("fill") == "var(--line)"]
    assert len(greys) == 2, "it started, and it ends what it has"


def test_one_that_was_given_up_while_it_started_is_drawn_until_then(tmp_path: Path) -> None:
    given_up = Life(WorkerKey("decode-0", "1"), Role.DECODE, 1.0, Role.DECODE, left_s=2.0, gone_s=2.0)
    outcome = Outcome(Arrival(0, 0.0, 10, 2), first_token_s=5.0, last_token_s=10.0)
    write(tmp_path / "found.html", Drawn("a load", Timeline(), [given_up], [outcome], 10.0))
    page = (tmp_path / "found.html").read_text()
    greys = re.findall(r'<rect x="[\d.]+" y="\d+" width="([\d.]+)"[^>]*var\(--line\)', page)
    assert greys == ["100.0"], "a tenth of the width"


def test_the_command_draws_what_it_has_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my.yaml").write_text(SCENARIO)
    assert cli.main(["sim", "run", str(tmp_path / "my.yaml"), "--timeline", str(tmp_path / "my.html")]) == 0
    page = (tmp_path / "my.html").read_text()
    assert "my: 60 requests" in page
    found = re.findall(r"<title>(\S+): computed prompts (\d+)% of its time, only generated (\d+)%", page)
    assert [name for name, _, _ in found] == ["prefill-0", "prefill-1", "decode-0"]
    assert all(int(of_prompts) > 0 and of_tokens == "0" for _, of_prompts, of_tokens in found[:2])
    assert int(found[2][2]) > 20
    out = capsys.readouterr()
    assert cli.main(["sim", "run", str(tmp_path / "my.yaml"), "--timeline", str(tmp_path / "my.pdf")]) != 0
    assert "must end with .html or .png" in capsys.readouterr().err
    assert "throughput" in out.out


@pytest.mark.long
def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write(tmp_path / "found.png", drawn(3))
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
