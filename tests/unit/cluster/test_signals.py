"""Signals to `tandem serve`, in this very process."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator

import pytest

from tandem.cluster.serve.signals import HANDLED, StopRequested, StopSignals


@pytest.fixture
def heard() -> list[str]:
    return []


@pytest.fixture
def signals(heard: list[str]) -> Iterator[StopSignals]:
    before = {number: signal.getsignal(number) for number in HANDLED}
    signals = StopSignals(lambda: heard.append("stop"), lambda: heard.append("force"))
    signals.install()
    yield signals
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_first_interrupts_at_once(signals: StopSignals, heard: list[str]) -> None:
    with pytest.raises(StopRequested):
        signal.raise_signal(signal.SIGTERM)
    assert heard == ["stop"]


def postponed(signals: StopSignals, *begun: Callable[[], object]) -> None:
    with signals.postponed():
        for begin in begun:
            begin()


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_what_begins_while_they_are_postponed_is_known_before_it_is_to_be_ended(
    signals: StopSignals, heard: list[str]
) -> None:
    known: list[str] = []
    with pytest.raises(StopRequested):
        postponed(signals, interrupt, lambda: known.append("the supervisor"))
    assert (known, heard) == (["the supervisor"], ["stop"])


def test_the_second_is_heard_even_then(signals: StopSignals, heard: list[str]) -> None:
    with pytest.raises(StopRequested):
        postponed(signals, interrupt, interrupt)
    assert heard[:2] == ["stop", "force"]


def test_a_failure_of_what_begins_is_told_and_not_the_signal(signals: StopSignals) -> None:
    def fail() -> None:
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        postponed(signals, interrupt, fail)


def test_nothing_is_interrupted_where_none_came(signals: StopSignals, heard: list[str]) -> None:
    postponed(signals)
    assert not heard
    with pytest.raises(StopRequested):
        signal.raise_signal(signal.SIGTERM)


async def test_a_loop_that_waits_is_told(signals: StopSignals) -> None:
    waiting = asyncio.create_task(signals.wait())
    await asyncio.sleep(0)
    signal.raise_signal(signal.SIGTERM)
    await asyncio.wait_for(waiting, 60)


def test_a_clean_up_goes_on(signals: StopSignals, heard: list[str]) -> None:
    signals.begin_cleanup()
    signal.raise_signal(signal.SIGTERM)
    assert heard == ["stop"]
