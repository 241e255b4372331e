"""When a handoff will be complete, foreseen from its layers."""

from __future__ import annotations

from decode_worker.handoff_forecast import HandoffForecast


def test_layers_that_arrive_one_by_one_foretell_the_last() -> None:
    forecast = HandoffForecast(4)
    assert forecast.complete_s() is None
    forecast.arrived({0}, 10.0)
    assert forecast.complete_s() is None, "the layer may have taken any time"
    forecast.arrived({1}, 12.0)
    assert forecast.complete_s() == 16.0
    forecast.arrived({2}, 13.0)
    assert forecast.complete_s() == 14.5, "the mean of both"
    forecast.arrived({3}, 20.0)
    assert (forecast.complete_s(), forecast.num_left) == (20.0, 0)


def test_layers_that_arrive_together_say_nothing_of_how_long_one_takes() -> None:
    forecast = HandoffForecast(6)
    forecast.arrived({0, 1, 2}, 10.0)
    assert forecast.complete_s() is None
    forecast.arrived({3}, 11.0)
    assert forecast.complete_s() == 13.0
    forecast.arrived({3, 1}, 15.0)  # written once more
    assert (forecast.complete_s(), forecast.last_s) == (13.0, 11.0)


def test_all_at_once_is_complete() -> None:
    forecast = HandoffForecast(2)
    forecast.arrived({0, 1}, 3.0)
    assert forecast.complete_s() == 3.0
