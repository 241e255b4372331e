"""Vectors and scores over the whole path: OpenAI's client, a router, prefill workers; beside transformers' own."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from transformers import AutoTokenizer

from tests.scenarios.processes import ProcessCluster, running
from tests.support.pooling_models import embeddings_of, save_embedder, save_scorer, scores_of

TEXTS = ["short", *("a text of some length. " * n + f"It ends with {n}." for n in range(1, 12))]
#: Prompts are cut into several chunks, and several share a step.
CONFIG: dict[str, Any] = {
    "model": {"served_names": ["*"]},
    "scheduling": {"chunk_size": 64},
    "transport": {"lease_s": 3.0},
    "limits": {"retry_budget": 1.0},
}


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_embedder(tmp_path_factory.mktemp("embedder"), "mean", arch="qwen3", config={"is_matryoshka": True})


@pytest.fixture(scope="module")
def embedding_cluster(embedder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    """2P1D with fault points. Leave it idle and whole."""
    points, directory = tmp_path_factory.mktemp("points"), tmp_path_factory.mktemp("2p1d")
    with running(directory, 2, 1, model=str(embedder), config=CONFIG, points=points) as cluster:
        yield cluster


def client_of(cluster: ProcessCluster) -> OpenAI:
    return OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=60)


def ids_of(directory: Path, texts: list[str]) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return [tokenizer(text).input_ids for text in texts]


def test_openai_s_client_gets_transformers_own_vectors(embedding_cluster: ProcessCluster, embedder: Path) -> None:
    ids = ids_of(embedder, TEXTS)
    wanted = embeddings_of(embedder, ids, "mean").tolist()
    with client_of(embedding_cluster) as client:
        # The client itself asks for base64; with `float` it gets lists.
        for form, given in (("base64", TEXTS), ("float", ids), ("float", TEXTS)):
            answer = client.embeddings.create(model="m", input=given, encoding_format=form)  # type: ignore[call-overload]
            assert [item.index for item in answer.data] == list(range(len(TEXTS)))
            for item, vector in zip(answer.data, wanted, strict=True):
                found = item.embedding
                if isinstance(found, str):
                    found = list(struct.unpack(f"<{len(vector)}f", base64.b64decode(found)))
                assert found == pytest.approx(vector, abs=1e-5)
            assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
        (half,) = client.embeddings.create(model="m", input=TEXTS[3], dimensions=32).data
        length = math.hypot(*wanted[3][:32])
        assert half.embedding == pytest.approx([value / length for value in wanted[3][:32]], abs=1e-5)
    embedding_cluster.wait_idle()


def test_the_score_of_two_texts_is_the_cosine_of_their_vectors(
    embedding_cluster: ProcessCluster, embedder: Path
) -> None:
    vectors = embeddings_of(embedder, ids_of(embedder, TEXTS), "mean")
    body = {"model": "m", "text_1": TEXTS[0], "text_2": TEXTS[1:]}
    answer = httpx.post(f"{embedding_cluster.url}/score", json=body, timeout=60).json()
    assert [item["score"] for item in answer["data"]] == pytest.approx((vectors[1:] @ vectors[0]).tolist(), abs=1e-5)


def test_a_prefill_worker_that_dies_in_the_middle_changes_no_vector(
    embedding_cluster: ProcessCluster, embedder: Path
) -> None:
    """One dies before its fifth step: it has computed a part of a prompt that takes seven."""
    texts = [f"{n} " + "many words are in this text. " * 14 for n in range(8)]
    wanted = embeddings_of(embedder, ids_of(embedder, texts), "mean").tolist()
    cluster = embedding_cluster
    assert cluster.points is not None
    (cluster.points / "prefill-0.prefill.chunk").write_text("5 kill")

    def ask(number: int) -> list[float]:
        body = {"model": "m", "input": texts[number]}
        response = httpx.post(f"{cluster.url}/v1/embeddings", json=body, timeout=60)
        assert response.status_code == 200, response.text
        vector: list[float] = response.json()["data"][0]["embedding"]
        return vector

    with ThreadPoolExecutor(len(texts)) as pool:
        answers = [pool.submit(ask, number) for number in range(len(texts))]
        cluster.workers["prefill-0"].popen.wait(60)
        cluster.publish()
        cluster.start_worker("prefill").wait_ready()
        cluster.publish()
        found = [answer.result() for answer in answers]
    for vector, expected in zip(found, wanted, strict=True):
        assert vector == pytest.approx(expected, abs=1e-5)
    assert cluster.metric("tandem_retries_total", reason="worker_lost") > 0
    cluster.wait_idle()


@pytest.mark.faults  # tests/unit/engine/test_engine_pooling.py has a scorer
def test_a_head_with_one_label_scores_pairs(tmp_path: Path) -> None:
    directory = save_scorer(tmp_path / "scorer", arch="llama")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    pairs = [("what is it?", text) for text in TEXTS]
    wanted = scores_of(directory, [tokenizer(*pair).input_ids for pair in pairs])
    with running(tmp_path, 1, 1, model=str(directory), config=CONFIG) as cluster:
        body = {"model": "m", "text_1": "what is it?", "text_2": TEXTS}
        for path in ("/score", "/v1/score"):
            answer = httpx.post(f"{cluster.url}{path}", json=body, timeout=60).json()
            assert [item["score"] for item in answer["data"]] == pytest.approx(wanted, abs=1e-5)
