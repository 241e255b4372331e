"""Bad bytes for the router's control service, on a whole router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import orjson
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from router.server import RouterServer
from tandem.core.config import from_dict
from tandem.core.model_path import resolve_model
from tandem.rpc.channel import make_channel
from tandem.rpc.v1 import common_pb2, control_pb2, control_pb2_grpc
from tests.unit.rpc.wire_fuzz import FUZZ, check_answer, methods, payloads, send

METHODS = methods(control_pb2.DESCRIPTOR.services_by_name["RouterControl"])
CONTROL = "/tandem.v1.RouterControl"
MEMBERSHIP, STATUS, ASK = f"{CONTROL}/SetMembership", f"{CONTROL}/RouterStatus", f"{CONTROL}/AskRouter"

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Running:
    url: str
    channel: grpc.aio.Channel


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def router() -> AsyncIterator[Running]:
    server = RouterServer(from_dict({"model": {"served_names": ["*"]}}), model_dir=resolve_model("embedded"))
    info = await asyncio.to_thread(server.start)
    async with make_channel(info.control_address) as channel:
        yield Running(info.http_url, channel)
    await asyncio.to_thread(server.stop, 1.0)


async def still_serves(router: Running, version: int) -> None:
    """A correct membership is taken and shown; HTTP answers."""
    member = control_pb2.Member(
        worker_id="decode-7", incarnation="x", role=common_pb2.ROLE_DECODE, address="127.0.0.1:1", state="ready"
    )
    stub = control_pb2_grpc.RouterControlStub(router.channel)
    await stub.SetMembership(control_pb2.Membership(version=version, members=[member]), timeout=5)
    async with httpx.AsyncClient(timeout=5) as client:
        shown = (await client.get(f"{router.url}/v1/cluster")).json()
    assert "decode-7" in str(shown)


def orjson_or_nothing(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # such as an integer of more than 64 bits
        return b""


# A version is a promise that all lower ones are old: what the fuzzer says must leave room for the correct one.
_VERSIONS = st.integers(0, 3)


@pytest.mark.long
@FUZZ
@given(payload=payloads(METHODS[MEMBERSHIP].input_type, version=_VERSIONS))
async def test_no_membership_breaks_it(router: Running, payload: bytes) -> None:
    check_answer(METHODS[MEMBERSHIP], payload, await send(router.channel, MEMBERSHIP, METHODS[MEMBERSHIP], [payload]))


@FUZZ
@given(payload=payloads(METHODS[STATUS].input_type))
async def test_no_question_breaks_it(router: Running, payload: bytes) -> None:
    check_answer(METHODS[STATUS], payload, await send(router.channel, STATUS, METHODS[STATUS], [payload]))


_KINDS = st.sampled_from(["turns", "live part", "request", "metrics", "weather"])
_TEXTS = st.one_of(st.binary(), st.recursive(st.none() | st.integers() | st.text(), st.lists).map(orjson_or_nothing))


@FUZZ
@given(payload=payloads(METHODS[ASK].input_type, kind=_KINDS, text=_TEXTS))
async def test_no_question_of_another_router_breaks_it(router: Running, payload: bytes) -> None:
    check_answer(METHODS[ASK], payload, await send(router.channel, ASK, METHODS[ASK], [payload]))


async def test_a_huge_membership_is_taken_and_given_up_again(router: Running) -> None:
    members = [control_pb2.Member(worker_id=f"w{n}", incarnation="i", role=n % 3, state="ready") for n in range(20_000)]
    stub = control_pb2_grpc.RouterControlStub(router.channel)
    await stub.SetMembership(control_pb2.Membership(version=3, members=members), timeout=10)


async def test_afterwards_it_serves_as_ever(router: Running) -> None:
    await still_serves(router, version=1 << 40)
