"""Workers of one host that lend each other their threads: real processes, and the file in which they meet."""

from __future__ import annotations

import os
import signal
import struct
import time
from pathlib import Path

import pytest

from tests.scenarios.client import ask
from tests.scenarios.processes import running

_LONG = 300
_CONFIG = {"model": {"served_names": ["tiny"]}}


def slots_of(path: Path) -> list[tuple[int, bool]]:
    """Threads of each worker that has a slot, and whether it computes."""
    words = struct.unpack("=2048q", path.read_bytes())
    now = time.monotonic_ns()
    return [(words[at], words[at + 1] > now) for at in range(8, 8 * (words[0] + 1), 8) if words[at]]


def followers_of(pid: int) -> list[str]:
    names = [(task / "comm").read_text().strip() for task in Path(f"/proc/{pid}/task").iterdir()]
    return [name for name in names if name.startswith("kernel-")]


def weights_of(pid: int) -> set[tuple[str, str]]:
    """Inode and rights of the memory with the weights that a process has."""
    lines = (line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
    return {(line[4], line[1]) for line in lines if line[-2].startswith("/memfd:tandem-weights-")}


def test_decode_computes_on_the_threads_of_a_prefill_worker_that_rests(tmp_path: Path) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core: there is nothing to lend")
    with running(tmp_path, config=_CONFIG | {"scheduling": {"mixed_pool": False}}) as cluster:
        decode = cluster.workers["decode-0"]
        assert slots_of(cluster.core_shares) == [(1, False), (1, False)]
        assert followers_of(decode.pid) == []
        alone = ask(cluster.url, "The", model="tiny", streamed=True, max_tokens=_LONG, ignore_eos=True)
        assert alone.done, alone
        assert followers_of(decode.pid) == ["kernel-1"]
        ((inode, rights),) = weights_of(decode.pid)
        assert rights == "r--s"
        assert weights_of(cluster.workers["prefill-0"].pid) == {(inode, rights)}, "one copy for both"
        cluster.wait_for(lambda: slots_of(cluster.core_shares) == [(1, False), (1, False)], "rest")

        # A dead worker's slot is the next one's, and one that leaves in order gives its slot back.
        cluster.workers["prefill-0"].end()
        cluster.start_worker("prefill").wait_ready()
        cluster.publish()
        cluster.wait_healthy()
        assert slots_of(cluster.core_shares) == [(1, False), (1, False)]
        assert weights_of(cluster.workers["prefill-0"].pid) == {(inode, rights)}, "whoever had made it"
        again = ask(cluster.url, "The", model="tiny", streamed=True, max_tokens=_LONG, ignore_eos=True)
        assert again.token_ids == alone.token_ids
        decode.kill(signal.SIGTERM)
        decode.popen.wait()
        assert slots_of(cluster.core_shares) == [(1, False)]


@pytest.mark.faults
def test_no_sharing_where_it_is_switched_off(tmp_path: Path) -> None:
    config = {"model": {**_CONFIG["model"], "share_weights": False}, "scheduling": {"share_cores": False}}
    with running(tmp_path, config=config) as cluster:
        assert ask(cluster.url, "The", model="tiny", streamed=True, max_tokens=50).done
        assert followers_of(cluster.workers["decode-0"].pid) == []
        assert weights_of(cluster.workers["decode-0"].pid) == set()
        assert not list(cluster.core_shares.parent.glob(f"{cluster.core_shares.name}*"))
