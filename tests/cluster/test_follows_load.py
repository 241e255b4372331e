"""Pools that follow their load, on one host under Ray: load up, and a worker comes and serves; load gone, it goes.

Where there is no place for another one, it comes from the other pool.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import CACHE_BYTES, Clients, Rays, Serve

from tandem.core.ports import free_port
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.timeout(300), pytest.mark.processes]

NUM_CLIENTS = 4
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}


class LongPrompts(Clients):
    """Clients that ask for one token of long prompts, each of them new, until the block ends."""

    def __init__(self, serve: Serve) -> None:
        self.failures: list[str] = []
        self.num_served = 0
        super().__init__(serve, NUM_CLIENTS)

    def _run(self, client: int) -> None:
        turn = 0
        while not self._stop.is_set():
            turn += 1
            prompt = f"{client} {turn} " + "Once upon a time there was a little girl. " * 20
            try:
                answer = self._serve.complete(prompt, max_tokens=2)
            except httpx.HTTPError as error:
                self.failures.append(repr(error))
                return
            if answer.status_code != 200:
                self.failures.append(f"{answer.status_code}: {answer.text[:300]}")
            self.num_served += 1


def pool_of(cluster: dict[str, Any], role: str) -> dict[str, Any]:
    return next(pool for pool in cluster["pools"] if pool["role"] == role)


def computed(cluster: dict[str, Any], worker_id: str) -> int:
    """Prompt tokens, as of the worker's last report."""
    loads = [w["load"] for w in cluster["workers"] if w["member"]["worker_id"] == worker_id]
    return loads[0]["prompt_tokens_computed"] if loads and loads[0] else 0


@pytest.mark.faults
def test_a_worker_comes_with_the_load_and_leaves_after_it(tmp_path: Path) -> None:
    pool = {"threads": 1}
    serve = Serve(
        tmp_path,
        "--prefill", "1:2",
        pools={"prefill": pool, "decode": pool, "utilisation": 0.05, "shrink_delay_s": 4.0},
        cache={"memory_bytes": CACHE_BYTES},
        transport={"lease_s": 3.0},
        scheduling={"mixed_pool": False},
    )  # fmt: skip
    try:
        serve.wait_ready()
        assert pool_of(serve.status(), "prefill")["wanted"] == 1
        with LongPrompts(serve) as load:
            serve.until(lambda cluster: cluster["settled"] and pool_of(cluster, "prefill")["ready"] == 2)
            wait_until(lambda: computed(serve.status(), "prefill-1"), "it serves", 30, wanted=bool, every_s=0.5)
            num_served = load.num_served
        assert num_served > 0
        why = serve.tandem("status", "--why").stdout
        assert "prefill: 2 of 1 to 2" in why
        assert "1 → 2: " in why
        assert "decode: 1, fixed" in why
        metrics = httpx.get(f"{serve.url}/metrics").text
        lines = [line for line in metrics.splitlines() if line.startswith("tandem_pool_workers{")]
        (wanted,) = [line for line in lines if 'bound="wanted"' in line and 'role="prefill"' in line]
        assert wanted.endswith(" 2.0")
        answers: list[int] = []

        def ask_and_look() -> dict[str, Any]:
            answers.append(serve.complete().status_code)
            return serve.status()

        def is_small(cluster: dict[str, Any]) -> bool:
            return bool(cluster["settled"]) and pool_of(cluster, "prefill")["wanted"] == 1

        shrunk = wait_until(ask_and_look, "one worker again", 60, wanted=is_small, every_s=0.3)
        assert set(answers) == {200}
        changes = [(each["before"], each["wanted"]) for each in pool_of(shrunk, "prefill")["changes"]]
        assert changes == [(1, 2), (2, 1)]
        assert not load.failures
        assert serve.complete().status_code == 200
        assert serve.interrupt() == 0, serve.output
    finally:
        serve.clean_up()


def pids(cluster: dict[str, Any]) -> dict[str, int]:
    return {each["member"]["worker_id"]: each["member"]["pid"] for each in cluster["workers"]}


@pytest.mark.faults
def test_where_no_node_has_a_place_a_worker_comes_from_the_other_pool(tmp_path: Path) -> None:
    rays, port, pool = Rays(tmp_path), free_port(), {"threads": 1}
    try:
        rays.env |= TOKEN
        places = '--resources={"prefill": 1, "decode": 2}'
        rays.start("--head", "--include-dashboard=false", f"--port={port}", places, mode="token")
        serve = Serve(
            tmp_path,
            "--address", f"127.0.0.1:{port}", "--prefill", "1:2", "--decode", "2",
            env=TOKEN,
            security={"tls": "off"},
            pools={"prefill": pool, "decode": pool, "flexible": 1, "utilisation": 0.3, "shrink_delay_s": 600.0},
            cache={"memory_bytes": CACHE_BYTES},
            transport={"lease_s": 3.0},
            scheduling={"mixed_pool": False},
        )  # fmt: skip
        try:
            serve.wait_ready()
            first = pids(serve.status())
            assert set(first) == {"prefill-0", "decode-0", "decode-1"}
            run = serve.tandem("scale", "--decode", "1:2")
            assert run.returncode == 0, run.stderr
            with LongPrompts(serve) as load:
                changed = serve.until(
                    lambda cluster: cluster["settled"] and pool_of(cluster, "prefill")["ready"] == 2, 120
                )
                came = next(name for name in pids(changed) if name.startswith("prefill") and name != "prefill-0")
                wait_until(lambda: computed(serve.status(), came), "it serves", 30, wanted=bool, every_s=0.5)
            assert not load.failures
            assert set(pids(changed).values()) == set(first.values()), "none was started, and none has ended"
            assert pool_of(changed, "decode")["wanted"] == 1
            assert "a worker goes from decode to prefill: " in serve.tandem("status", "--why").stdout
            metrics = httpx.get(f"{serve.url}/metrics").text
            (line,) = [line for line in metrics.splitlines() if 'outcome="taken"' in line and 'role="prefill"' in line]
            assert line.endswith(" 1.0")
        finally:
            serve.interrupt()
            serve.clean_up()
    finally:
        rays.end()
