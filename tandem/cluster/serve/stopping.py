"""Asks a cluster to stop, until a supervisor confirms that it has."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import grpc

from tandem.core.errors import WorkerLostError
from tandem.rpc.channel import make_channel
from tandem.rpc.v1 import supervisor_pb2, supervisor_pb2_grpc

if TYPE_CHECKING:
    from tandem.rpc.v1.supervisor_pb2_grpc import SupervisorControlAsyncStub

STOP_S = 20.0
"""What the supervisor may take to stop everything once requests have ended."""

_RETRY_S = 0.2


async def stop_cluster(address: str, grace_s: float, find: Callable[[], Awaitable[str]]) -> None:
    """Return when everything has stopped. The supervisor may end meanwhile: the next one goes on with it.

    Args:
        address: of the supervisor; empty: not known yet.
        grace_s: what requests under way may take.
        find: tells the address of the supervisor that is there now, and waits for it if need be.

    Raises:
        TandemError: nobody confirms that everything has stopped.
    """
    try:
        async with asyncio.timeout(grace_s + STOP_S):
            while not (address and await _ask(address, grace_s)):
                address = await find()
    except TimeoutError as error:
        raise WorkerLostError(f"the supervisor did not answer within {grace_s + STOP_S:.0f} s") from error


async def _ask(address: str, grace_s: float) -> bool:
    """`False`: the supervisor has ended, and not because everything had."""
    async with make_channel(address) as channel:
        stub: SupervisorControlAsyncStub = supervisor_pb2_grpc.SupervisorControlStub(channel)
        try:
            await stub.Shutdown(supervisor_pb2.ShutdownRequest(grace_s=grace_s))
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise WorkerLostError(f"the supervisor at {address}: {error.code().name} {error.details()}") from error
            await asyncio.sleep(_RETRY_S)
            return False
    return True
