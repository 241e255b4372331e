"""The program that joins a prefill and a decode engine, between two small servers."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
from bench_peers import Peer, serving, well_behaved, whole

from benchmarks.peers.split_router import make_app

REPOSITORY = Path(__file__).parents[3]
PARAMS = {"remote_engine_id": "prefill-0", "remote_block_ids": [3, 4]}
ASKED = {
    "prompt": [5, 6, 7], "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0,
}  # fmt: skip


async def asked(prefill: Peer, decode: Peer) -> httpx.Response:
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serving(peer)) for peer in (prefill, decode)]
        engines = await stack.enter_async_context(httpx.AsyncClient())
        transport = httpx.ASGITransport(make_app(*urls, engines))
        client = await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://router"))
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "toy"
        return await client.post("/v1/completions", json=ASKED)


async def prefilled(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
    writer.write(whole("200 OK", {"kv_transfer_params": PARAMS}))
    return True


async def refused(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
    writer.write(whole("400 Bad Request", {"error": {"message": "too long"}}))
    return True


async def test_prefill_is_asked_for_one_token_and_decode_for_the_answer() -> None:
    prefill, decode = Peer(prefilled), Peer(well_behaved)
    answer = await asked(prefill, decode)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events if event["choices"]) == "0 1 2 3 "
    assert answer.text.endswith("data: [DONE]\n\n")
    (first,), (second,) = prefill.bodies, decode.bodies
    assert (first["max_tokens"], first["stream"], "stream_options" in first) == (1, False, False)
    assert first["kv_transfer_params"]["do_remote_decode"] is True
    assert second == {**ASKED, "kv_transfer_params": PARAMS}
    (ids,) = [{line for line in head.lower().split(b"\r\n") if line.startswith(b"x-request-id")}
              for head in prefill.heads if head.startswith(b"POST")]  # fmt: skip
    assert ids
    assert ids < set(decode.heads[-1].lower().split(b"\r\n")), "both engines know the request by one id"


async def test_a_refusal_of_prefill_is_the_answer() -> None:
    decode = Peer(well_behaved)
    answer = await asked(Peer(refused), decode)
    assert (answer.status_code, answer.json()) == (400, {"error": {"message": "too long"}})
    assert decode.bodies == []
