"""Tenants with a backlog get what their weights say, with real processes: 1P1D, four places.

Engines are simulated: an answer takes what its steps take, a tenth of a second and more, and not what this process
needs to ask for the next one, so that who has a backlog has it on slow machines too.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.scenarios.processes import Process, ProcessCluster, running
from tests.support.fairness import jain

KEYS = {name: f"sk-{name}-0123456789" for name in ("flood", "modest", "double", "calm")}
WEIGHTS = {"flood": 1.0, "modest": 1.0, "double": 2.0}
FILE = f"""tenants:
  - {{name: flood, keys: [{KEYS["flood"]}]}}
  - {{name: modest, keys: [{KEYS["modest"]}]}}
  - {{name: double, keys: [{KEYS["double"]}], weight: 2}}
  - {{name: calm, keys: [{KEYS["calm"]}]}}
"""
TIMES = "prefill: {tokens: 20000}\ndecode: {tokens: 20000}\ntimes: fitted\nfitted: {base_ms: %g, token_us: 20}\n"
STORY = "Once upon a time there was a little girl named Lily. She had a dog, and the dog had a red ball. "
#: Stories in the prompts, and tokens of their answers.
SIZES = {"flood": (1, 48), "modest": (4, 8), "double": (2, 24), "calm": (1, 4)}


@contextmanager
def fair_cluster(tmp_path: Path, num_routers: int, step_ms: float = 4.0) -> Iterator[ProcessCluster]:
    keys = tmp_path / "keys"
    keys.touch(mode=0o600)
    keys.write_text(FILE)
    times = tmp_path / "times.yaml"
    times.write_text(TIMES % step_ms)
    config = {
        "http": {"api_keys_file": str(keys)},
        "scheduling": {"max_num_seqs": 4},
        "model": {"served_names": ["tandem-tiny"], "engine": "simulated", "time_model": str(times)},
    }
    with running(tmp_path, config=config, num_routers=num_routers) as cluster:
        yield cluster


def ask(client: httpx.Client, tenant: str) -> int:
    """The tokens of prompt and answer."""
    num_stories, num_tokens = SIZES[tenant]
    body = {"model": "tandem-tiny", "prompt": num_stories * STORY, "max_tokens": num_tokens, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {KEYS[tenant]}"}
    answer = client.post("/v1/completions", json=body, headers=headers)
    return int(answer.raise_for_status().json()["usage"]["total_tokens"])


def accepted_by(cluster: ProcessCluster, router: Process) -> httpx.Client:
    """A client whose connection, which stays, is with this router."""
    port = int(cluster.url.rpartition(":")[2])
    for _ in range(200):
        client = httpx.Client(base_url=cluster.url, timeout=60)
        own = client.get("/health").raise_for_status().extensions["network_stream"].get_extra_info("client_addr")[1]
        connections = psutil.Process(router.pid).net_connections("tcp")
        if any(c.laddr.port == port and c.raddr and c.raddr.port == own for c in connections):
            return client
        client.close()
    raise AssertionError(f"{router.name} accepts no connection:\n{cluster.logs()}")


def served(
    cluster: ProcessCluster, clients: Mapping[str, tuple[int, ...]], num_tokens: int
) -> tuple[Counter[str], list[int]]:
    """What tenants got while all of them together got so many tokens; and how many of these came while each request of
    one waited that asks seldom.

    Args:
        clients: of each router, how many ask again as soon as they are answered.
    """
    got, over, lock = Counter[str](), threading.Event(), threading.Lock()
    errors: list[Exception] = []
    in_front: list[int] = []

    def load(client: httpx.Client, tenant: str) -> None:
        while not over.is_set():
            try:
                num_got = ask(client, tenant)
            except Exception as error:  # noqa: BLE001 - told below
                errors.append(error)
                over.set()
                return
            with lock:
                if not over.is_set():
                    got[tenant] += num_got
                if got.total() >= num_tokens:
                    over.set()

    with ExitStack() as stack:
        asking = [
            (stack.enter_context(closing(accepted_by(cluster, router))), tenant)
            for tenant, numbers in clients.items()
            for router, num in zip(cluster.routers, numbers, strict=True)
            for _ in range(num)
        ]
        threads = [threading.Thread(target=load, args=each) for each in asking]
        for thread in threads:
            thread.start()
        client = stack.enter_context(closing(accepted_by(cluster, cluster.router)))
        while not over.is_set():
            before = got.total()
            ask(client, "calm")
            in_front.append(got.total() - before)
        for thread in threads:
            thread.join()
    assert not errors
    return got, in_front


def test_who_floods_gets_no_more_than_its_share_and_who_asks_seldom_is_served_soon(tmp_path: Path) -> None:
    with fair_cluster(tmp_path, num_routers=1) as cluster:
        got, in_front = served(cluster, {"flood": (24,), "modest": (8,), "double": (12,)}, 8_000)
    assert jain([got[tenant] / weight for tenant, weight in WEIGHTS.items()]) >= 0.95, got
    # Those in the five places that can be taken, and one turn of each of the others.
    assert len(in_front) > 10
    in_front.sort()
    assert in_front[len(in_front) // 2] < 9 * 120, in_front


@pytest.mark.faults
def test_at_two_routers_too_wherever_the_connections_of_a_tenant_lie(tmp_path: Path) -> None:
    """Each router by itself would give those of the first half of all there is, and those of the second the other:
    0.64. A turn takes some words' time, also on a machine that has nothing else to do.
    """
    with fair_cluster(tmp_path, num_routers=2, step_ms=10.0) as cluster:
        got, _ = served(cluster, {"flood": (2, 22), "modest": (8, 0), "double": (12, 0)}, 8_000)
    assert jain([got[tenant] / weight for tenant, weight in WEIGHTS.items()]) >= 0.95, got
