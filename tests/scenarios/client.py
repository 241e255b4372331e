"""Small HTTP helpers that keep token ids beside texts, and the time at which each token came."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

TIMEOUT_S = 60.0


@dataclass
class Answer:
    """One answer, whichever way it came; lists are by choice."""

    texts: list[str]
    token_ids: list[list[int]]
    finish_reasons: list[str | None]
    logprobs: list[list[float]] = field(default_factory=list)
    status: int = 200
    error: dict[str, Any] | None = None  # typed: of the body, or of a stream's last frame
    broken: str = ""  # how the connection broke, where it did
    done: bool = False  # a whole body with 200, or a stream's `[DONE]`
    usage: dict[str, Any] | None = None
    token_times: list[float] = field(default_factory=list)  # wall clock, of each event that brought tokens
    ended: float = 0.0  # wall clock

    @classmethod
    def empty(cls, num_choices: int) -> Answer:
        return cls(
            [""] * num_choices,
            [[] for _ in range(num_choices)],
            [None] * num_choices,
            [[] for _ in range(num_choices)],
        )

    def take(self, data: dict[str, Any]) -> None:
        """Add the choices of a body or of one event."""
        brought_tokens = False
        for choice in data["choices"]:
            index = choice["index"]
            self.texts[index] += choice["text"]
            self.token_ids[index] += choice.get("token_ids") or []
            self.logprobs[index] += (choice.get("logprobs") or {}).get("token_logprobs") or []
            self.finish_reasons[index] = choice["finish_reason"] or self.finish_reasons[index]
            brought_tokens = brought_tokens or bool(choice.get("token_ids"))
        if brought_tokens:
            self.token_times.append(time.time())


def ask(
    url: str,
    prompt: str | list[int],
    *,
    streamed: bool,
    timeout_s: float = TIMEOUT_S,
    key: str = "",
    on_token: Callable[[], object] | None = None,
    **fields: Any,
) -> Answer:
    """`POST /v1/completions`; errors and broken connections are part of the answer.

    Args:
        key: of the API, if it needs one.
        on_token: called when an event of a stream has brought tokens.

    Raises:
        httpx.TimeoutException: nothing was heard for `timeout_s`.
    """
    answer = Answer.empty(fields.get("n", 1))
    body = _body(prompt, fields, streamed=streamed)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=timeout_s) as response:
            answer.status = response.status_code
            if response.status_code != 200 or not streamed:
                _take_whole(answer, json.loads(response.read()))
            else:
                for event in _events(response):
                    _take_event(answer, event)
                    if on_token is not None and answer.token_times:
                        on_token()
    except httpx.TimeoutException:
        raise
    except httpx.TransportError as error:
        answer.broken = repr(error)
    answer.ended = time.time()
    return answer


def complete(url: str, prompt: str | list[int], **fields: Any) -> Answer:
    """A completion, whole; the test fails unless it is a 200."""
    answer = ask(url, prompt, streamed=False, **fields)
    assert (answer.status, answer.broken) == (200, ""), answer
    return answer


def stream(url: str, prompt: str | list[int], **fields: Any) -> Answer:
    """A streamed completion, gathered; the test fails unless it is a 200."""
    answer = ask(url, prompt, streamed=True, **fields)
    assert (answer.status, answer.broken) == (200, ""), answer
    return answer


def events(url: str, prompt: str | list[int], **fields: Any) -> Iterator[dict[str, Any] | None]:
    """The events of a streamed completion as they come; `None` is `[DONE]`. Leaving the loop closes the connection."""
    body = _body(prompt, fields, streamed=True)
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=TIMEOUT_S) as response:
        assert response.status_code == 200, response.read()
        yield from _events(response)


def _body(prompt: str | list[int], fields: dict[str, Any], *, streamed: bool) -> dict[str, Any]:
    body = {"model": "*", "prompt": prompt, "temperature": 0, "return_token_ids": True, **fields}
    return {**body, "stream": True} if streamed else body


def _events(response: httpx.Response) -> Iterator[dict[str, Any] | None]:
    for line in response.iter_lines():
        if line.startswith("data: "):
            payload = line.removeprefix("data: ")
            yield None if payload == "[DONE]" else json.loads(payload)


def _take_whole(answer: Answer, data: dict[str, Any]) -> None:
    if "error" in data:
        answer.error = data["error"]
        return
    answer.take(data)
    answer.usage, answer.done = data["usage"], True


def _take_event(answer: Answer, event: dict[str, Any] | None) -> None:
    if event is None:
        answer.done = True
    elif "error" in event:
        answer.error = event["error"]
    else:
        answer.take(event)


class RawStream:
    """A streamed completion on a bare socket: it can be left unread, and cut off at any time from any thread."""

    def __init__(self, url: str, prompt: str | list[int], *, receive_bytes: int | None = None, **fields: Any) -> None:
        """`receive_bytes` bounds what the kernel takes in for a client that does not read."""
        host, _, port = url.removeprefix("http://").partition(":")
        self._socket = socket.socket()
        if receive_bytes is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self._socket.settimeout(TIMEOUT_S)
        self._socket.connect((host, int(port)))
        body = json.dumps(_body(prompt, fields, streamed=True)).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self._socket.sendall(head.encode() + body)

    def wait_closed(self) -> int:
        """Read until the server closes the connection; how many bytes came."""
        num_bytes = 0
        try:
            while piece := self._socket.recv(1 << 16):
                num_bytes += len(piece)
        except ConnectionResetError:
            pass  # closed with unread data on its side
        return num_bytes

    def close(self) -> None:
        self._socket.close()
