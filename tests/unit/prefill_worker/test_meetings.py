"""Pairing ahead of need: who is met, and how often."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from prefill_worker.meetings import Meetings
from tandem.core.errors import WorkerLostError
from tandem.rpc.v1 import common_pb2 as pb


class Peers:
    """Decode workers, none of which can be reached."""

    def __init__(self) -> None:
        self.peers: dict[str, Any] = {}
        self.num_calls = self.num_under_way = self.most_under_way = 0

    async def get(self, info: pb.WorkerInfo) -> None:
        self.num_calls += 1
        self.num_under_way += 1
        self.most_under_way = max(self.most_under_way, self.num_under_way)
        await asyncio.sleep(0.001)
        self.num_under_way -= 1
        raise WorkerLostError(f"no way to {info.worker_id}")


async def test_who_is_named_again_and_again_is_tried_once_at_a_time() -> None:
    """By each router, with each change of its cluster. One that cannot be reached takes a whole time-out."""
    peers, tasks = Peers(), list[asyncio.Task[None]]()
    connections = SimpleNamespace()  # nobody gets so far
    meetings = Meetings(
        cast(Any, peers), cast(Any, connections), lambda work: tasks.append(asyncio.create_task(work))
    )
    decode = [pb.WorkerInfo(worker_id=f"decode-{n}", incarnation=f"decode-{n}#1") for n in range(20)]
    for _ in range(8):
        meetings.meet(decode)
    await asyncio.gather(*tasks)
    assert len(tasks) == peers.num_calls == 20
    assert peers.most_under_way == 4
    meetings.meet(decode)
    await asyncio.gather(*tasks)
    assert peers.num_calls == 40, "later they may be reached"
