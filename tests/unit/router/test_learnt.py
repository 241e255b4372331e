"""What is learnt of workers' speeds from what they report."""

from __future__ import annotations

from itertools import count

import pytest

from router.workers.learnt import Learnt

# A step of 10 ms, and 2,000 tokens a second.
BASE_S, TOKEN_S = 0.01, 1 / 2000


def noted(speed: Learnt, *lengths: int) -> Learnt:
    for now_s, num_tokens in zip(count(), lengths, strict=False):
        speed.note(num_tokens, BASE_S + num_tokens * TOKEN_S, float(now_s))
    return speed


def test_nothing_is_known_before_the_first_figure_and_of_figures_that_are_nothing() -> None:
    speed = Learnt()
    assert speed.at(1.0) == 0
    speed.note(0, 1.0, 1.0)
    speed.note(100, 0.0, 1.0)
    assert speed.at(1.0) == 0


def test_short_prompts_hardly_change_what_long_ones_say() -> None:
    alone = noted(Learnt(), 16_000).at(0.0)
    among = noted(Learnt(), 16_000, *[8] * 30).at(30.0)
    assert alone == pytest.approx(2000, rel=0.01)
    assert among == pytest.approx(alone, rel=0.15)


def test_who_has_short_prompts_alone_learns_what_these_take() -> None:
    assert noted(Learnt(), *[8] * 30).at(30.0) == pytest.approx(8 / (BASE_S + 8 * TOKEN_S))


def test_the_newest_figures_count_most() -> None:
    speed = Learnt()
    for now_s in range(40):
        speed.note(1000, 1.0, float(now_s))
    for now_s in range(40, 80):
        speed.note(500, 1.0, float(now_s))
    assert 500 < speed.at(80.0) < 550


def test_from_how_much_a_speed_is_known_counts_what_is_new_and_only_for_a_while() -> None:
    speed = Learnt()
    assert speed.known_from(0.0) == 0
    speed.note(160, 1.0, 1.0)
    assert speed.known_from(2.0) == 160
    speed.note(10, 1.0, 3.0)
    assert (speed.known_from(33.0), speed.known_from(33.1)) == (160, 0)
    assert speed.at(99.0) > 0, "the speed itself holds"


def test_what_is_not_seen_again_is_forgotten_and_learnt_anew() -> None:
    reads = Learnt(30.0)
    reads.note(8.0, 2, 0.0)
    assert (reads.at(30.0), reads.at(30.1)) == (4.0, 0.0)
    reads.note(1.0, 1, 31.0)
    assert reads.at(31.0) == 1.0
