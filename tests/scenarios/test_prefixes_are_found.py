"""Prompts go where their beginning is held, with real processes: 2P2D of the embedded model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.scenarios.processes import ProcessCluster, running
from tests.support.waiting import wait_until

STORY = "Once upon a time there was a little girl named Lily. She had a dog, and the dog had a red ball. "


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    with running(tmp_path_factory.mktemp("prefixes"), 2, 2) as cluster:
        yield cluster
        cluster.wait_idle(30)


def told(cluster: ProcessCluster) -> float:
    return cluster.metric("tandem_known_pages")


def completed(cluster: ProcessCluster, prompt: str | list[int], num_tokens: int = 40) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "return_token_ids": True}
    answer = httpx.post(f"{cluster.url}/v1/completions", json={"model": "tandem-tiny", **body}, timeout=60)
    answer.raise_for_status()
    request_id = answer.headers["x-request-id"]
    (way,) = httpx.get(f"{cluster.url}/v1/requests/{request_id}/explain").json()["data"]
    return {**answer.json(), "way": way["attempts"][-1]}


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("name", ["Tom", "Sue", "Ben"])
def test_a_second_turn_is_computed_where_the_first_one_lies(cluster: ProcessCluster, name: str) -> None:
    prompt = f"{name} said: " + 6 * STORY
    before = told(cluster)
    first = completed(cluster, prompt)
    (choice,) = first["choices"]
    wait_until(lambda: told(cluster), "the pages that workers tell of", 30, wanted=lambda num: num > before + 2)
    completed(cluster, f"Something else than {name}. " * 8)  # whoever is the least loaded, it is not by chance
    history = [*choice["prompt_token_ids"], *choice["token_ids"]]
    second = completed(cluster, history + choice["prompt_token_ids"][:8])
    assert second["way"]["why"] == "prefix"
    assert second["way"]["decode"] == first["way"]["decode"]
    held = {one["worker"]: one["held_tokens"] for one in second["way"]["candidates"]}
    assert held[first["way"]["decode"]] >= len(choice["prompt_token_ids"]) - 32
    assert cached(second) >= len(choice["prompt_token_ids"]) - 32


def test_a_salt_of_its_own_keeps_a_prompt_from_being_found(cluster: ProcessCluster) -> None:
    prompt = "Somebody said: " + 6 * STORY
    completed(cluster, prompt)
    body = {"model": "tandem-tiny", "prompt": prompt, "max_tokens": 4, "cache_salt": "another"}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60).raise_for_status()
    assert cached(answer.json()) == 0


def test_pages_of_a_worker_that_dies_are_known_no_more(cluster: ProcessCluster) -> None:
    prompt = "A last time: " + 6 * STORY
    first = completed(cluster, prompt)
    holder = first["way"]["decode"]
    cluster.workers[holder].end()
    second = completed(cluster, prompt)
    assert second["choices"][0]["text"] == first["choices"][0]["text"]
    assert second["way"]["decode"] != holder
    assert all(one["worker"] != holder for one in second["way"]["candidates"])
