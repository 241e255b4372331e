"""Whether a decode worker guesses at all, by its device."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from decode_worker.worker import _guesses
from tandem.core import config as configuration
from tandem.core.clock import VirtualClock
from tandem.engine.loader import Types
from tandem.worker.request import RequestLimits


def parts_of(*, on_cpu: bool) -> Any:
    types = Types.all_of("float32")
    return SimpleNamespace(
        config=configuration.load(None, {"speculation.lookup_tokens": 4}),
        draft=None,
        request_limits=RequestLimits(100, 64, frozenset([2]), 4),
        engine=SimpleNamespace(types=types, on_cpu=on_cpu),
        scheduler=SimpleNamespace(pool=SimpleNamespace(page_size=16)),
    )


def test_where_no_rows_are_to_spare_nothing_is_guessed_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever guesses plans no step ahead."""
    assert _guesses(cast(Any, parts_of(on_cpu=True)), VirtualClock()) is not None
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert _guesses(cast(Any, parts_of(on_cpu=False)), VirtualClock()) is None
    assert "speculation.lookup_tokens has no effect here" in caplog.text
