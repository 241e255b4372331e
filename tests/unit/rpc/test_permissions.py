"""The table of who may call what is whole, and every server keeps to it: each (role, method) over a real connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from tandem.core.config import SecurityConfig
from tandem.rpc.channel import bind, make_channel, make_server
from tandem.rpc.permissions import ALLOWED, PeerRole, may_call
from tandem.rpc.security import Security
from tandem.rpc.v1 import control_pb2, decode_pb2, prefill_pb2, supervisor_pb2

_FILES = (control_pb2, decode_pb2, prefill_pb2, supervisor_pb2)
SERVICES: list[ServiceDescriptor] = [s for f in _FILES for s in f.DESCRIPTOR.services_by_name.values()]
METHODS: dict[str, MethodDescriptor] = {f"/{s.full_name}/{m.name}": m for s in SERVICES for m in s.methods}

PAIRS = [(method, role) for method in METHODS for role in PeerRole]


def test_the_table_has_every_method_and_no_other() -> None:
    assert set(ALLOWED) == set(METHODS)


def test_every_method_is_somebodys() -> None:
    assert all(ALLOWED.values())


def test_what_changes_anything_is_one_roles_own() -> None:
    shared = {method for method, roles in ALLOWED.items() if len(roles) > 1}
    assert {method.rpartition("/")[2] for method in shared} == {"Describe", "Status", "RouterStatus"}


def test_the_figure_of_the_design() -> None:
    """Who calls whom when a request is served, and the routers each other."""

    def methods_of(role: PeerRole) -> set[str]:
        return {method.rpartition(".")[2] for method, roles in ALLOWED.items() if role in roles}

    assert methods_of(PeerRole.ROUTER) == {
        "PrefillService/Session", "DecodeService/Session", "RouterControl/AskRouter"
    }  # fmt: skip
    assert methods_of(PeerRole.DECODE) == {"PrefillService/StopWrites"}
    sent = {"Pair", "AwaitGreeting", "Attach", "Commits", "ConfirmIdle"}
    assert methods_of(PeerRole.PREFILL) == {f"DecodeService/{name}" for name in sent}
    assert {m for m in methods_of(PeerRole.CLIENT) if "Supervisor" not in m} == {
        "WorkerControl/Describe", "WorkerControl/Status", "RouterControl/RouterStatus"
    }  # fmt: skip


def test_unknown_methods_and_certificates_without_a_role_get_nothing() -> None:
    assert not any(may_call(role, "/tandem.v1.WorkerControl/Reboot") for role in PeerRole)
    assert not any(may_call(None, method) for method in METHODS)


# -- over the wire


def _handler(method: MethodDescriptor, called: Callable[[], None]) -> grpc.RpcMethodHandler[Any, Any]:
    """Answers with an empty message, as many as there are requests where both ends stream."""
    request, reply = GetMessageClass(method.input_type), GetMessageClass(method.output_type)

    async def unary(_request: Any, _context: Any) -> Any:
        called()
        return reply()

    async def stream(requests: Any, _context: Any) -> AsyncIterator[Any]:
        called()
        if method.client_streaming:
            async for _ in requests:
                yield reply()
        else:
            yield reply()

    kind = "stream_stream" if method.client_streaming else "unary_stream" if method.server_streaming else "unary_unary"
    make = getattr(grpc, f"{kind}_rpc_method_handler")
    behaviour = stream if method.server_streaming else unary
    handler: grpc.RpcMethodHandler[Any, Any] = make(
        behaviour, request_deserializer=request.FromString, response_serializer=reply.SerializeToString
    )
    return handler


async def _nothing() -> AsyncIterator[Any]:
    """Until the call ends."""
    await asyncio.Event().wait()
    yield


class _World:
    """One TLS server with every method of the wire contract, and a channel for each role."""

    def __init__(self, certificates: Path) -> None:
        self.calls: list[str] = []
        self._certificates = certificates
        self._server = make_server()
        for service in SERVICES:
            handlers = {
                m.name: _handler(m, lambda name=f"/{service.full_name}/{m.name}": self.calls.append(name))  # type: ignore[misc]
                for m in service.methods
            }
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))
        self.port = bind(self._server, "127.0.0.1", 0, self._member(PeerRole.DECODE))
        self.channels = {r: make_channel(f"127.0.0.1:{self.port}", self._member(r)) for r in PeerRole}

    def _member(self, role: PeerRole) -> Security:
        return Security(SecurityConfig("on", str(self._certificates)), role, "127.0.0.1")

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self.channels.values()))
        await self._server.stop(None)

    async def call(self, role: PeerRole, name: str) -> int:
        """Call with one empty request; how many replies came. Raises gRPC's error.

        Who may not call sends nothing in a stream: a write that meets the end of its call is an error of its own.
        """
        method = METHODS[name]
        request, reply = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
        make = getattr(self.channels[role], kind)
        call = make(name, request_serializer=request.SerializeToString, response_deserializer=reply.FromString)
        stream = iter([request()]) if role in ALLOWED[name] else _nothing()
        argument = stream if method.client_streaming else request()
        async with asyncio.timeout(10):
            if not method.server_streaming:
                await call(argument)
                return 1
            return len([message async for message in call(argument)])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(certificates: Path) -> AsyncIterator[_World]:
    world = _World(certificates)
    await world.start()
    yield world
    await world.stop()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("method", "role"), PAIRS, ids=[f"{m.rpartition('.')[2]}-{r}" for m, r in PAIRS])
async def test_each_role_at_each_method(world: _World, method: str, role: PeerRole) -> None:
    world.calls.clear()
    if role in ALLOWED[method]:
        assert await world.call(role, method) == 1
        assert world.calls == [method]
        return
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await world.call(role, method)
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert f"{role} may not call" in (caught.value.details() or "")
    assert world.calls == []


@pytest.mark.asyncio(loop_scope="module")
async def test_refusals_are_counted_and_logged(world: _World, caplog: pytest.LogCaptureFixture) -> None:
    method = "/tandem.v1.SupervisorControl/Shutdown"
    for _ in range(2):
        with pytest.raises(grpc.aio.AioRpcError):
            await world.call(PeerRole.PREFILL, method)
    lines = [r.getMessage() for r in caplog.records if method in r.getMessage()]
    assert len(lines) == 2
    assert "prefill" in lines[0]
    assert int(lines[1].rpartition("(")[2].split()[0]) == int(lines[0].rpartition("(")[2].split()[0]) + 1
