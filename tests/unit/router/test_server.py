"""The router as a whole, where its process would be too much."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from router.http.server import HttpServer
from router.server import RouterServer
from tandem.core import config as configuration
from tests.support.slices import SHORT_NS, in_a_thread, needs_slices, slice_ns


def test_a_router_whose_http_server_ends_by_itself_ends_too(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or clients would wait in the listening socket for ever, and the supervisor would hear that all is well."""

    async def breaks(self: HttpServer, sockets: object = None) -> None:
        raise RuntimeError("no protocol")

    monkeypatch.setattr(HttpServer, "serve", breaks)
    server = RouterServer(configuration.load(None), model_dir=checkpoint)
    server.start()
    assert server.wait_closed(10)
    assert server.has_failed


@needs_slices
def test_its_thread_gets_a_core_soon(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []

    async def tells(self: HttpServer, sockets: object = None) -> None:
        told.extend((slice_ns(), await asyncio.to_thread(slice_ns)))

    monkeypatch.setattr(HttpServer, "serve", tells)
    server = RouterServer(configuration.load(None), model_dir=checkpoint)
    server.start()
    assert server.wait_closed(10)
    assert told == [SHORT_NS, in_a_thread(slice_ns)], "what it gives away computes"
