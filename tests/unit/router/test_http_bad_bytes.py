"""Bytes that no client should send: no 500, no hang, and the router serves on."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.support.router_site import EOS, Site, opened_site

TIMEOUT_S = 5.0
QUIET_S = 0.5  # longer than the router's own limits here
PATHS = ("/v1/completions", "/v1/chat/completions")

bounded = settings(
    max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


@pytest.fixture(scope="module")
def site(checkpoint: Path) -> Iterator[Site]:
    """Its time limits are short: what waits for more bytes is told so within the test's own limit."""
    limits = {"limits.header_timeout_s": 0.1, "limits.body_timeout_s": 0.1, "limits.max_body_bytes": 100_000}
    with opened_site(checkpoint, {"model.served_names": ["*"], **limits}) as site:
        site.prefill.script = site.decode.script = lambda prompt, choice, index: [97, 98, EOS][min(index, 2)]
        yield site
        assert site.post(prompt="x", max_tokens=2).status_code == 200, "the router does not serve any more"


def exchange(site: Site, sent: bytes) -> bytes:
    """All that comes back until the router closes, or has answered and says no more; either must be soon."""
    host, port = site.url.removeprefix("http://").split(":")
    received = b""
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as client:
        try:
            client.sendall(sent)
            while part := client.recv(65536):
                received += part
                if b"\r\n\r\n" in received:
                    client.settimeout(QUIET_S)
        except (ConnectionResetError, BrokenPipeError):
            pass  # it closed while we still wrote
        except TimeoutError:
            assert b"\r\n\r\n" in received, "neither an answer nor an end"
    return received


def statuses(answer: bytes) -> list[int]:
    return [int(line.split()[1]) for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]


def check(answer: bytes) -> None:
    """No 5xx, and each error is typed."""
    assert all(status < 500 for status in statuses(answer)), answer[:1000]
    if statuses(answer) and statuses(answer)[-1] >= 400 and not answer.endswith(b"\r\n\r\n"):  # of a HEAD: no body
        assert json.loads(answer[answer.rindex(b'{"error"') :])["error"]["code"], answer[:1000]


def post(path: str, body: bytes, content_type: bytes = b"application/json") -> bytes:
    head = b"POST %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n"
    return head % (path.encode(), content_type, len(body)) + body


# -- bodies


@bounded
@given(body=st.binary(max_size=300), path=st.sampled_from(PATHS))
def test_bodies_of_any_bytes(site: Site, body: bytes, path: str) -> None:
    answer = exchange(site, post(path, body))
    assert statuses(answer) == [400]
    check(answer)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "m", "prompt": "x", "max_tokens": 1' + b"0" * 5000 + b"}",
        b'{"model": "m", "prompt": [1' + b"0" * 400 + b"]}",
        b'{"model": "m", "prompt": [-1]}',
        b'{"model": "m", "prompt": "x", "seed": 1e400}',
        b'{"model": "m", "prompt": "x", "temperature": NaN}',
        b'{"model": "m", "prompt": "x", "temperature": -Infinity}',
        b'{"model": "m", "prompt": "x", "timeout": 1e-400}',
        b'{"model": "m", "prompt": "x", "timeout": -0.0}',
        b'{"model": "m", "prompt": "x", "timeout": -5}',
        b'{"model": "m", "prompt": "x", "timeout": 1e300}',
        b'{"model": "m", "prompt": "x", "timeout": 18446744073709551616}',
        b'{"model": "m", "prompt": "x", "timeout": true}',
        b'{"model": "m", "prompt": "x", "logit_bias": {"01": 1, "1": 2}}',
        b'{"model": "m", "prompt": "x", "logit_bias": {"99999999999999999999999": 1}}',
        b'{"model": "m", "prompt": "\\ud800"}',
        b'{"model": "m", "messages": [{"role": "user", "content": "\\udfff"}]}',
        b'{"model": "m", "prompt": "\xff\xfe"}',
        b'{"model": "m", "prompt": "\xed\xa0\x80"}',
        b'\xef\xbb\xbf{"model": "m", "prompt": "x"}',
        '{"model": "m", "prompt": "x"}'.encode("utf-16"),
        b"[" * 50_000,
        b'{"model": "m", "prompt": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"model": "m", "messages": ' + b'[{"role": "user", "content": ' * 200 + b"1" + b"}]" * 200 + b"}",
        b'{"model": "m", "model": 1, "prompt": "x", "prompt": 2}',
        b'{"model": "m", "prompt": "x"} trailing',
        b"null",
        b'"text"',
        b"",
    ],
)
def test_bodies_that_break_parsers(site: Site, path: str, body: bytes) -> None:
    answer = exchange(site, post(path, body))
    assert statuses(answer) == [400]
    check(answer)


def test_oddities_that_are_right_are_served(site: Site) -> None:
    """A NUL, a duplicate key (the last one holds), escapes of any kind, and a name that cannot be a header."""
    for body in (
        b'{"model": "m", "prompt": "a\\u0000b", "max_tokens": 1}',
        b'{"model": "m", "prompt": 7, "prompt": "x", "max_tokens": 1}',
        b'{"model": "m", "prompt": "\\ud83d\\ude00", "max_tokens": 1}',
        b'{"model": "m", "prompt": "x", "max_tokens": 1, "a\\r\\nSet-Cookie: b\\u0000": 1}',
        b'{"model": "m\\u0000\\ud83d\\ude00", "prompt": "x", "max_tokens": 1.0}',
    ):
        answer = exchange(site, post(PATHS[0], body, b"text/plain"))
        assert statuses(answer) == [200], answer
        assert b"set-cookie" not in answer.split(b"\r\n\r\n")[0].lower().replace(b"a??set-cookie", b"")


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = (
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "min_tokens", "n", "stop", "stop_token_ids",
    "stream", "stream_options", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "logit_bias", "seed", "ignore_eos", "return_token_ids", "priority", "logprobs",
    "top_logprobs", "tools", "response_format", "best_of", "echo", "user",
)  # fmt: skip


@pytest.mark.long
@bounded
@given(fields=st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=4), path=st.sampled_from(PATHS))
def test_any_json_in_any_field(site: Site, fields: dict[str, Any], path: str) -> None:
    valid = {"model": "m", "prompt": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    body = json.dumps({**valid, **fields}).encode()
    answer = exchange(site, post(path, body))
    assert statuses(answer)[0] in (200, 400), answer[:1000]
    check(answer)


# -- HTTP itself

CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
SMUGGLED = CHUNKED.replace(b"Host: x", b"Host: x\r\nContent-Length: 5") + b"0\r\n\r\n"


@pytest.mark.long
@bounded
@given(sent=st.binary(max_size=200))
@example(sent=b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")  # TLS
@example(sent=b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
@example(sent=b"\r\n" * 50)
@example(sent=b"GET / HTTP/1.1\n\n")
@example(sent=b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX: \x00\r\n\r\n")
@example(sent=b"GET /v1/models HTTP/9.9\r\nHost: x\r\n\r\n")
@example(sent=b"GET http://other/v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
@example(sent=b"GET /%ff%00%ed%a0%80 HTTP/1.1\r\nHost: x\r\n\r\n")
@example(sent=b"GET /v1/models/%ff%00 HTTP/1.1\r\nHost: x\r\n\r\n")
@example(sent=b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n")
@example(sent=b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n")
@example(sent=b"GET /v1/models HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
@example(sent=b"HEAD /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
@example(sent=SMUGGLED)
@example(sent=b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n12345")
@example(sent=b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n")
@example(sent=b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9" + b"9" * 30 + b"\r\n\r\n{}")
@example(sent=CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n")
@example(sent=CHUNKED + b"-1\r\n{}\r\n0\r\n\r\n")
@example(sent=CHUNKED + b"f" * 40 + b"\r\n{}")
@example(sent=CHUNKED + b"2;" + b"a" * 30_000)
@example(sent=CHUNKED + b"2\r\n{}XX0\r\n\r\n")
@example(sent=CHUNKED + b"2\r\n{}\r\n0\r\nTrailer: x\r\n\r\n")
def test_what_is_hardly_http(site: Site, sent: bytes) -> None:
    check(exchange(site, sent))


@pytest.mark.long
@bounded
@given(cuts=st.lists(st.integers(0, 400), max_size=3), noise=st.binary(max_size=4), path=st.sampled_from(PATHS))
def test_a_good_request_with_bytes_put_in_or_cut_off(site: Site, cuts: list[int], noise: bytes, path: str) -> None:
    sent = post(path, b'{"model": "m", "prompt": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}')
    for cut in cuts:
        sent = sent[:cut] + noise + sent[cut + 1 :]
    check(exchange(site, sent))


@pytest.mark.long
@bounded
@given(sizes=st.lists(st.integers(1, 20), max_size=10))
def test_a_body_in_chunks_of_any_size_is_one_body(site: Site, sizes: list[int]) -> None:
    body, sent = b'{"model": "m", "prompt": "x", "max_tokens": 1}', CHUNKED
    for size in [*sizes, 1000]:
        part, body = body[:size], body[size:]
        sent += b"%x\r\n%s\r\n" % (len(part), part) if part else b""
    assert statuses(exchange(site, sent + b"0\r\n\r\n"))[0] == 200
