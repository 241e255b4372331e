"""Join vLLM's prefill and decode engines to one server: POST /v1/completions, streamed through.

    python benchmarks/peers/split_router.py PORT PREFILL_URL DECODE_URL

It runs in vLLM's own virtual environment. Each request goes to the prefill engine for one token, with
`do_remote_decode`; then, with the `kv_transfer_params` which that returned, to the decode engine, whose bytes are
passed on as they come. vLLM has no such router of its own beyond an example.
"""

from __future__ import annotations

import argparse
import uuid
from collections.abc import AsyncIterator
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

_OK = 200
_REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def make_app(prefill_url: str, decode_url: str, client: httpx.AsyncClient) -> FastAPI:
    """The application in front of the two engines."""
    app = FastAPI()

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {}

    @app.get("/v1/models")
    async def models() -> Response:
        answer = await client.get(f"{decode_url}/v1/models")
        return JSONResponse(answer.json(), answer.status_code)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body: dict[str, Any] = await request.json()
        headers = {"X-Request-Id": str(uuid.uuid4())}
        one_token = {**body, "stream": False, "max_tokens": 1, "min_tokens": 1, "kv_transfer_params": _REMOTE_DECODE}
        one_token.pop("stream_options", None)
        prefilled = await client.post(f"{prefill_url}/v1/completions", json=one_token, headers=headers)
        if prefilled.status_code != _OK:
            return JSONResponse(prefilled.json(), prefilled.status_code)
        rest = {**body, "kv_transfer_params": prefilled.json()["kv_transfer_params"]}
        sent = client.build_request("POST", f"{decode_url}/v1/completions", json=rest, headers=headers)
        answer = await client.send(sent, stream=True)

        async def content() -> AsyncIterator[bytes]:
            try:
                async for part in answer.aiter_bytes():
                    yield part
            finally:
                await answer.aclose()

        return StreamingResponse(content(), answer.status_code, media_type=answer.headers.get("content-type"))

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("prefill_url")
    parser.add_argument("decode_url")
    options = parser.parse_args()
    client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))
    app = make_app(options.prefill_url, options.decode_url, client)
    uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
