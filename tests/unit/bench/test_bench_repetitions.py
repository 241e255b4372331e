"""What repetitions tell of chance."""

from __future__ import annotations

import math
import statistics

import pytest

from tandem.bench.repetitions import (
    Difference,
    Spread,
    differences,
    half_width,
    residual,
    rotated,
    spread,
    student_quantile,
    student_share,
)


def test_each_is_first_in_turn() -> None:
    names = ("a", "b", "c")
    assert [rotated(names, by) for by in (0, 1, 2, 3)] == [names, ("b", "c", "a"), ("c", "a", "b"), names]
    assert rotated((), 2) == ()


def test_the_spread_of_repetitions() -> None:
    assert spread([3.0, 1.0, None, 2.0]) == Spread(2.0, 1.0, 3.0, 3)
    assert spread([None]) is None


@pytest.mark.parametrize(
    ("num_free", "tabled"), [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (10, 2.228), (30, 2.042)]
)
def test_quantiles_of_student_are_those_of_the_tables(num_free: int, tabled: float) -> None:
    assert student_quantile(0.95, num_free) == pytest.approx(tabled, abs=5e-4)
    assert student_share(tabled, num_free) == pytest.approx(0.95, abs=1e-4)


def test_of_two_rows_the_interval_is_that_of_the_paired_t_test() -> None:
    first, second = [10.0, 12.0, 11.0, 14.0], [11.0, 14.0, 11.5, 16.0]
    gaps = [b - a for a, b in zip(first, second, strict=True)]
    half = 3.182446 * statistics.stdev(gaps) / math.sqrt(4)
    (found,) = differences([first, second], 0.95)
    assert found.value == pytest.approx(statistics.fmean(gaps))
    assert (found.low, found.high) == pytest.approx((found.value - half, found.value + half), rel=1e-6)


def test_what_a_repetition_does_to_all_alike_is_no_noise() -> None:
    assert residual([[1.0, 5.0, 100.0], [2.0, 6.0, 101.0], [0.0, 4.0, 99.0]]) == pytest.approx(0.0, abs=1e-12)
    first, second = differences([[1.0, 5.0], [2.0, 6.0], [0.0, 4.0]], 0.95)
    assert (first.low, first.high) == pytest.approx((1.0, 1.0))
    assert (second.low, second.high) == pytest.approx((-1.0, -1.0))


def test_several_rows_share_their_noise_and_their_chance_of_error() -> None:
    # By hand: what is left is ±1/4, so the sum of squares is 6/16 over 2 degrees of freedom.
    values = [[1.0, 2.0], [3.0, 3.5], [2.0, 3.5]]
    mean, rows, columns = 2.5, [1.5, 3.25, 2.75], [2.0, 3.0]
    left = [v - rows[i] - columns[j] + mean for i, row in enumerate(values) for j, v in enumerate(row)]
    assert residual(values) == pytest.approx(math.sqrt(sum(each * each for each in left) / 2))
    assert half_width(1.0, 3, 2, 0.95) == pytest.approx(student_quantile(0.975, 2))
    assert half_width(1.0, 2, 2, 0.95) == pytest.approx(student_quantile(0.95, 1))


def test_one_repetition_bounds_nothing() -> None:
    assert differences([[1.0], [3.0]], 0.95) == [Difference(2.0, -math.inf, math.inf)]
