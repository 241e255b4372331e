"""A gRPC server of the product's own making, for a `with` block in the test's loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from tandem.rpc.channel import bind, make_server
from tandem.rpc.security import Security


@asynccontextmanager
async def serving(
    add: Callable[[Any, Any], None], servicer: Any, *own: Security | None, host: str = "127.0.0.1"
) -> AsyncIterator[int]:
    """Serve `servicer` (`add`: gRPC's `add_..._to_server`), secured by `own`; the port."""
    server = make_server()
    add(servicer, server)
    port = bind(server, host, 0, *own)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)
