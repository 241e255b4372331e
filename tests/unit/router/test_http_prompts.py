"""What an answer shows of its prompt: echoes, log-probabilities, token ids; against scripted workers.

These tell of the prompt's token number i that its log-probability is minus i eighths, and of each sampled one -0.5.
"""

from __future__ import annotations

from typing import Any

import pytest

from tandem.rpc.v1 import common_pb2
from tests.support.router_site import BOS, Site, frames, in_background

MESSAGES = [{"role": "user", "content": "x"}]


def choice_of(site: Site, **body: Any) -> dict[str, Any]:
    response = site.post(**body)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def refusal_of(site: Site, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    response = site.post(path, **body)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


@pytest.mark.parametrize("prompt", ["Hallo", list(b"Hallo")])
@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_an_echo_with_log_probabilities_is_prompt_and_output_in_one(
    site: Site, prompt: Any, max_tokens: int
) -> None:
    """As evaluation harnesses ask for it."""
    response = site.post(prompt=prompt, max_tokens=max_tokens, echo=True, logprobs=1, temperature=0)
    (choice,), usage = response.json()["choices"], response.json()["usage"]
    output = "abc"[:max_tokens]
    assert choice["text"] == f"Hallo{output}"
    assert choice["finish_reason"] == "length"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [*"Hallo", *output]
    assert logprobs["token_logprobs"] == [None, -0.125, -0.25, -0.375, -0.5, *[-0.5] * max_tokens]
    assert logprobs["text_offset"] == list(range(5 + max_tokens))
    assert logprobs["top_logprobs"][:2] == [None, {"b": -1.0, "a": -0.125}]
    assert len(logprobs["top_logprobs"]) == 5 + max_tokens
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, max_tokens)


def test_an_echo_without_log_probabilities_asks_for_none(site: Site) -> None:
    assert choice_of(site, prompt="Hallo", max_tokens=2, echo=True)["text"] == "Halloab"
    assert not site.prefill.wait_for("start").HasField("scoring")
    assert choice_of(site, prompt="Hallo", max_tokens=2)["text"] == "ab"
    none = choice_of(site, prompt="Hallo", max_tokens=0)
    assert (none["text"], none["finish_reason"]) == ("", "length")


def test_with_no_likeliest_tokens_there_are_only_the_prompts_own(site: Site) -> None:
    logprobs = choice_of(site, prompt="Ha", max_tokens=1, echo=True, logprobs=0)["logprobs"]
    assert logprobs["token_logprobs"] == [None, -0.125, -0.5]
    assert logprobs["top_logprobs"] is None
    assert site.prefill.wait_for("start").scoring.num_top == 0


def test_each_prompt_and_each_choice_has_its_own_echo(site: Site) -> None:
    response = site.post(prompt=["Hallo", list(b"Du")], n=2, max_tokens=1, echo=True, logprobs=1)
    choices = response.json()["choices"]
    assert [(c["index"], c["text"]) for c in choices] == [(0, "Halloa"), (1, "Hallob"), (2, "Dua"), (3, "Dub")]
    assert [len(c["logprobs"]["token_logprobs"]) for c in choices] == [6, 6, 3, 3]
    assert site.prefill.count("start") == 2, "a prompt is computed once"


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_a_streamed_echo_joins_to_the_whole_one(site: Site, max_tokens: int) -> None:
    asked: dict[str, Any] = {"prompt": ["Hallo", "Du"], "n": 2, "max_tokens": max_tokens, "echo": True, "logprobs": 1}
    whole = site.post(**asked).json()["choices"]
    streamed = frames(site.post(**asked, stream=True))
    for choice in whole:
        parts = [f["choices"][0] for f in streamed if f["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for key, values in choice["logprobs"].items():
            assert [v for part in parts for v in part["logprobs"][key]] == values
        assert [part["finish_reason"] for part in parts][-1] == "length"


@pytest.mark.parametrize("stop", [None, "é!?"])
@pytest.mark.parametrize("stream", [False, True])
def test_tokens_within_a_character_begin_where_it_does(site: Site, stream: bool, stop: str | None) -> None:
    """A token of this model is a byte. Text that may become a stop string is held back; its tokens are not."""
    output = "😀é!é".encode()
    site.prefill.script = site.decode.script = lambda prompt, choice, index: output[index]
    answer = site.post(
        prompt="Grüße", max_tokens=len(output), echo=True, logprobs=0, temperature=0, stop=stop, stream=stream
    )
    parts = [frame["choices"][0] for frame in frames(answer)] if stream else answer.json()["choices"]
    text = "".join(part["text"] for part in parts)
    assert text == "Grüße😀é!é"
    offsets = [offset for part in parts for offset in part["logprobs"]["text_offset"]]
    assert offsets == [number for number, char in enumerate(text) for _ in char.encode()]


def test_special_tokens_that_are_shown_count_in_offsets(site: Site) -> None:
    site.prefill.script = site.decode.script = lambda prompt, choice, index: [97, BOS, 98][index]
    choice = choice_of(site, prompt="x", max_tokens=3, logprobs=0, skip_special_tokens=False)
    assert choice["text"] == "a<s>b"
    assert choice["logprobs"]["text_offset"] == [0, 1, 4]


def test_prompt_log_probabilities_have_vllms_shape(site: Site) -> None:
    choice = choice_of(site, prompt="Hal", max_tokens=1, prompt_logprobs=2)
    assert choice["text"] == "a"
    assert choice["logprobs"] is None
    assert choice["prompt_logprobs"] == [
        None,
        {
            "97": {"logprob": -0.125, "rank": 1, "decoded_token": "a"},
            "98": {"logprob": -1.0, "rank": 1, "decoded_token": "b"},
            "99": {"logprob": -2.0, "rank": 2, "decoded_token": "c"},
        },
        {
            "108": {"logprob": -0.25, "rank": 2, "decoded_token": "l"},
            "98": {"logprob": -1.0, "rank": 1, "decoded_token": "b"},
            "99": {"logprob": -2.0, "rank": 2, "decoded_token": "c"},
        },
    ]
    chat = site.post("/v1/chat/completions", messages=MESSAGES, max_tokens=1, prompt_logprobs=0).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in chat["choices"][0]
    assert all(len(entry) == 1 for entry in chat["prompt_logprobs"][1:])


def test_an_echo_and_prompt_log_probabilities_show_each_what_it_asks_for(site: Site) -> None:
    choice = choice_of(site, prompt="Hal", max_tokens=0, echo=True, logprobs=1, prompt_logprobs=3)
    assert [len(entry) for entry in choice["prompt_logprobs"][1:]] == [4, 4]
    assert [len(entry) for entry in choice["logprobs"]["top_logprobs"][1:]] == [2, 2]
    assert site.prefill.wait_for("start").scoring.num_top == 3


def test_prompt_log_probabilities_are_in_no_stream(site: Site) -> None:
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": MESSAGES})):
        assert refusal_of(site, path, **body, prompt_logprobs=1, stream=True)["param"] == "prompt_logprobs"


def test_a_worker_that_tells_nothing_of_the_prompt_is_an_error_and_no_silence(site: Site) -> None:
    """One of an older version."""
    site.prefill.scored = lambda start: None  # type: ignore[method-assign]
    response = site.post(prompt="Hallo", max_tokens=1, prompt_logprobs=1)
    assert response.status_code == 500
    assert "older version" in response.json()["error"]["message"]


def test_a_retry_is_told_how_much_of_the_prompt_is_known(site: Site) -> None:
    """Prefill fails between its chunks; a second attempt goes on behind them."""
    site.prefill.auto = False

    answer = in_background(site, prompt="Hallo", max_tokens=1, echo=True, logprobs=1)
    first = site.prefill.wait_for("start")
    site.prefill.started(first)

    some = [common_pb2.TokenScore(logprob=-9.0, rank=1) for _ in range(2)]
    site.prefill.emit(
        scored=common_pb2.PromptScored(request_id=first.request_id, attempt=1, first=1, tokens=some)
    )
    site.prefill.fail(first.request_id, 1, "handoff", retryable=True)
    again = site.prefill.wait_for("start", 2)
    assert (first.scoring.num_known, again.scoring.num_known) == (1, 3)
    site.prefill.first_tokens(again)
    logprobs = answer.result().json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [None, -9.0, -9.0, -0.375, -0.5, -0.5]


# -- token ids


def test_token_ids_are_where_vllm_has_them(site: Site) -> None:
    completion = site.post(prompt="Hi", max_tokens=2, return_token_ids=True).json()
    assert "prompt_token_ids" not in completion
    assert completion["choices"][0]["prompt_token_ids"] == list(b"Hi")
    assert completion["choices"][0]["token_ids"] == [97, 98]
    chat = site.post("/v1/chat/completions", messages=MESSAGES, max_tokens=2, return_token_ids=True).json()
    assert chat["prompt_token_ids"] == [300, *b"[user]x[assistant]"]
    assert "prompt_token_ids" not in chat["choices"][0]
    assert chat["choices"][0]["token_ids"] == [97, 98]


def test_in_a_stream_only_the_first_frame_has_the_prompts_token_ids(site: Site) -> None:
    completion = frames(site.post(prompt="Hi", max_tokens=2, return_token_ids=True, stream=True))
    assert [f["choices"][0].get("prompt_token_ids") for f in completion] == [[*b"Hi"], None, None]
    assert [t for f in completion for t in f["choices"][0]["token_ids"]] == [97, 98]
    body = {"messages": MESSAGES, "max_tokens": 2, "return_token_ids": True, "stream": True}
    chat = frames(site.post("/v1/chat/completions", **body))
    assert chat[0]["prompt_token_ids"] == [300, *b"[user]x[assistant]"]
    assert not any("prompt_token_ids" in f for f in chat[1:])


# -- what is kept of a prompt


def test_a_prompt_is_cut_from_the_left(site: Site) -> None:
    choice = choice_of(site, prompt="Hello there", max_tokens=1, truncate_prompt_tokens=5, echo=True)
    assert list(site.prefill.wait_for("start").prompt_ids) == list(b"there")
    assert choice["text"] == "therea"
    assert choice_of(site, prompt="Hello", max_tokens=1, truncate_prompt_tokens=5, echo=True)["text"] == "Helloa"


def test_a_prompt_that_is_too_long_is_cut_to_what_fits(site: Site) -> None:
    """The context has 256 tokens."""
    assert refusal_of(site, prompt=[97] * 300, max_tokens=6)["code"] == "context_length_exceeded"
    assert refusal_of(site, prompt=[97] * 300, max_tokens=6, truncate_prompt_tokens=253)["code"] == (
        "context_length_exceeded"
    )
    choice_of(site, prompt=[97] * 300, max_tokens=6, truncate_prompt_tokens=-1)
    assert len(site.prefill.wait_for("start").prompt_ids) == 250
    choice_of(site, prompt=[[97] * 300, [98] * 20], max_tokens=1, truncate_prompt_tokens=100)
    assert [len(site.prefill.wait_for("start", n).prompt_ids) for n in (2, 3)] in ([100, 20], [20, 100])
