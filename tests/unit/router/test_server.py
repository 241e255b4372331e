"""The router as a whole, where its process would be too much."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.http.server import HttpServer
from router.server import RouterServer
from tandem.core import config as configuration


def test_a_router_whose_http_server_ends_by_itself_ends_too(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or clients would wait in the listening socket for ever, and the supervisor would hear that all is well."""

    async def breaks(self: HttpServer, sockets: object = None) -> None:
        raise RuntimeError("no protocol")

    monkeypatch.setattr(HttpServer, "serve", breaks)
    server = RouterServer(configuration.load(None), model_dir=checkpoint)
    server.start()
    assert server.wait_closed(10)
    assert server.has_failed
