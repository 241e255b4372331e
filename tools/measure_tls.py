"""What mutual TLS costs on the control plane: the same calls plain and encrypted, in turn, in one run; prints JSON.

    python tools/measure_tls.py [--rounds 9] [--messages 2000] [--calls 300]

A server in a process of its own has a plain and a TLS port and answers at once. Measured are a `Session` stream of
token events, the two calls of a handoff that stand between its last byte and its acknowledgement (`Attach`, `Commit`
with the digests of 64 pages of 16 layers), and a first call on a new connection, which pays the handshake.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc

from tandem.cluster.certs import make_certificates
from tandem.core.config import SecurityConfig
from tandem.rpc.channel import bind, make_channel, make_server
from tandem.rpc.permissions import PeerRole
from tandem.rpc.security import Security
from tandem.rpc.v1 import common_pb2, decode_pb2
from tandem.rpc.v1.decode_pb2_grpc import DecodeServiceStub

HOST = "127.0.0.1"
TOKENS_PER_MESSAGE = 16  # a step of 16 sequences
NUM_PAGES, NUM_LAYERS = 64, 16
PLAIN = Security(SecurityConfig("off"), None, HOST)


@dataclass(frozen=True)
class Ports:
    plain: int
    tls: int


async def _session(commands: AsyncIterator[decode_pb2.DecodeCommand], _: Any) -> AsyncIterator[decode_pb2.DecodeEvents]:
    """Streams as many messages as a `Reserve`'s priority says."""
    message = decode_pb2.DecodeEvents(
        events=[
            decode_pb2.DecodeEvent(
                token=common_pb2.Token(request_id=f"cmpl-{n:032x}", attempt=1, index=n, token_id=1000 + n)
            )
            for n in range(TOKENS_PER_MESSAGE)
        ],
        status=common_pb2.WorkerStatus(num_running=TOKENS_PER_MESSAGE),
    )
    async for command in commands:
        for _n in range(command.reserve.priority):
            yield message


async def _attach(_request: decode_pb2.AttachRequest, _context: Any) -> decode_pb2.AttachReply:
    return decode_pb2.AttachReply(ok=True, lease_s=10)


async def _commits(
    calls: AsyncIterator[decode_pb2.CommitCall], _context: Any
) -> AsyncIterator[decode_pb2.CommitAnswer]:
    async for _ in calls:
        yield decode_pb2.CommitAnswer(ok=True)


def _handlers() -> grpc.GenericRpcHandler[Any, Any]:
    """As much of a decode worker as is measured; answers at once."""
    reply = {"response_serializer": lambda message: message.SerializeToString()}
    return grpc.method_handlers_generic_handler(
        "tandem.v1.DecodeService",
        {
            "Session": grpc.stream_stream_rpc_method_handler(
                _session, request_deserializer=decode_pb2.DecodeCommand.FromString, **reply
            ),
            "Attach": grpc.unary_unary_rpc_method_handler(
                _attach, request_deserializer=decode_pb2.AttachRequest.FromString, **reply
            ),
            "Commits": grpc.stream_stream_rpc_method_handler(
                _commits, request_deserializer=decode_pb2.CommitCall.FromString, **reply
            ),
        },
    )


def _member(directory: Path, role: PeerRole) -> Security:
    return Security(SecurityConfig("on", str(directory)), role, HOST)


def _serve(directory: Path, ready: Connection) -> None:
    async def main() -> None:
        server = make_server()
        server.add_generic_rpc_handlers((_handlers(),))
        ports = Ports(bind(server, HOST, 0, PLAIN), bind(server, HOST, 0, _member(directory, PeerRole.DECODE)))
        await server.start()
        ready.send(ports)
        await server.wait_for_termination()

    asyncio.run(main())


async def _stream_s(port: int, own: Security, num_messages: int) -> float:
    """Seconds from asking to the last message."""
    async with make_channel(f"{HOST}:{port}", own) as channel:
        stub: Any = DecodeServiceStub(channel)  # its stubs want all requests beforehand
        call = stub.Session()
        await call.write(decode_pb2.DecodeCommand(reserve=decode_pb2.Reserve(priority=1)))
        await call.read()
        began_s = time.perf_counter()
        await call.write(decode_pb2.DecodeCommand(reserve=decode_pb2.Reserve(priority=num_messages)))
        for _ in range(num_messages):
            await call.read()
        took_s = time.perf_counter() - began_s
        call.cancel()
        return took_s


async def _handoff_s(port: int, own: Security, num_calls: int) -> float:
    """Median seconds of an `Attach` and a commit, one after the other."""
    attach = decode_pb2.AttachRequest(request_id="r", attempt=1, grant_id="decode-0/1", sender_incarnation="prefill-0")
    commit = decode_pb2.Commit(
        request_id="r",
        attempt=1,
        pages=range(NUM_PAGES),
        layers=[decode_pb2.LayerDigests(xxh3=range(1 << 40, (1 << 40) + NUM_PAGES)) for _ in range(NUM_LAYERS)],
    )
    took: list[float] = []
    async with make_channel(f"{HOST}:{port}", own) as channel:
        stub: Any = DecodeServiceStub(channel)
        commits = stub.Commits()
        await stub.Attach(attach)
        for _ in range(num_calls):
            began_s = time.perf_counter()
            await stub.Attach(attach)
            await commits.write(decode_pb2.CommitCall(commit=commit))
            await commits.read()
            took.append(time.perf_counter() - began_s)
        commits.cancel()
    return statistics.median(took)


async def _first_call_s(port: int, own: Security) -> float:
    """Seconds of the first call on a new connection."""
    began_s = time.perf_counter()
    async with make_channel(f"{HOST}:{port}", own) as channel:
        await DecodeServiceStub(channel).Attach(decode_pb2.AttachRequest())
        return time.perf_counter() - began_s


async def measure(directory: Path, ports: Ports, *, rounds: int, messages: int, calls: int) -> dict[str, Any]:
    """Plain and TLS in turn, so that whatever else the machine does hits both; medians over rounds."""
    sides = {
        "plain": (ports.plain, dict.fromkeys(PeerRole, PLAIN)),
        "tls": (ports.tls, {role: _member(directory, role) for role in PeerRole}),
    }
    took: dict[str, dict[str, list[float]]] = {}
    for _ in range(rounds):
        for side, (port, own) in sides.items():
            figures = {
                "stream_message_s": await _stream_s(port, own[PeerRole.ROUTER], messages) / messages,
                "attach_and_commit_s": await _handoff_s(port, own[PeerRole.PREFILL], calls),
                "first_call_s": await _first_call_s(port, own[PeerRole.PREFILL]),
            }
            for name, value in figures.items():
                took.setdefault(name, {}).setdefault(side, []).append(value)
    return {
        name: {
            **{f"{side}_median": statistics.median(values) for side, values in by_side.items()},
            "ratio": statistics.median(t / p for t, p in zip(by_side["tls"], by_side["plain"], strict=True)),
        }
        for name, by_side in took.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what mutual TLS costs; prints JSON, times in seconds.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--messages", type=int, default=2000, help="of one stream, 16 tokens each")
    parser.add_argument("--calls", type=int, default=300, help="handoffs of one round")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        certificates = make_certificates(Path(directory) / "certs", days=1).directory
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        server = context.Process(target=_serve, args=(certificates, theirs), daemon=True)
        server.start()
        try:
            figures = asyncio.run(
                measure(
                    certificates,
                    ours.recv(),
                    rounds=options.rounds,
                    messages=options.messages,
                    calls=options.calls,
                )
            )
        finally:
            server.terminate()
            server.join()
    print(json.dumps({"rounds": options.rounds, **figures}, indent=2))


if __name__ == "__main__":
    main()
