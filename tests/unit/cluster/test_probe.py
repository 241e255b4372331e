"""Whether a Ray lets everybody in, asked of what answers like its control store; `test_token.py` asks a real one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest

from tandem.cluster.ray import probe
from tandem.core.errors import ConfigError
from tandem.core.ports import free_port


@contextmanager
def control_store(*, wants_token: bool) -> Iterator[str]:
    """Its address."""

    def check_alive(_: bytes, context: grpc.ServicerContext) -> bytes:
        if wants_token:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token")
        return b""

    handlers = {"CheckAlive": grpc.unary_unary_rpc_method_handler(check_alive, bytes, bytes)}
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("ray.rpc.NodeInfoGcsService", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def test_one_that_lets_anyone_in_beyond_this_host_is_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    with control_store(wants_token=False) as address:
        probe.require_token(address)  # nobody else reaches it
        monkeypatch.setattr(probe, "is_loopback", lambda _: False)
        says = f"Ray at {address} lets in whoever reaches its ports.*RAY_AUTH_MODE=token"
        with pytest.raises(ConfigError, match=says):
            probe.require_token(address)


def test_one_that_wants_its_token_is_joined_wherever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "is_loopback", lambda _: False)
    with control_store(wants_token=True) as address:
        probe.require_token(address)


def test_where_no_ray_answers_that_is_said() -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(ConfigError, match=f"no Ray answers at {address} .*; look there"):
        probe.asks_for_token(address, remedy="look there")
