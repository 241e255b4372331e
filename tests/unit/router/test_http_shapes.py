"""OpenAI's shapes, through its official client, against scripted workers."""

from __future__ import annotations

import json
import socket
import string
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from tests.support.router_site import Site

LETTERS = string.ascii_lowercase


def test_a_completion_is_answered_whole(site: Site) -> None:
    answer = site.openai().completions.create(model="toy", prompt="Hello", max_tokens=5)
    assert answer.object == "text_completion"
    assert answer.model == "toy"
    assert answer.choices[0].text == "abcde"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 5, 10)


def test_a_completion_is_streamed(site: Site) -> None:
    stream = site.openai().completions.create(
        model="toy", prompt="Hello", max_tokens=5, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == "abcde"
    assert [c.choices[0].finish_reason for c in chunks if c.choices] == [None] * 4 + ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5
    assert all(c.usage is None for c in chunks[:-1])


async def test_the_async_client_streams_too(site: Site) -> None:
    client = openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0)
    stream = await client.chat.completions.create(
        model="toy", messages=[{"role": "user", "content": "hi"}], max_tokens=4, stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "abcd"
    whole = await client.chat.completions.create(
        model="toy", messages=[{"role": "user", "content": "hi"}], max_tokens=2
    )
    assert whole.choices[0].message.content == "ab"


def test_a_chat_is_templated_and_runs_to_the_context_by_default(site: Site) -> None:
    answer = site.openai().chat.completions.create(model="toy", messages=[{"role": "user", "content": "hi"}])
    start = site.prefill.wait_for("start")
    assert list(start.prompt_ids) == [300, *b"[user]hi[assistant]"]
    assert start.sampling.max_tokens == 256 - len(start.prompt_ids)
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 256


def test_the_stream_is_server_sent_events_that_end_with_done(site: Site) -> None:
    response = site.post(prompt="x", max_tokens=2, stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = response.text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    assert json.loads(frames[0].removeprefix("data: "))["choices"][0]["text"] == "a"


def test_end_of_sequence_counts_but_is_not_shown(site: Site) -> None:
    site.prefill.script = site.decode.script = lambda prompt, choice, index: [104, 105, 0][index]
    answer = site.openai().completions.create(model="toy", prompt="x", max_tokens=9)
    assert answer.choices[0].text == "hi"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


def test_a_request_that_ends_with_its_first_token_frees_the_reservation(site: Site) -> None:
    answer = site.openai().completions.create(model="toy", prompt="x", max_tokens=1)
    assert answer.choices[0].text == "a"
    assert answer.choices[0].finish_reason == "length"
    cancel, reserve = site.decode.wait_for("cancel"), site.decode.wait_for("reserve")
    assert (cancel.request_id, cancel.attempt) == (reserve.request_id, reserve.attempt)


def test_several_choices_and_several_prompts(site: Site) -> None:
    site.prefill.script = site.decode.script = lambda prompt, choice, index: prompt[0] + choice + index
    answer = site.openai().completions.create(model="toy", prompt=["a", "k"], n=2, max_tokens=3)
    assert [(c.index, c.text) for c in answer.choices] == [(0, "abc"), (1, "bcd"), (2, "klm"), (3, "lmn")]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 12)
    assert site.prefill.count("start") == 2
    stream = site.openai().completions.create(model="toy", prompt=[[97], [107]], n=2, max_tokens=3, stream=True)
    texts = dict.fromkeys(range(4), "")
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: "abc", 1: "bcd", 2: "klm", 3: "lmn"}


def test_token_ids_go_in_and_come_out(site: Site) -> None:
    response = site.post(prompt=[1, 2, 511], max_tokens=2, return_token_ids=True)
    choice = response.json()["choices"][0]
    assert choice["prompt_token_ids"] == [1, 2, 511]
    assert choice["token_ids"] == [97, 98]
    assert "tandem-ignored-fields" not in response.headers


def test_sampling_parameters_reach_both_workers(site: Site) -> None:
    asked = {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "repetition_penalty": 1.5}
    asked |= {"presence_penalty": -1.0, "frequency_penalty": 0.5, "seed": 99, "min_tokens": 2, "ignore_eos": True}
    site.post(prompt="x", max_tokens=3, logit_bias={"5": -100, "6": 2.5}, stop_token_ids=[9], logprobs=2, **asked)
    for command in (site.prefill.wait_for("start"), site.decode.wait_for("reserve")):
        sampling = command.sampling
        assert {name: getattr(sampling, name) for name in asked} == asked
        assert dict(sampling.logit_bias) == {5: -100.0, 6: 2.5}
        assert list(sampling.stop_token_ids) == [9]
        assert (sampling.max_tokens, sampling.num_logprobs) == (3, 2)


def test_a_seed_is_drawn_where_the_client_gives_none(site: Site) -> None:
    for _ in range(2):
        site.post(prompt="x", max_tokens=1)
    first, second = site.prefill.wait_for("start", 1), site.prefill.wait_for("start", 2)
    assert first.sampling.seed != second.sampling.seed
    assert first.sampling.seed == site.decode.wait_for("reserve", 1).sampling.seed
    assert first.request_id != second.request_id


def test_logprobs_of_completions(site: Site) -> None:
    answer = site.openai().completions.create(model="toy", prompt="x", max_tokens=3, logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "b", "c"]
    assert logprobs.token_logprobs == [-0.5] * 3
    assert logprobs.text_offset == [0, 1, 2]
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] == {"b": -1.0, "a": -0.5}


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_chats(site: Site, stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "logprobs": True, "top_logprobs": 2}
    response = site.post("/v1/chat/completions", stream=stream, **body)
    if stream:
        frames = [json.loads(f[6:]) for f in response.text.split("\n\n") if f.startswith("data: {")]
        entries = [e for f in frames for e in (f["choices"][0]["logprobs"] or {"content": []})["content"]]
    else:
        entries = response.json()["choices"][0]["logprobs"]["content"]
    assert [e["token"] for e in entries] == ["a", "b"]
    assert entries[0]["bytes"] == [97]
    assert [t["token"] for t in entries[0]["top_logprobs"]] == ["b", "c"]


def test_characters_are_never_split(site: Site) -> None:
    text = "é→😀x".encode()
    site.prefill.script = site.decode.script = lambda prompt, choice, index: text[index]
    stream = site.openai().completions.create(model="toy", prompt="x", max_tokens=len(text), stream=True)
    assert [c.choices[0].text for c in stream] == ["é", "→", "😀", "x"]


def test_a_stop_string_across_tokens_ends_the_text_before_it(site: Site) -> None:
    answer = site.openai().completions.create(model="toy", prompt="x", max_tokens=20, stop=["ef", "zz"])
    assert answer.choices[0].text == "abcd"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6
    assert site.decode.wait_for("cancel").attempt == 1


def test_models_are_listed(site: Site) -> None:
    client = site.openai()
    assert [m.id for m in client.models.list()] == ["toy", "toy/alias"]
    assert client.models.retrieve("toy/alias").id == "toy/alias"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_the_cluster_is_shown(site: Site) -> None:
    with site.http() as client:
        body = client.get("/v1/cluster").json()
    assert body["model"] == "toy"
    (worker,) = body["decode"]
    assert (worker["id"], worker["incarnation"], worker["pid"], worker["node"]) == ("decode-0", "1", 4242, "testhost")
    assert worker["state"] == "ready"
    assert worker["pages"] == {"free": 100, "used": 1, "reserved": 0, "cached": 2, "quarantined": 0}
    assert {"num_running", "num_queued"} <= worker.keys()
    assert [w["id"] for w in body["prefill"]] == ["prefill-0"]


def test_request_ids_are_taken_or_made(site: Site) -> None:
    with site.http() as client:
        body = {"model": "toy", "prompt": "x", "max_tokens": 1}
        taken = client.post("/v1/completions", json=body, headers={"X-Request-Id": "my-id.7"})
        assert taken.headers["x-request-id"] == "my-id.7"
        assert taken.json()["id"] == "cmpl-my-id.7"
        assert site.prefill.wait_for("start").request_id.startswith("my-id.7")
        made = client.get("/health")
        assert len(made.headers["x-request-id"]) == 32
        odd = client.get("/health", headers={"X-Request-Id": "a b\tc"})
        assert odd.headers["x-request-id"] != "a b\tc"


def test_fields_that_nobody_knows_are_named(site: Site) -> None:
    response = site.post(prompt="x", max_tokens=1, zebra=1, apple={"a": 1}, user="me", suffix=None)
    assert response.status_code == 200
    assert response.headers["tandem-ignored-fields"] == "apple, zebra"


@pytest.mark.parametrize("names", [[" "], ["zebra "], ["a" * 998, "b"], ["\n"]])
def test_names_of_fields_with_space_at_an_end_of_the_header_do_no_harm(site: Site, names: list[str]) -> None:
    """A header may neither begin nor end with a space, also where it is cut off between two names."""
    response = site.post(prompt="x", max_tokens=2, **dict.fromkeys(names, 1))
    assert response.status_code == 200
    assert response.headers["tandem-ignored-fields"] == ", ".join(names).replace("\n", "?")[:1000].strip(" ")


def test_a_request_has_one_first_token_however_many_choices_it_has(site: Site) -> None:
    site.post(prompt="Hello", max_tokens=3, n=3)
    metrics = site.metrics()
    assert metrics["tandem_ttft_seconds_count"] == 1
    assert metrics["tandem_output_tokens_total"] == 9
    assert metrics["tandem_second_token_seconds_count"] == 3
    assert metrics["tandem_itl_seconds_count"] == 6


@pytest.mark.long
def test_metrics_tell_of_a_request(site: Site) -> None:
    told = {"pages": site.decode.status.pages, "unfilled_slots": 24}  # of pages of 16
    site.decode.status = site.decode.status.__class__(decode_tokens=4, late_masks=3, slow_grammars=2, **told)
    site.post(prompt="Hello", max_tokens=5)
    site.decode.wait_for("attach")
    site.until_metric('tandem_kv_unfilled_pages{role="decode",worker="decode-0"}', 1.5)
    metrics = site.metrics()
    assert metrics['tandem_grammar_late_masks_total{role="decode"}'] == 3
    assert metrics['tandem_grammars_too_slow_total{role="decode"}'] == 2
    assert metrics['tandem_requests_total{outcome="finished"}'] == 1
    assert metrics["tandem_ttft_seconds_count"] == 1
    assert metrics["tandem_itl_seconds_count"] == 4
    assert metrics["tandem_handoff_seconds_sum"] == pytest.approx(0.002)
    assert metrics['tandem_kv_pages{role="decode",state="free",worker="decode-0"}'] == 100
    assert metrics['tandem_queue_length{role="prefill",worker="prefill-0"}'] == 0
    phases = [v for k, v in metrics.items() if k.startswith("tandem_request_phase_seconds_sum")]
    assert len(phases) == 4
    assert sum(phases) == pytest.approx(metrics["tandem_request_seconds_sum"], abs=1e-6)
    assert metrics["tandem_ttft_seconds_sum"] <= sum(phases) < 5


@pytest.mark.parametrize("is_chat", [False, True], ids=["completion", "chat"])
@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": True}}], ids=["plain", "usage"])
def test_every_frame_of_a_stream_has_the_same_keys_in_the_same_order(
    site: Site, is_chat: bool, options: dict[str, object]
) -> None:
    asked = {"messages": [{"role": "user", "content": "hi"}]} if is_chat else {"prompt": "Hello"}
    body = {"model": "toy", "max_tokens": 5, "stream": True, **asked, **options}
    path = "chat/completions" if is_chat else "completions"
    raw = httpx.post(f"{site.url}/v1/{path}", json=body, timeout=30).content
    frames = raw.removesuffix(b"data: [DONE]\n\n").split(b"\n\n")[:-1]
    said = [json.loads(frame.removeprefix(b"data: ")) for frame in frames]
    assert frames == [b"data: " + json.dumps(one, separators=(",", ":")).encode() for one in said]
    tokens = [one for one in said if one["choices"]][is_chat:]  # a chat's first one has the role alone
    assert len(tokens) == 5
    shapes = {(*one, *one["choices"][0]) for one in tokens}
    first = ("id", "created", "model", "object", "choices", *(["usage"] if options else []))
    assert shapes == {(*first, "index", "delta" if is_chat else "text", "logprobs", "finish_reason")}


def test_a_client_of_http_1_0_gets_a_stream_without_chunks(site: Site) -> None:
    address = urlsplit(site.url)
    body = json.dumps({"model": "toy", "prompt": "Hello", "max_tokens": 5, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.0\r\nhost: toy\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection((address.hostname, address.port), timeout=30) as client:
        client.sendall(head + body)
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    status, _, streamed = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in status.lower()
    frames = streamed.split(b"\n\n")
    assert all(frame.startswith(b"data: ") for frame in frames[:-1])
    assert "".join(json.loads(frame[6:])["choices"][0]["text"] for frame in frames[:-2]) == "abcde"
