"""Which late look is taken for a jump of the clock."""

from __future__ import annotations

from tandem.core.clock_jump import ClockJump


def test_looks_in_time_or_somewhat_late_say_nothing() -> None:
    clock_jump = ClockJump(10.0, turn_s=1.0, tolerance_s=0.5)
    assert [clock_jump.look(now) for now in (10.2, 11.2, 12.7)] == [0.0, 0.0, 0.0]


def test_a_late_look_tells_all_the_time_since_the_last_one_and_only_once() -> None:
    clock_jump = ClockJump(10.0, turn_s=1.0, tolerance_s=0.5)
    assert clock_jump.look(15.0) == 5.0
    assert clock_jump.look(15.0) == 0.0
    assert clock_jump.look(16.0) == 0.0
