"""Texts and chats to token ids and back over HTTP, as vLLM answers; and what is read beside it."""

from __future__ import annotations

import contextlib
import json
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.core.version import version
from tests.support.router_site import BOS, EOS, Site, in_background, opened_site
from tests.support.waiting import wait_until

CHAT = [{"role": "user", "content": "hi"}]


def post(site: Site, path: str, **body: Any) -> httpx.Response:
    with site.http() as client:
        return client.post(path, json=body)


def tokens_of(site: Site, **body: Any) -> list[int]:
    response = post(site, "/tokenize", **body)
    assert response.status_code == 200, response.text
    tokens: list[int] = response.json()["tokens"]
    return tokens


def test_a_text_has_vllms_shape(site: Site) -> None:
    assert post(site, "/tokenize", model="toy", prompt="Hi ").json() == {
        "count": 3, "max_model_len": 256, "tokens": [72, 105, 32], "token_strs": None
    }  # fmt: skip
    assert post(site, "/tokenize", prompt="Hi ", return_token_strs=True).json()["token_strs"] == ["H", "i", "Ġ"]
    assert post(site, "/tokenize", prompt="").json()["count"] == 0
    assert site.prefill.received == [], "no worker takes part"


def test_a_chat_is_what_a_chat_would_send(site: Site) -> None:
    assert tokens_of(site, messages=CHAT) == [BOS, *b"[user]hi[assistant]"]
    assert tokens_of(site, messages=CHAT, add_generation_prompt=False) == [BOS, *b"[user]hi"]
    begun = [*CHAT, {"role": "assistant", "content": "so"}]
    assert tokens_of(site, messages=begun, continue_final_message=True) == [BOS, *b"[user]hi[assistant]so"]
    site.post("/v1/chat/completions", messages=CHAT, max_tokens=1)
    assert list(site.prefill.wait_for("start").prompt_ids) == tokens_of(site, messages=CHAT)


def test_token_ids_become_the_text_again(site: Site) -> None:
    text = "Hé→😀 there"
    assert post(site, "/detokenize", model="toy", tokens=tokens_of(site, prompt=text)).json() == {"prompt": text}
    assert post(site, "/detokenize", tokens=[BOS, 104, EOS]).json() == {"prompt": "<s>h</s>"}
    assert post(site, "/detokenize", tokens=[]).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": CHAT}, "prompt"),
        ("/tokenize", {"prompt": ["x"]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": CHAT, "documents": [{"a": "b"}]}, "documents"),
        ("/tokenize", {"messages": CHAT, "chat_template": "x"}, "chat_template"),
        ("/tokenize", {"messages": CHAT, "add_generation_prompt": True, "continue_final_message": True},
         "add_generation_prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [512]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_wrong_is_named(site: Site, path: str, body: dict[str, Any], named: str) -> None:
    response = post(site, path, **body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, named)


def test_other_models_and_unknown_fields_are_told_of(site: Site) -> None:
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
        response = post(site, path, **body, model="other")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
        assert post(site, path, **body, zebra=1).headers["tandem-ignored-fields"] == "zebra"


def test_version_load_and_ping(site: Site) -> None:
    with site.http() as client:
        assert client.get("/version").json() == {"version": version()}
        assert client.get("/load").json() == {"server_load": 0}
        assert {client.get("/ping").status_code, client.post("/ping").status_code} == {200}
        site.decode.held_back.clear()
        answer = in_background(site, max_tokens=3)
        site.decode.wait_for("attach")
        assert client.get("/load").json() == {"server_load": 1}
        site.decode.held_back.set()
        assert answer.result().status_code == 200


@pytest.mark.long
def test_keys_guard_all_but_the_ping(checkpoint: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-0123456789abcdef")
    keys.chmod(0o600)
    with opened_site(checkpoint, {"http.api_keys_file": str(keys)}, with_workers=False) as site, site.http() as client:
        assert client.post("/tokenize", json={"prompt": "x"}).status_code == 401
        assert client.post("/detokenize", json={"tokens": [1]}).status_code == 401
        assert {client.get(path).status_code for path in ("/version", "/load", "/v1/models")} == {401}
        assert client.get("/ping").status_code == 503, "it says what /health says, to anybody"
        mine = {"Authorization": "Bearer sk-0123456789abcdef"}
        assert client.post("/tokenize", json={"prompt": "x"}, headers=mine).status_code == 200


def error_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def test_answers_that_are_not_read_are_held_up_to_a_bound_and_one_alone_has_one(checkpoint: Path) -> None:
    """What comes back of a body may be many times as large as the body."""
    with opened_site(checkpoint, {"limits.max_body_bytes": 2 << 20}) as site:
        text = "x" * 500_000  # some four megabytes with its tokens
        large = {"prompt": text, "return_token_strs": True}
        too_large = post(site, "/tokenize", prompt=3 * text, return_token_strs=True)
        assert error_of(too_large) == (413, "request_too_large")
        assert "and at most 8388608 are given; ask for less" in too_large.json()["error"]["message"]
        body = json.dumps(large).encode()
        head = f"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        with contextlib.ExitStack() as undo:
            for _ in range(2):
                slow = undo.enter_context(socket.socket())
                slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                slow.connect(("127.0.0.1", httpx.URL(site.url).port))
                slow.sendall(head + body)
                assert slow.recv(15) == b"HTTP/1.1 200 OK"
            assert error_of(post(site, "/tokenize", **large)) == (429, "overloaded")
            assert post(site, "/tokenize", prompt="short").status_code == 200
        wait_until(lambda: post(site, "/tokenize", **large).status_code == 200, "room again")
