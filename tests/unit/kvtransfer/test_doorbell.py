"""What wakes a transfer thread: at once, from anywhere, once for each ring, and at the latest when its time comes."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvtransfer.doorbell import Doorbell
from tandem.core.errors import TransportError


@pytest.fixture
def door() -> Iterator[Doorbell]:
    door = Doorbell("127.0.0.1")
    yield door
    door.close()


@pytest.fixture
def far() -> Iterator[Doorbell]:
    far = Doorbell("127.0.0.1")
    yield far
    far.close()


def rings(door: Doorbell, far: Doorbell) -> dict[str, Callable[[], None]]:
    return {"own": door.ring, "peer": lambda: far.ring_at(door.host, door.port)}


@pytest.mark.parametrize("who", ["own", "peer"])
def test_a_ring_wakes_and_is_heard_once(door: Doorbell, far: Doorbell, who: str) -> None:
    for _ in range(2):
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(door.wait, None)
            rings(door, far)[who]()
            assert waiting.result(5)
        assert not door.wait(0.0)
    assert door.num_from_peers == (2 if who == "peer" else 0)


@pytest.mark.parametrize("who", ["own", "peer"])
def test_rings_before_the_wait_count_and_are_taken_together(door: Doorbell, far: Doorbell, who: str) -> None:
    for _ in range(10):
        rings(door, far)[who]()
    assert door.wait(5)
    assert not door.wait(0.0)


def test_more_rings_than_are_taken_together_wake_again(door: Doorbell, far: Doorbell) -> None:
    for _ in range(100):
        far.ring_at(door.host, door.port)
    assert door.wait(5)
    assert door.wait(5)
    assert not door.wait(0.0)


def test_without_a_ring_the_time_passes(door: Doorbell) -> None:
    began_s = time.monotonic()
    assert not door.wait(0.03)
    assert time.monotonic() - began_s >= 0.03
    began_s = time.monotonic()
    for _ in range(20):
        assert not door.wait(50e-6)
    assert time.monotonic() - began_s < 0.02 * 20, "counted in milliseconds"


def test_rings_that_nobody_can_hear_are_lost(door: Doorbell) -> None:
    gone = Doorbell("127.0.0.1")
    port = gone.port
    gone.close()
    for host, at in (("127.0.0.1", port), ("127.0.0.1", 0), ("::1", port), ("203.0.113.1", 9)):
        door.ring_at(host, at)
    assert not door.wait(0.05)


def test_a_door_of_ipv6() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        six, other = Doorbell("::1"), Doorbell("::1")
    except TransportError as error:
        pytest.skip(f"no IPv6 here: {error}")
    other.ring_at(six.host, six.port)
    assert six.wait(5)
    six.close()
    other.close()


@pytest.mark.parametrize("host", ["203.0.113.1", "no such host"])
def test_another_hosts_address_is_refused(host: str) -> None:
    with pytest.raises(TransportError, match=f"cannot listen on {host}"):
        Doorbell(host)


def test_it_closes_twice_and_rings_no_more(door: Doorbell, far: Doorbell) -> None:
    door.close()
    door.close()
    door.ring()
    far.ring_at(door.host, door.port)


def test_nobody_rings_at_a_descriptor_that_is_closed(door: Doorbell, monkeypatch: pytest.MonkeyPatch) -> None:
    """It might belong to somebody else by then: a close waits for rings that are under way."""
    rings, goes_on, write = threading.Event(), threading.Event(), os.eventfd_write

    def slow_write(descriptor: int, value: int) -> None:
        rings.set()
        assert goes_on.wait(5)
        write(descriptor, value)

    monkeypatch.setattr(os, "eventfd_write", slow_write)
    with ThreadPoolExecutor(2) as pool:
        ringing = pool.submit(door.ring)
        assert rings.wait(5)
        closing = pool.submit(door.close)
        with pytest.raises(TimeoutError):
            closing.result(0.1)
        goes_on.set()
        ringing.result(5)
        closing.result(5)


def test_one_that_nobody_closes_leaves_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        Doorbell("127.0.0.1")
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
