"""What of the memory of processes counts as growth in the soak."""

from __future__ import annotations

from tests.soak.memory import Trend, growing


def trend(role: str, end_mib: float, grown_mib: float) -> Trend:
    return Trend(role, 1, 120.0, end_mib, grown_mib, grown_mib)


def test_who_starts_late_may_grow_to_what_others_of_its_role_have_and_no_further() -> None:
    still, late, leaks = trend("prefill", 723.0, 0.5), trend("prefill", 713.0, 24.7), trend("prefill", 760.0, 24.7)
    assert growing([still, late], 10.0) == []
    assert growing([still, late, leaks], 10.0) == [leaks]


def test_where_nobody_of_a_role_stands_still_all_that_grow_count() -> None:
    trends = [trend("decode", 720.0, 30.0), trend("decode", 700.0, 20.0), trend("router", 900.0, 0.0)]
    assert growing(trends, 10.0) == trends[:2]
