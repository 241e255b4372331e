"""A worker that is started again in its slot finds the pages of its last life on disk: 1P1D of the embedded model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.scenarios.client import Answer, complete
from tests.scenarios.processes import ProcessCluster, running

STORY = "Once upon a time there was a little girl named Lily. She had a dog, and the dog had a red ball. "
LILY, TOM, SUE = (f"{name} said: " + 6 * STORY for name in ("Lily", "Tom", "Sue"))
PAGE = 32


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages") / "kv"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, directory: Path) -> Iterator[ProcessCluster]:
    cache = {"disk_path": str(directory), "page_size": PAGE}
    config = {"model": {"served_names": ["*"]}, "cache": cache, "scheduling": {"mixed_pool": False}}
    with running(tmp_path_factory.mktemp("cluster"), config=config) as cluster:
        yield cluster
        cluster.wait_idle()


def answered(cluster: ProcessCluster, prompt: str) -> Answer:
    return complete(cluster.url, prompt, max_tokens=12, temperature=0)


def cached(answer: Answer) -> int:
    assert answer.usage is not None
    return int(answer.usage["prompt_tokens_details"]["cached_tokens"])


def full_pages(answer: Answer) -> int:
    """Tokens that may be cached: the last one is always computed."""
    assert answer.usage is not None
    return (int(answer.usage["prompt_tokens"]) - 1) // PAGE * PAGE


def tier(cluster: ProcessCluster, role: str, what: str) -> int:
    """Of a worker's own word on its disk."""
    report = cluster.statuses()[f"{role}-0"].tiers
    return sum(getattr(one, what) for one in report.tiers)


def written(cluster: ProcessCluster, prompt: str) -> Answer:
    """An answer, when the prompt's pages are on prefill's disk."""
    before = tier(cluster, "prefill", "written")
    answer = answered(cluster, prompt)
    assert cached(answer) == 0
    wanted = before + full_pages(answer) // PAGE
    cluster.wait_for(lambda: tier(cluster, "prefill", "written"), "pages on disk", wanted=lambda num: num >= wanted)
    return answer


@pytest.fixture(scope="module")
def before(cluster: ProcessCluster, directory: Path) -> dict[str, Answer]:
    """What two prompts were answered before prefill died and its slot got a new process. Files of the second prompt
    were damaged."""
    first = written(cluster, LILY)
    good = set(directory.glob("prefill-0/**/*.kv"))
    second = written(cluster, TOM)
    damaged = set(directory.glob("prefill-0/**/*.kv")) - good
    assert len(damaged) == full_pages(second) // PAGE
    for file in damaged:
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    cluster.wait_for(lambda: tier(cluster, "decode", "pages"), "decode's pages on disk")
    cluster.workers["prefill-0"].end()
    cluster.start_worker("prefill", 0).wait_ready()
    cluster.publish()
    cluster.wait_healthy()
    assert cluster.pages()["prefill-0"]["cached"] == 0
    return {LILY: first, TOM: second}


def test_a_worker_that_is_started_again_is_warm(cluster: ProcessCluster, before: dict[str, Answer]) -> None:
    num_full = full_pages(before[LILY]) // PAGE
    assert num_full > 3
    again = answered(cluster, LILY)
    assert again.texts == before[LILY].texts
    assert cached(again) == num_full * PAGE
    assert cluster.statuses()["prefill-0"].tiers.fetched == num_full
    cluster.wait_for(lambda: cluster.metric("tandem_tier_prompt_pages_total", worker="prefill-0", outcome="fetched"),
                     "the router's figures", wanted=lambda num: num == num_full)  # fmt: skip
    assert cluster.metric("tandem_tier_pages", worker="prefill-0", tier="disk") >= num_full


def test_damaged_files_cost_time_and_nothing_else(cluster: ProcessCluster, before: dict[str, Answer]) -> None:
    again = answered(cluster, TOM)
    assert again.texts == before[TOM].texts
    assert cached(again) == 0
    assert tier(cluster, "prefill", "corrupt") == 1  # what comes behind it is of no use, and is not read


@pytest.mark.usefixtures("before")
def test_another_salt_finds_nothing(cluster: ProcessCluster) -> None:
    answer = complete(cluster.url, LILY, max_tokens=12, temperature=0, cache_salt="another")
    assert cached(answer) == 0


@pytest.mark.usefixtures("before")
def test_each_worker_has_files_of_its_own(directory: Path) -> None:
    assert {path.name for path in directory.iterdir()} == {"prefill-0", "decode-0"}


def explained(cluster: ProcessCluster, prompt: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """An answer, and how its router explains its way."""
    body = {"model": "tandem-tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60).raise_for_status()
    (way,) = httpx.get(f"{cluster.url}/v1/requests/{answer.headers['x-request-id']}/explain").json()["data"]
    return answer.json(), way["attempts"][-1]


@pytest.mark.usefixtures("before")
def test_a_prompt_goes_where_a_disk_has_its_pages(cluster: ProcessCluster) -> None:
    """Both prefill workers have just started, and without what routers are told the first one by name would get it."""
    cluster.workers["prefill-0"].end()
    cluster.start_worker("prefill", 1).wait_ready()
    cluster.publish()
    cluster.wait_healthy()
    first = answered(cluster, SUE)
    num_full = full_pages(first) // PAGE
    cluster.wait_for(lambda: cluster.statuses()["prefill-1"].tiers.tiers[0].written, "pages on disk",
                     wanted=lambda num: num >= num_full)  # fmt: skip
    cluster.workers["prefill-1"].end()
    for number in range(2):
        cluster.start_worker("prefill", number).wait_ready()
    cluster.publish()
    cluster.wait_healthy()
    cluster.wait_for(lambda: cluster.metric("tandem_known_tier_pages"), "news of both disks",
                     wanted=lambda num: num >= num_full)  # fmt: skip
    again, way = explained(cluster, SUE)
    assert [choice["text"] for choice in again["choices"]] == first.texts
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == num_full * PAGE
    assert (way["why"], way["prefill"]) == ("prefix", "prefill-1")
    (chosen,) = (one for one in way["candidates"] if one["worker"] == "prefill-1")
    assert (chosen["held_tokens"], chosen["stored_tokens"]) == (0, num_full * PAGE)
