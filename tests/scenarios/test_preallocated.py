"""A worker whose memory of pages is there from the start."""

from __future__ import annotations

from pathlib import Path

import psutil

from tests.scenarios.processes import ProcessCluster

ARENA_BYTES = 1 << 30  # far more than all else that a process may take meanwhile, as a compiler


def test_the_memory_of_pages_is_taken_before_a_worker_is_ready(tmp_path: Path) -> None:
    sizes = []
    for preallocate in (False, True):
        directory = tmp_path / str(preallocate)
        directory.mkdir()
        cluster = ProcessCluster(directory, config={"cache": {"preallocate": preallocate}})
        worker = cluster.start_worker("decode", 0, "--kv-bytes", str(ARENA_BYTES))
        try:
            worker.wait_ready()
            sizes.append(psutil.Process(worker.pid).memory_info().rss)
        finally:
            worker.end()
    assert sizes[1] - sizes[0] > ARENA_BYTES / 2, "an eighth is ready at rest"
