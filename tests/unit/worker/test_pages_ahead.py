"""KV pages are resident before they are used."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from tandem.core.errors import ConfigError
from tandem.engine import arena as arena_module
from tandem.engine.arena import KVArena
from tandem.engine.huge_pages import map_memory, populate
from tandem.engine.layout import KVLayout
from tandem.worker.cpu.pages_ahead import PagesAhead
from tests.support.waiting import wait_until

# 64 KiB a layer: 32 of them are a huge page.
LAYOUT = KVLayout(2, 4, 64, 32, "float32")


@contextlib.contextmanager
def running(arena: KVArena) -> Iterator[PagesAhead]:
    ahead = PagesAhead(arena, "ahead")
    ahead.start()
    try:
        yield ahead
    finally:
        ahead.stop()


def wait_for(ahead: PagesAhead, num_pages: int) -> None:
    wait_until(lambda: ahead.num_ready, f"{num_pages} pages", wanted=lambda num: num >= num_pages)


def settled(ahead: PagesAhead) -> int:
    """How many are ready when no more have come for a while: that nothing follows can only be waited for."""
    before = -1
    while before != ahead.num_ready:
        before = ahead.num_ready
        time.sleep(0.2)
    return before


def num_resident(tensor: torch.Tensor) -> int:
    """Its bytes, of the maps that hold it, that are resident."""
    total, inside = 0, False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            head = line.split()[0]
            if "-" in head and not head.endswith(":"):
                begin, end = (int(number, 16) for number in head.split("-"))
                inside = begin < tensor.data_ptr() + tensor.nbytes and end > tensor.data_ptr()
            elif inside and head == "Rss:":
                total += int(line.split()[1]) * 1024
    return total


@pytest.mark.long
def test_an_eighth_is_ready_beyond_what_was_used_at_rest_and_half_of_that_at_work() -> None:
    arena = KVArena(LAYOUT, 2048)  # 256 MiB
    before = num_resident(arena.tensor)
    with running(arena) as ahead:
        wait_for(ahead, 256)
        assert settled(ahead) == 256
        assert num_resident(arena.tensor) - before >= 256 * LAYOUT.page_bytes
        ahead.used(128)  # 128 are left: nothing to do
        assert settled(ahead) == 256
        ahead.used(1000)
        ahead.used(10)  # nothing to do
        wait_for(ahead, 1128)
        assert settled(ahead) < 1128 + 32
        ahead.rest()
        wait_for(ahead, 1256)
        assert settled(ahead) < 1256 + 32
        ahead.used(2048)
        wait_for(ahead, 2048)
        assert num_resident(arena.tensor) - before >= 2048 * LAYOUT.page_bytes


def test_all_are_ready_where_they_are_preallocated() -> None:
    arena = KVArena(LAYOUT, 256)  # 32 MiB
    before = num_resident(arena.tensor)
    arena.preallocate()
    assert num_resident(arena.tensor) - before >= 256 * LAYOUT.page_bytes


def test_memory_that_is_not_there_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(memory: torch.Tensor) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(arena_module, "populate", full)
    with pytest.raises(ConfigError, match=r"cannot make 131072 bytes .*: Cannot allocate memory; lower"):
        KVArena(LAYOUT, 1).preallocate()


def num_wakes(name: str) -> int:
    """How often a thread of this process has run and waited again."""
    (tid,) = (thread.native_id for thread in threading.enumerate() if thread.name == name)
    with open(f"/proc/self/task/{tid}/status") as lines:
        return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))


def test_a_thread_of_the_lowest_priority_sleeps_while_there_is_nothing_to_take() -> None:
    """Else it would hold Python's lock while others have its core, at each step."""
    arena = KVArena(LAYOUT, 256)
    with running(arena) as ahead:
        ahead.used(8)
        ahead.rest()
        wait_for(ahead, 40)
        settled(ahead)
        before = num_wakes("ahead")
        for _ in range(300):
            ahead.used(8)
            time.sleep(0.0005)  # it would run in it
            ahead.rest()
        assert num_wakes("ahead") == before
        ahead.used(256)
        wait_for(ahead, 256)


@pytest.mark.long
def test_work_that_begins_first_has_half_of_it() -> None:
    arena = KVArena(LAYOUT, 2048)
    ahead = PagesAhead(arena, "ahead")
    ahead.used(0)
    ahead.start()
    try:
        wait_for(ahead, 128)
        assert settled(ahead) == 128
    finally:
        ahead.stop()


def test_what_lies_there_stays() -> None:
    memory = map_memory(8 << 20)
    memory[5000:6000] = 7
    populate(memory[4500:5500])
    populate(memory)
    assert memory.sum() == 7000


def test_it_ends_in_the_middle() -> None:
    arena = KVArena(LAYOUT, 4096)
    with running(arena) as ahead:
        ahead.used(4096)
    assert not ahead._thread.is_alive()
    assert ahead.num_ready < 4096


def test_what_the_system_cannot_do_is_said_and_not_fatal(caplog: pytest.LogCaptureFixture) -> None:
    class Arena(KVArena):
        def populate(self, first_page: int, end_page: int) -> None:
            raise OSError(22, "Invalid argument")

    with running(Arena(LAYOUT, 64)) as ahead:
        ahead._thread.join(10)
        assert not ahead._thread.is_alive()
    assert "not made resident ahead of use: [Errno 22] Invalid argument" in caplog.text
