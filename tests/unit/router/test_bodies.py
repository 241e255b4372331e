"""Large bodies: how many bytes of them are held, and that the loop does not stop for them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.types import Message

from router.http.bodies import Bodies
from router.request.tenant import ANYBODY
from tandem.core.errors import OverloadedError, RequestTooLargeError
from tandem.core.tokenizer import Tokenizer
from tests.support.router_site import Site, in_background

MakeSite = Callable[..., Site]
LARGE, SMALL = b"x" * 10_000, b"x" * 100


MAX_BYTES, FREE = 100_000, 8 << 10
LARGEST = b"a" * MAX_BYTES


def arriving(*parts: bytes, client: str = "192.0.2.1") -> Request:
    """A request whose body comes in these parts."""
    left = list(parts)

    async def receive() -> Message:
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    return Request({"type": "http", "client": (client, 1), "state": {"tenant": ANYBODY}}, receive)


@pytest.mark.parametrize("num_before", [0, 8], ids=["fresh", "used before"])
async def test_bodies_are_held_up_to_a_budget_and_given_back(num_before: int) -> None:
    bodies = Bodies(MAX_BYTES)
    for _ in range(num_before):
        async with bodies.read(arriving(LARGEST)):
            pass
    async with contextlib.AsyncExitStack() as held:
        for number in range(8):
            request = arriving(b"a" * 1000, b"b" * (MAX_BYTES - 1000), client=f"192.0.2.{number % 4}")
            body = await held.enter_async_context(bodies.read(request))
            assert body == b"a" * 1000 + b"b" * (MAX_BYTES - 1000)
        with pytest.raises(OverloadedError) as refused:
            await held.enter_async_context(bodies.read(arriving(LARGEST, client="192.0.2.9")))
        assert refused.value.retry_after_s == 1.0
    async with bodies.read(arriving(LARGEST)):
        pass


async def test_one_client_holds_half_of_the_budget_and_small_bodies_beside_it() -> None:
    bodies = Bodies(MAX_BYTES)
    async with contextlib.AsyncExitStack() as held:
        for _ in range(4):
            await held.enter_async_context(bodies.read(arriving(LARGEST)))
        with pytest.raises(OverloadedError):
            await held.enter_async_context(bodies.read(arriving(LARGEST)))
        for _ in range(100):
            await held.enter_async_context(bodies.read(arriving(b"a" * FREE)))
        for _ in range(4):
            await held.enter_async_context(bodies.read(arriving(LARGEST, client="192.0.2.2")))


async def test_a_body_that_is_refused_leaves_nothing_in_the_budget() -> None:
    bodies = Bodies(MAX_BYTES)
    for _ in range(20):
        with pytest.raises(RequestTooLargeError):
            async with bodies.read(arriving(LARGEST, LARGEST)):
                raise AssertionError("it is too large")
    async with bodies.read(arriving(LARGEST)) as body:
        assert len(body) == MAX_BYTES


async def test_small_bodies_are_worked_on_at_once_and_large_ones_in_threads() -> None:
    bodies = Bodies(1 << 20)
    assert await bodies.work_on(SMALL, threading.current_thread) is threading.current_thread()
    assert await bodies.work_on(LARGE, threading.current_thread) is not threading.current_thread()


@pytest.mark.long
async def test_no_more_than_two_large_bodies_are_worked_on_at_once() -> None:
    bodies, has_begun, may_end = Bodies(1 << 20), threading.Semaphore(0), threading.Event()

    def work() -> None:
        has_begun.release()
        assert may_end.wait(10)

    async with asyncio.TaskGroup() as workers:
        for _ in range(8):
            workers.create_task(bodies.work_on(LARGE, work))
        for _ in range(2):
            assert await asyncio.to_thread(has_begun.acquire, timeout=10)
        assert not await asyncio.to_thread(has_begun.acquire, timeout=0.2), "a third one has begun"
        may_end.set()


@pytest.mark.long
@pytest.mark.parametrize("prompt", ["x" * 9000, ["x" * 90] * 100], ids=["one text", "many short ones"])
def test_others_are_served_while_a_large_body_is_tokenised(
    make_site: MakeSite, monkeypatch: pytest.MonkeyPatch, prompt: Any
) -> None:
    site, may_go_on, encode = make_site(), threading.Event(), Tokenizer.encode
    has_begun = threading.Event()

    def held(self: Tokenizer, text: str, **options: Any) -> list[int]:
        has_begun.set()
        assert may_go_on.wait(10)
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", held)
    under_way = in_background(site, prompt=prompt, max_tokens=1)
    assert has_begun.wait(10)
    try:
        assert httpx.get(f"{site.url}/v1/models", timeout=5).status_code == 200
    finally:
        may_go_on.set()
    assert under_way.result().status_code == (400 if isinstance(prompt, str) else 200)
