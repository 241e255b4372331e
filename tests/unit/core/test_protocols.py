"""Versions that follow each other speak with each other, by the lower of their numbers."""

from __future__ import annotations

import pytest

from tandem.core.errors import IncompatibleError
from tandem.core.protocols import NEWEST, OLDEST, Protocols, agree


def test_the_lower_of_the_newest_is_spoken() -> None:
    assert agree(Protocols(2, 3), "router", Protocols(3, 4), "prefill-0") == 3
    assert agree(Protocols(3, 4), "router", Protocols(2, 3), "prefill-0") == 3
    assert agree(Protocols(2, 3), "router", Protocols(2, 3), "prefill-0") == 3


def test_versions_that_are_too_far_apart_are_refused_by_name() -> None:
    with pytest.raises(IncompatibleError, match="router speaks protocols 2 to 3, prefill-0 speaks 4 to 5"):
        agree(Protocols(2, 3), "router", Protocols(4, 5), "prefill-0")


def test_a_process_that_has_not_said_what_it_speaks_is_refused() -> None:
    with pytest.raises(IncompatibleError, match="prefill-0 speaks 0 to 0"):
        agree(Protocols(), "router", Protocols(0, 0), "prefill-0")


def test_a_version_speaks_at_most_its_number_and_the_one_before() -> None:
    assert 0 <= NEWEST - OLDEST <= 1
