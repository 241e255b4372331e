"""A prompt goes where its pages lie in host memory, when the page pool there has no room for them any more: two prefill
workers and a decode worker of the embedded model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from tests.scenarios.processes import ProcessCluster

STORY = "Once upon a time there was a little girl named Lily. She had a dog, and the dog had a red ball. "
PAGE = 32
POOL = ("--kv-bytes", str(2 << 20))


def asked(cluster: ProcessCluster, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The answer to what this one said, and how its router explains its way."""
    body = {"model": "tandem-tiny", "prompt": f"{name} said: " + 6 * STORY, "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60).raise_for_status()
    (way,) = httpx.get(f"{cluster.url}/v1/requests/{answer.headers['x-request-id']}/explain").json()["data"]
    return answer.json(), way["attempts"][-1]


def test_evicted_pages_are_read_where_they_lie_and_not_computed_again(tmp_path: Path) -> None:
    """The first worker by name has just started: it is as idle as the other one, and would get the prompt by load."""
    config = {"cache": {"host_bytes": 64 << 20, "page_size": PAGE}, "scheduling": {"mixed_pool": False}}
    cluster = ProcessCluster(tmp_path, config=config)
    try:
        cluster.start_router()
        cluster.start_worker("prefill", 1, *POOL)
        cluster.start_worker("decode", 0)
        cluster.wait_started()
        first, _ = asked(cluster, "Sue")
        num_full = (first["usage"]["prompt_tokens"] - 1) // PAGE
        assert num_full > 3
        cluster.wait_for(lambda: cluster.statuses()["prefill-1"].tiers.tiers[0].written, "pages in host memory",
                         wanted=lambda num: num >= num_full)  # fmt: skip
        num_pages = sum(cluster.pages()["prefill-1"].values())
        for number in range(num_pages // num_full + 2):
            asked(cluster, f"Number {number}")
        cluster.start_worker("prefill", 0, *POOL)
        cluster.wait_started()
        again, way = asked(cluster, "Sue")
        assert again["choices"][0]["text"] == first["choices"][0]["text"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == num_full * PAGE
        assert (way["why"], way["prefill"]) == ("prefix", "prefill-1")
        (chosen,) = (one for one in way["candidates"] if one["worker"] == "prefill-1")
        assert (chosen["held_tokens"], chosen["stored_tokens"]) == (0, num_full * PAGE)
    finally:
        cluster.stop()
