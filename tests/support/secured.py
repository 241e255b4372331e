"""Calls of a secured cluster by members of any role, and by strangers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc

from tandem.core.config import SecurityConfig
from tandem.rpc.channel import make_channel
from tandem.rpc.permissions import PeerRole
from tandem.rpc.security import Security

PLAIN = Security(SecurityConfig("off"), None, "127.0.0.1")
"""Of whoever has no certificate."""


def members_of(certificates: Path) -> dict[PeerRole, Security]:
    """Whoever has the certificate of a role."""
    config = SecurityConfig("on", str(certificates))
    return {role: Security(config, role, "127.0.0.1") for role in PeerRole}


def outcome(address: str, own: Security, make_stub: Any, method: str, request: Any) -> grpc.StatusCode:
    """How a call ends."""

    async def call() -> grpc.StatusCode:
        async with make_channel(address, own) as channel:
            try:
                await getattr(make_stub(channel), method)(request, timeout=10)
            except grpc.aio.AioRpcError as error:
                return error.code()
        return grpc.StatusCode.OK

    return asyncio.run(call())
