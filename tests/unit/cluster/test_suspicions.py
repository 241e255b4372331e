"""A suspicion reaches the supervisor without the router waiting for it."""

from __future__ import annotations

import logging
import queue
import threading

import pytest

from router.worker_key import WorkerKey
from tandem.cluster.suspicions import Suspicions


def test_the_caller_neither_waits_nor_fails_and_the_next_one_is_told(caplog: pytest.LogCaptureFixture) -> None:
    told: queue.Queue[tuple[str, str]] = queue.Queue()
    answers = threading.Event()

    def tell(worker_id: str, incarnation: str) -> None:
        assert answers.wait(10)
        if worker_id == "prefill-0":
            raise ConnectionError("no control store")
        told.put((worker_id, incarnation))

    suspicions = Suspicions(tell)
    with caplog.at_level(logging.ERROR):
        suspicions.add(WorkerKey("prefill-0", "a"))  # would hang here for ever, were it on this thread
        suspicions.add(WorkerKey("prefill-1", "b"))
        answers.set()
        assert told.get(timeout=10) == ("prefill-1", "b")
    assert "not told that writer prefill-0/a is suspected" in caplog.text
