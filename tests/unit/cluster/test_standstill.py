"""What is taken for a standstill."""

from __future__ import annotations

from tandem.cluster.supervisor.clock_jump import Standstill


def test_looks_in_time_or_somewhat_late_say_nothing() -> None:
    standstill = Standstill(10.0, turn_s=1.0, tolerance_s=0.5)
    assert [standstill.look(now) for now in (10.2, 11.2, 12.7)] == [0.0, 0.0, 0.0]


def test_a_late_look_tells_all_the_time_since_the_last_one_and_only_once() -> None:
    standstill = Standstill(10.0, turn_s=1.0, tolerance_s=0.5)
    assert standstill.look(15.0) == 5.0
    assert standstill.look(15.0) == 0.0
    assert standstill.look(16.0) == 0.0
