"""Watches the supervisor and Ray's control store for `tandem serve` while a cluster runs.

Ray restarts a supervisor that has died. It does not notice one that is stopped or hangs: that one is killed here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc

from tandem.cluster.spec import SupervisorFace
from tandem.cluster.statefile import listens
from tandem.core.clock_jump import ClockJump
from tandem.core.pidfd import kill_exactly
from tandem.rpc.v1 import supervisor_pb2

if TYPE_CHECKING:
    from tandem.rpc.v1.supervisor_pb2_grpc import SupervisorControlAsyncStub

_log = logging.getLogger(__name__)

BEATS_PER_LEASE = 5

RAY_PROBE_S = 2.0
"""Between two looks at Ray's control store."""

MISSED_PROBES = 3
"""So many in a row mean that it is lost, and not just slow."""

_SILENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


async def end_silent_supervisor(stub: SupervisorControlAsyncStub, face: SupervisorFace, lease_s: float) -> None:
    """Return once the supervisor has been silent for `lease_s` and has been killed, so that Ray starts the next one.

    To be called once it has answered: before that it may be adopting what runs, which takes longer.
    """
    loop = asyncio.get_running_loop()
    heard_at, beat_s = loop.time(), lease_s / BEATS_PER_LEASE
    clock_jump = ClockJump(heard_at, turn_s=2 * beat_s, tolerance_s=lease_s / 4)
    while loop.time() - heard_at < lease_s:
        await asyncio.sleep(beat_s)
        answers = await _answers(stub, beat_s)
        now = loop.time()
        jump_s = clock_jump.look(now)
        heard_at = now if answers else min(now, heard_at + jump_s)
    kill_exactly(face.pid, face.started)


async def _answers(stub: SupervisorControlAsyncStub, timeout_s: float) -> bool:
    """A refusal is an answer too."""
    try:
        await stub.GetCluster(supervisor_pb2.GetClusterRequest(), timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        _log.info("the supervisor does not answer: %s", error.code())
        return error.code() not in _SILENT
    return True


async def watch_ray(address: str, say: Callable[[bool], None]) -> None:
    """Look at Ray's control store for ever; `say` is called with `False` when it is lost and `True` when it is back.

    Args:
        address: host:port of the control store.
    """
    num_missed = 0
    while True:
        await asyncio.sleep(RAY_PROBE_S)
        if not await asyncio.to_thread(listens, address, RAY_PROBE_S):
            num_missed += 1
            if num_missed == MISSED_PROBES:
                say(False)
            continue
        if num_missed >= MISSED_PROBES:
            say(True)
        num_missed = 0
