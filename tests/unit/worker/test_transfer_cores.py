"""Where transfer threads run: the ends of a handoff apart, and never nowhere."""

from __future__ import annotations

import pytest

from tandem.core.identity import Role
from tandem.worker.cpu.transfer_cores import transfer_cores


@pytest.mark.parametrize(
    ("cores", "prefill", "decode"),
    [({0, 1}, {0}, {1}), ({5, 2}, {2}, {5}), ({0, 1, 2}, {0}, {1, 2}), (range(8), {0, 1, 2, 3}, {4, 5, 6, 7})],
)
def test_each_end_has_a_half_of_the_cores(cores: set[int], prefill: set[int], decode: set[int]) -> None:
    assert transfer_cores(Role.PREFILL, cores) == prefill
    assert transfer_cores(Role.DECODE, cores) == decode


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_one_core_is_for_both(role: str) -> None:
    assert transfer_cores(role, {3}) == {3}
