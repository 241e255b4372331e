"""`/v1/embeddings` and `/score` over HTTP, with scripted workers: shapes, refusals, retries."""

from __future__ import annotations

import json
import shutil
import struct
from base64 import b64decode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.pooling_models import write_modules
from tests.support.router_site import Site, opened_site
from tests.support.scripted_worker import WAIT_S, ScriptedPrefill
from tests.support.waiting import wait_until


def open_with(
    checkpoint: Path, directory: Path, *, overrides: dict[str, Any] | None = None, **config: Any
) -> AbstractContextManager[Site]:
    shutil.copytree(checkpoint, directory)
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "hidden_size": 2, **config}))
    if "architectures" not in config:
        write_modules(directory, "last")
    return opened_site(directory, overrides)


@pytest.fixture
def embedder(checkpoint: Path, tmp_path: Path) -> Iterator[Site]:
    with open_with(checkpoint, tmp_path / "embedder") as site:
        yield site


@pytest.fixture
def scorer(checkpoint: Path, tmp_path: Path) -> Iterator[Site]:
    with open_with(
        checkpoint, tmp_path / "scorer", architectures=["LlamaForSequenceClassification"], num_labels=1
    ) as site:
        site.prefill.vector = (0.0,)  # type: ignore[assignment]
        yield site


def refusal(site: Site, path: str, **body: Any) -> tuple[int, str, str]:
    response = site.post(path, **body)
    error = response.json()["error"]
    return response.status_code, error["param"] or "", error["message"]


def test_each_input_becomes_a_vector_by_prefill_alone(embedder: Site) -> None:
    answer = embedder.post("/v1/embeddings", input=["ab", [97, 98, 99]], user="u", colour="red")
    body = answer.json()
    assert body["data"] == [{"object": "embedding", "index": n, "embedding": [0.6, 0.8]} for n in range(2)]
    starts = [c.start for c in embedder.prefill.received if c.WhichOneof("command") == "start"]
    num_tokens = sum(len(start.prompt_ids) for start in starts)
    assert body["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert all(start.pools and not start.HasField("decode") for start in starts)
    assert embedder.decode.count("reserve") == 0
    assert answer.headers["tandem-ignored-fields"] == "colour"
    assert answer.headers["tandem-prompt-computed-by"] == "prefill, prefill"
    assert embedder.metrics()['tandem_requests_total{outcome="finished"}'] == 2
    (served, _) = embedder.http().get(f"/v1/requests/{answer.headers['x-request-id']}").json()["data"]
    assert served["decode"] is None
    assert {span["name"] for span in served["spans"]} >= {"prefill"}


@pytest.mark.long
def test_a_batch_of_texts_becomes_vectors(checkpoint: Path, tmp_path: Path) -> None:
    overrides = {"batches.directory": str(tmp_path / "batches")}
    url = "/v1/embeddings"
    lines = [
        {"custom_id": f"r{n}", "method": "POST", "url": url, "body": {"model": "toy", "input": "ab"}} for n in (0, 1)
    ]
    with open_with(checkpoint, tmp_path / "embedder", overrides=overrides) as site:
        client = site.openai()
        file = client.files.create(file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
        with pytest.raises(openai.BadRequestError, match="must be one of /v1/embeddings"):
            client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        made = client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")
        ended = wait_until(
            lambda: client.batches.retrieve(made.id), "its end", WAIT_S, wanted=lambda batch: batch.completed_at
        )
        found = [json.loads(line) for line in client.files.content(ended.output_file_id or "").text.splitlines()]
    assert [line["custom_id"] for line in found] == ["r0", "r1"]
    assert all(line["response"]["body"]["data"][0]["embedding"] == [0.6, 0.8] for line in found)


def test_base64_is_float32(embedder: Site) -> None:
    (item,) = embedder.post("/v1/embeddings", input="a", encoding_format="base64").json()["data"]
    assert struct.unpack("<2f", b64decode(item["embedding"])) == pytest.approx((0.6, 0.8))


def test_the_models_page_says_what_the_model_does(embedder: Site, scorer: Site) -> None:
    assert [s.http().get("/v1/models").json()["data"][0]["task"] for s in (embedder, scorer)] == ["embed", "score"]


def test_pairs_are_one_to_one_or_one_to_all(scorer: Site) -> None:
    for first, num in ((["x"], 3), ("x", 3), (["x", "y", "z"], 3)):
        body = scorer.post("/score", text_1=first, text_2=["a", "b", "c"]).json()
        assert body["data"] == [{"object": "score", "index": n, "score": 0.5} for n in range(num)]
    status, field, message = refusal(scorer, "/score", text_1=["x", "y"], text_2=["a", "b", "c"])
    assert (status, field) == (400, "text_1")
    assert "as many as text_2 has (3), not 2" in message
    long = "x" * 300_000
    status, field, message = refusal(scorer, "/score", text_1=long, text_2=["a"] * 100)
    assert (status, field) == (400, "text_1")
    assert "stands before each of 100 texts, 30000000 characters in all; at most 8388608" in message


def test_what_a_model_does_not_do_is_refused_with_what_it_does(embedder: Site, scorer: Site, site: Site) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
    ):
        assert "embeds and generates nothing; ask /v1/embeddings" in refusal(embedder, path, **body)[2]
        assert "scores pairs of texts and generates nothing; ask /score" in refusal(scorer, path, **body)[2]
    assert "scores pairs of texts, and embeds none; ask /score" in refusal(scorer, "/v1/embeddings", input="x")[2]
    for path, body in (("/v1/embeddings", {"input": "x"}), ("/v1/score", {"text_1": "x", "text_2": "y"})):
        status, field, message = refusal(site, path, **body)
        assert (status, field) == (400, "model")
        assert "generates, and has no pooling" in message
    assert site.post("/v1/embeddings", model="none", input="x").status_code == 404


@pytest.mark.long
def test_dimensions_are_for_models_that_were_made_for_them(checkpoint: Path, embedder: Site, tmp_path: Path) -> None:
    status, field, message = refusal(embedder, "/v1/embeddings", input="x", dimensions=1)
    assert (status, field) == (400, "dimensions")
    assert "matryoshka" in message
    with open_with(checkpoint, tmp_path / "any", is_matryoshka=True) as site:
        assert site.post("/v1/embeddings", input="x", dimensions=1).json()["data"][0]["embedding"] == [1.0]
        assert "at most 2" in refusal(site, "/v1/embeddings", input="x", dimensions=3)[2]
    with open_with(checkpoint, tmp_path / "some", matryoshka_dimensions=[2]) as site:
        assert "must be one of 2, not 1" in refusal(site, "/v1/embeddings", input="x", dimensions=1)[2]


def test_a_prompt_may_fill_the_context(embedder: Site) -> None:
    assert embedder.post("/v1/embeddings", input=[1] * 256).status_code == 200
    status, field, message = refusal(embedder, "/v1/embeddings", input=[1] * 257)
    assert (status, field) == (400, "input")
    assert "maximum context length is 256" in message


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "x", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ({"input": "x", "stream": True}, "stream"),
        ({"input": [1000]}, "input"),
    ],
)
def test_a_wrong_field_is_named(embedder: Site, body: dict[str, Any], field: str) -> None:
    assert refusal(embedder, "/v1/embeddings", **body)[:2] == (400, field)


def test_another_prefill_worker_takes_over_what_a_lost_one_had(embedder: Site) -> None:
    embedder.prefill.auto = False
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(embedder.post, "/v1/embeddings", input="x")
        embedder.prefill.wait_for("start")
        embedder.add(other := ScriptedPrefill("prefill-1"))
        embedder.kill(embedder.prefill)
        assert asked.result().json()["data"][0]["embedding"] == [0.6, 0.8]
    assert [c.start.attempt for c in other.received if c.WhichOneof("command") == "start"] == [2]


@pytest.mark.long
def test_a_deadline_ends_it_and_the_worker_hears(embedder: Site) -> None:
    embedder.prefill.auto = False
    assert embedder.post("/v1/embeddings", input="x", timeout=0.2).status_code == 504
    embedder.prefill.wait_for("cancel")


def test_no_decode_worker_is_needed(embedder: Site) -> None:
    embedder.kill(embedder.decode)
    assert embedder.post("/v1/embeddings", input="x").status_code == 200


def test_a_worker_that_gives_a_token_is_no_pooler(embedder: Site) -> None:
    """One of an older version, say."""
    embedder.prefill.pooled = embedder.prefill.first_tokens  # type: ignore[method-assign]
    response = embedder.post("/v1/embeddings", input="x")
    assert response.status_code == 500
    assert "gave no vector" in response.json()["error"]["message"]
