"""Times of steps between those of a profile."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.core.config_tree import build
from tandem.core.errors import ConfigError
from tandem.core.step_table import read_table
from tandem.core.step_times import Fitted, Terms
from tandem.core.time_model import FittedSpec, read_time_model
from tandem.sim.scenario import read_scenario

HEAD = "rows,prompt_tokens,context,ms\n"
#: Whatever is a sum of a step's terms is on straight lines, but for the square of a prompt's own length.
TRUTH = Fitted(base_s=0.01, of_token_s=2e-5, of_row_s=1e-5, of_read_s=1e-7)


def of_rows(num: int, context: int) -> Terms:
    return Terms.of((context - 1, 1, True) for _ in range(num))


def of_prompt(num_tokens: int, start: int) -> Terms:
    return Terms.of([(start, num_tokens, False)])


def profile(directory: Path) -> Path:
    lines = [f"{n},0,{c},{TRUTH.seconds(of_rows(n, c)) * 1e3}" for n in (1, 8, 64) for c in (100, 4000)]
    lines += [f"0,{n},{c},{TRUTH.seconds(of_prompt(n, c)) * 1e3}" for n in (16, 512, 2048) for c in (0, 8192)]
    file = directory / "steps.csv"
    file.write_text(HEAD + "\n".join(lines))
    return file


@pytest.mark.parametrize(
    "terms",
    [
        of_rows(1, 100), of_rows(8, 4000), of_rows(5, 1000), of_rows(64, 777), of_rows(200, 9000),
        of_prompt(512, 0), of_prompt(300, 1000), of_prompt(4096, 20_000), of_prompt(16, 8192),
    ],
    ids=str,
)  # fmt: skip
def test_steps_lie_between_those_of_the_profile_and_beyond_them(tmp_path: Path, terms: Terms) -> None:
    assert read_table(profile(tmp_path)).seconds(terms) == pytest.approx(TRUTH.seconds(terms), rel=1e-6)


def test_a_step_with_rows_and_a_prompt_reads_the_weights_once(tmp_path: Path) -> None:
    parts = [(999, 1, True)] * 8 + [(1024, 512, False)]
    found = read_table(profile(tmp_path)).seconds(Terms.of(parts))
    assert found == pytest.approx(TRUTH.seconds(Terms.of(parts)), rel=0.01)


def test_no_step_takes_less_than_no_time(tmp_path: Path) -> None:
    file = tmp_path / "steps.csv"
    file.write_text(HEAD + "8,0,0,1\n16,0,0,10\n0,8,0,1\n")
    assert read_table(file).seconds(of_rows(1, 1)) == 0.0
    assert read_table(file).seconds(Terms(0, 0, 0, 0.0)) == 0.0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (HEAD + "1,0,0,5\n", "no line with prompt_tokens"),
        (HEAD + "1,0,0,5\n0,8,0,5\n0,8,64,5\n0,16,0,5\n", "prompt_tokens 16 and context 64"),
        (HEAD + "1,8,0,5\n", "line 2: either rows or prompt_tokens"),
        (HEAD + "1,0,0,5\n1,0,zero,5\n", "line 3: needs numbers"),
        ("rows,ms\n1,5\n", "line 2: needs numbers"),
    ],
)
def test_what_a_profile_lacks_is_named(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "steps.csv"
    file.write_text(text)
    with pytest.raises(ConfigError, match=told):
        read_table(file)


def test_a_scenario_and_a_simulated_engine_find_it_beside_their_file(tmp_path: Path) -> None:
    profile(tmp_path)
    file = tmp_path / "scenario.yaml"
    file.write_text("times: table\ntable: steps.csv\n")
    terms = of_rows(8, 100)
    for model in (read_scenario(file), read_time_model(file)):
        assert model.step_times().seconds(terms) == pytest.approx(TRUTH.seconds(terms))
    file.write_text("times: table\n")
    with pytest.raises(ConfigError, match="name its file"):
        read_scenario(file)


def test_what_rows_and_prompts_add_is_on_lines_between_points() -> None:
    times = Fitted(1.0, of_rows=((1.0, 0.5), (4.0, 0.8), (8.0, 2.0)), of_prompts=((100.0, 10.0),))
    assert [times.seconds(Terms(rows, rows, 0.0, 0.0)) for rows in (0, 1, 2, 4, 8, 10)] == pytest.approx(
        [1.0, 1.5, 1.6, 1.8, 3.0, 3.6]
    )
    assert times.seconds(Terms(251, 1, 0.0, 0.0)) == pytest.approx(1.0 + 0.5 + 25.0), "a token of a row is in its row"


@pytest.mark.parametrize(
    ("points", "named"),
    [
        (1.0, "rows_ms must be a list of lists, not 1.0"),
        ([1.0], r"rows_ms\[0\] must be a list of numbers, not 1.0"),
        ([[1, 2.0, 3.0]], r"fitted.rows_ms has \[1.0, 2.0, 3.0\]"),
        ([[0, 2.0]], r"behind \[0.0, 0.0\]"),
        ([[4, 2.0], [2, 3.0]], r"has \[2.0, 3.0\] behind \[4.0, 2.0\]"),
        ([[4, 2.0], [8, 1.0]], r"has \[8.0, 1.0\] behind \[4.0, 2.0\]"),
    ],
)
def test_points_that_are_no_line_are_named(points: object, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        build(FittedSpec, {"rows_ms": points})
