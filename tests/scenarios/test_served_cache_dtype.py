"""K and V in fewer bits: a cluster says what one engine with such pages says, whoever computes which token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.core.model_path import resolve_model
from tandem.engine.engine import Engine, SequenceInput
from tests.scenarios.client import complete, events
from tests.scenarios.processes import ProcessCluster, running

CONFIG: dict[str, Any] = {
    "model": {"served_names": ["*"]},
    "cache": {"dtype": "bfloat16"},
    "scheduling": {"mixed_pool": False},
}
PROMPT = list(range(300, 420))
NUM_NEW = 60


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load(resolve_model("embedded"), cache_dtype="bfloat16", num_pages=8, num_threads=1, probe=False)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    with running(tmp_path_factory.mktemp("cluster"), 1, 2, config=CONFIG) as cluster:
        yield cluster
        cluster.wait_idle()


def greedy(engine: Engine, prompt: list[int], num_new: int) -> list[int]:
    """Of a prompt in one piece, then token by token."""
    pages, tokens, start = range(engine.num_pages), prompt, 0
    found: list[int] = []
    while len(found) < num_new:
        logits = engine.forward([SequenceInput(tokens, start, pages, 1)])
        start, tokens = start + len(tokens), [int(logits[0].argmax())]
        found += tokens
    return found


def test_prefill_and_decode_say_what_one_engine_says(cluster: ProcessCluster, engine: Engine) -> None:
    expected = greedy(engine, PROMPT, NUM_NEW)
    answer = complete(cluster.url, PROMPT, max_tokens=NUM_NEW, ignore_eos=True)
    assert answer.token_ids == [expected]
    num_pages = engine.layout.num_pages_for(len(PROMPT))
    assert cluster.statuses()["prefill-0"].transfer_bytes == num_pages * engine.layout.page_bytes


def test_a_decode_worker_that_dies_changes_no_token(cluster: ProcessCluster) -> None:
    fields: dict[str, Any] = {"max_tokens": 600, "ignore_eos": True, "temperature": 0.8, "seed": 6}
    expected = complete(cluster.url, PROMPT, **fields).token_ids
    ids: list[int] = []
    for event in events(cluster.url, PROMPT, **fields):
        if event is None:
            break
        ids += event["choices"][0]["token_ids"] or []
        if len(ids) >= 20 and len(cluster.workers) == 2 + 1:
            busy = [name for name, status in cluster.statuses().items() if "decode" in name and status.num_running]
            for name in busy:
                cluster.workers.pop(name).end()
            cluster.publish()
    assert len(cluster.workers) == 2
    assert [ids] == expected


def test_workers_with_other_pages_do_not_pair(cluster: ProcessCluster, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("cache:\n  dtype: auto\n")
    cluster.start_worker("decode", 7, "--config", str(other)).wait_ready()
    cluster.publish()
    cluster.wait_for(lambda: cluster.status()["incompatible"], "who does not pair")
    (found,) = cluster.status()["incompatible"]
    (difference,) = found["differences"]
    assert difference.startswith("dtype: prefill-0/")
    for part in ("'bfloat16'", "decode-7/", "'float32'"):
        assert part in difference
    assert complete(cluster.url, PROMPT, max_tokens=3).texts, "the others go on"
