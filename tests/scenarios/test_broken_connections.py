"""Connections that break between two workers that live: requests get the same tokens, and nobody ends for it."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.scenarios.client import Answer, ask
from tests.scenarios.processes import ProcessCluster, running
from tests.support.cut import break_connections
from tests.support.waiting import SLACK, wait_until

NUM_REQUESTS = 8
NUM_CUTS = 3
# Every prompt is handed off. Each cut may end an attempt.
CONFIG = {
    "model": {"served_names": ["*"]},
    "scheduling": {"mixed_pool": False, "local_prefill_tokens": 0},
    "limits": {"max_attempts": NUM_CUTS + 1},
}
MEND_S = 1.0


@pytest.fixture(scope="module", params=["tcp,self", ""], ids=["tcp", "one-host"])
def one_pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    """1P1D, whose pages go over TCP as between hosts, or over shared memory."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param:
            patch.setenv("UCX_TLS", request.param)
        with running(tmp_path_factory.mktemp("pair"), config=CONFIG) as cluster:
            yield cluster


def prompts(num: int, seed: int) -> list[list[int]]:
    """Different ones, of many pages: no cache has them."""
    draw = random.Random(seed)
    return [[draw.randrange(5, 200) for _ in range(400)] for _ in range(num)]


def serve(cluster: ProcessCluster, prompts: list[list[int]]) -> Iterator[Answer]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        yield from pool.map(lambda p: ask(cluster.url, p, streamed=True, max_tokens=24), prompts)


def cut(cluster: ProcessCluster) -> int:
    return break_connections(cluster.workers["prefill-0"].pid, cluster.workers["decode-0"].pid)


def log_of_prefill(cluster: ProcessCluster) -> str:
    return cluster.workers["prefill-0"].log.read_text()


def is_whole(cluster: ProcessCluster, begin: int) -> bool:
    """Whether the last word of prefill on its connection is a good one, of those from this place of its log on."""
    log = log_of_prefill(cluster)[begin:]
    return log.rfind("is up again") > log.rfind("is broken and is made anew")


def check_same(cluster: ProcessCluster, asked: list[list[int]], disturbed: list[Answer]) -> None:
    """All were answered, with the tokens that they get when nothing breaks."""
    failures = [answer for answer in disturbed if answer.error or answer.broken or not answer.done]
    assert not failures, f"{failures}\n{cluster.logs()}"
    undisturbed = list(serve(cluster, asked))
    assert [answer.token_ids for answer in disturbed] == [answer.token_ids for answer in undisturbed]


def test_requests_whose_connection_breaks_get_the_same_tokens_and_no_worker_ends(one_pair: ProcessCluster) -> None:
    pids = {name: process.pid for name, process in one_pair.workers.items()}
    begin = len(log_of_prefill(one_pair))
    list(serve(one_pair, prompts(1, seed=0)))

    # While nothing is under way: nobody notices, and all eight meet the broken connection.
    asked = prompts(NUM_REQUESTS, seed=1)
    assert cut(one_pair) > 0
    check_same(one_pair, asked, list(serve(one_pair, asked)))

    # While they are under way, several times.
    asked = prompts(NUM_REQUESTS, seed=2)
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(lambda: list(serve(one_pair, asked)))
        for _ in range(NUM_CUTS):
            time.sleep(0.1)
            cut(one_pair)
        check_same(one_pair, asked, answers.result(60))

    wait_until(lambda: is_whole(one_pair, begin), "the connection", SLACK * MEND_S, more=one_pair.logs)
    one_pair.wait_idle(SLACK * MEND_S)
    assert {name: process.pid for name, process in one_pair.workers.items() if process.lives} == pids
    assert one_pair.metric("tandem_writers_suspected_total") == 0


def test_a_broken_connection_is_up_again_within_a_second_or_so(one_pair: ProcessCluster) -> None:
    list(serve(one_pair, prompts(1, seed=3)))
    begin = len(log_of_prefill(one_pair))
    assert cut(one_pair) > 0
    since = time.monotonic()
    (answer,) = serve(one_pair, prompts(1, seed=4))
    assert answer.done, answer
    wait_until(lambda: is_whole(one_pair, begin), "the connection", SLACK * MEND_S, more=one_pair.logs)
    print(f"up again {time.monotonic() - since:.2f} s after it broke")
