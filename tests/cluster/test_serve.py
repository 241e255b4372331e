"""A whole local cluster over HTTP, which the tests leave as they found it: 1 prefill, 1 decode, two routers."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from serving import CACHE_BYTES, Load, Serve, rare

from tandem.cluster.ray.launcher import WORKER_ENVIRONMENT
from tandem.core.config import MAX_POOL, TransportConfig
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(240)

SILENCE_S = TransportConfig().lease_s  # after which a worker counts as lost


def test_says_how_to_go_on_and_the_curl_line_works(serve: Serve) -> None:
    curl = next(line for line in serve.lines if "curl" in line).split("try it", 1)[1]
    run = subprocess.run(f"{curl} -sS --fail", shell=True, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert '"finish_reason"' in run.stdout
    for word in ("metrics", "tandem scale", "Ctrl-C", serve.url):
        assert word in serve.output
    logs = next(line for line in serve.lines if line.startswith("  logs ")).split()[1].removesuffix(":")
    names = {file.name for file in Path(logs).iterdir()}
    assert {"router-0.log", "supervisor.log", "prefill-0.log", "decode-0.log"} <= names


def test_refused_and_failed_requests_are_told_as_they_happen(serve: Serve) -> None:
    body = {"model": "tandem-tiny", "prompt": "x", "max_tokens": -1}
    answers = [httpx.post(f"{serve.url}/v1/completions", json=body, timeout=60) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [400] * 3
    line = serve.wait_for("refused or failed: ", 15)
    assert "× 400 invalid_request" in line
    assert answers[0].json()["error"]["message"] in line


def test_status_shows_both_workers(serve: Serve) -> None:
    run = serve.tandem("status")
    assert run.returncode == 0, run.stderr
    assert "prefill 1/1 ready, decode 1/1 ready" in run.stdout
    told = json.loads(serve.tandem("status", "--json").stdout)
    assert told["settled"]
    assert told.items() >= {"pid": serve.status()["pid"], "state": "ready"}.items()


def test_a_worker_waits_no_five_seconds_for_an_answer_of_dns_that_was_lost(serve: Serve) -> None:
    for member in serve.members().values():
        assert psutil.Process(member["pid"]).environ().items() >= WORKER_ENVIRONMENT.items()


def test_the_way_of_a_request_and_what_the_logs_say_of_it_are_found_by_its_id(serve: Serve) -> None:
    body = {"model": "tandem-tiny", "prompt": "Once upon a time", "max_tokens": 20, "ignore_eos": True}
    answer = httpx.post(f"{serve.url}/v1/completions", json=body, headers={"x-request-id": "mine-4711"}, timeout=60)
    assert answer.status_code == 200
    traced = serve.tandem("trace", "mine-4711")
    assert traced.returncode == 0, traced.stderr
    assert "20 output tokens" in traced.stdout
    (told,) = json.loads(serve.tandem("trace", "mine-4711", "--json").stdout)
    parts = {span["name"]: span["end_s"] - span["begin_s"] for span in told["spans"]}
    assert parts.keys() >= {"read", "tokenise", "queue", "prefill", "decode", "send"}
    assert sum(parts.values()) == pytest.approx(told["age_s"], rel=0.01)
    top = serve.tandem("top", "--once")
    assert "prefill-0" in top.stdout, top.stderr
    logs = serve.tandem("logs", "--request", "mine-4711").stdout.splitlines()
    assert {line.split()[0] for line in logs} & {"router-0", "router-1"}
    assert all("mine-4711" in line for line in logs)


def test_the_same_request_gives_the_same_text(serve: Serve) -> None:
    texts = {serve.complete().json()["choices"][0]["text"] for _ in range(3)}
    assert len(texts) == 1


def test_a_second_cluster_on_the_port_fails_before_anything_starts(serve: Serve, tmp_path: Path) -> None:
    second = Serve(tmp_path, port=serve.port)
    assert second.process.wait(timeout=30) == 1
    assert "choose another with --port" in second.output
    assert "Starting Ray" not in second.output
    assert second.processes() == []


def test_ray_does_not_wake_idle_actors(serve: Serve) -> None:
    """It would 100 times a second, in a main thread that waits for calls."""
    title = re.compile(r"ray::(Worker|Router|Supervisor)Actor\b")
    actors = [process for process in serve.processes() if title.match(" ".join(process.cmdline()))]
    assert len(actors) == 5
    before = [actor.num_ctx_switches().voluntary for actor in actors]  # of the main thread
    time.sleep(4)
    wakes = [actor.num_ctx_switches().voluntary - old for actor, old in zip(actors, before, strict=True)]
    assert max(wakes) < 100, wakes


@pytest.mark.faults
def test_an_actor_that_waits_for_its_end_heeds_a_signal(serve: Serve) -> None:
    before = serve.members()["decode-0"]
    process = psutil.Process(before["pid"])
    process.terminate()
    gone, _ = psutil.wait_procs([process], timeout=5)
    assert gone
    serve.until(lambda cluster: cluster.get("settled", False))
    assert serve.members()["decode-0"]["incarnation"] != before["incarnation"]


@pytest.mark.parametrize("worker_id", ["prefill-0", rare("decode-0")])
def test_a_killed_worker_comes_back_under_a_new_incarnation(serve: Serve, worker_id: str) -> None:
    before = serve.members()[worker_id]
    with Load(serve, num_clients=2) as load:
        psutil.Process(before["pid"]).kill()
        killed = time.monotonic()

        def noticed(cluster: dict[str, Any]) -> bool:
            lives = {w["member"]["worker_id"]: w["member"]["incarnation"] for w in cluster["workers"]}
            return bool(lives[worker_id] != before["incarnation"])

        serve.until(noticed)
        assert time.monotonic() - killed < 0.8 * SILENCE_S  # by its end, which takes 1 s where nothing else runs
        serve.until(lambda cluster: cluster.get("settled", False))
    after = serve.members()[worker_id]
    assert after["incarnation"] != before["incarnation"]
    assert after["state"] == "ready"
    for response in load.responses:  # answered, or a typed error: nothing hangs, nothing breaks off
        assert response.status_code == 200 or response.json()["error"]["code"], response.text
    assert not load.errors
    assert serve.complete().status_code == 200


def pids(cluster: dict[str, Any]) -> dict[str, int]:
    return {each["member"]["worker_id"]: each["member"]["pid"] for each in cluster["workers"]}


def logs_of_workers(serve: Serve) -> dict[str, str]:
    """By the name of a life."""
    logs = Path(serve.status()["log_directory"])
    files = [file for role in ("prefill", "decode") for file in sorted(logs.glob(f"{role}-*.log"))]
    return {file.stem: file.read_text() for file in files}


def num_loaded(serve: Serve) -> int:
    """How often the model was loaded, by any worker."""
    lines = [line for log in logs_of_workers(serve).values() for line in log.splitlines()]
    return sum(" attention, " in line and "loaded " in line for line in lines)


def seconds_to_change(serve: Serve) -> list[float]:
    """Of each worker that has changed its role, what its next life took to be ready."""
    logs, found = logs_of_workers(serve), []
    for log in logs.values():
        for told in log.split(" goes on as ")[1:]:
            name = told.partition(" ")[0].strip('"},').splitlines()[0]
            found += re.findall(rf"worker ready: {name} at \S+ after ([\d.]+) s", logs[name])[-1:]
    return [float(seconds) for seconds in found]


def test_pools_scale_and_a_worker_changes_its_role_under_load_and_no_request_fails(serve: Serve) -> None:
    """A decode worker comes; it goes to the other pool with its weights, and back; and it leaves."""
    serve.until(lambda cluster: cluster.get("settled", False))
    first, num_before = pids(serve.status()), num_loaded(serve)
    expected = serve.complete().json()["choices"][0]["text"]
    seen = []
    with Load(serve, num_clients=2) as load:
        for num_prefill, num_decode in ((1, 2), (2, 1), (1, 2), (1, 1)):
            run = serve.tandem("scale", "--prefill", str(num_prefill), "--decode", str(num_decode))
            assert run.returncode == 0, run.stderr
            assert "Done: " in run.stdout
            load.wait_for(len(load.responses) + 8)
            seen.append(pids(serve.status()))
            sizes = Counter(name.partition("-")[0] for name in seen[-1])
            assert sizes == {"prefill": num_prefill, "decode": num_decode}
    assert load.failures == []
    grown, changed, back, after = (set(each.values()) for each in seen)
    assert grown > set(first.values())
    assert grown == changed == back > after
    assert num_loaded(serve) == num_before + 1
    seconds = seconds_to_change(serve)
    print("each life was ready after", seconds)
    assert len(seconds) == 2
    assert max(seconds) < 5
    cluster = serve.status()
    assert cluster["settled"]
    assert [pool["ready"] for pool in cluster["pools"]] == [1, 1]
    assert serve.complete().json()["choices"][0]["text"] == expected


@pytest.mark.faults
def test_both_pools_scale_at_once_under_load_and_no_request_fails(serve: Serve) -> None:
    serve.until(lambda cluster: cluster.get("settled", False))
    with Load(serve, num_clients=4) as load:
        for line in (["--prefill", "2", "--decode", "2"], ["--prefill", "1", "--decode", "1"]):
            num_before = len(load.responses)
            run = serve.tandem("scale", *line)
            assert run.returncode == 0, run.stderr
            assert "Done: " in run.stdout
            load.wait_for(num_before + 8)
    assert load.failures == []
    assert len(load.responses) > 16
    cluster = serve.status()
    assert cluster["settled"]
    assert [pool["ready"] for pool in cluster["pools"]] == [1, 1]
    assert len(cluster["workers"]) == 2


@pytest.mark.faults
def test_the_last_prefill_worker_leaves_and_comes_back_under_load_and_no_request_fails(serve: Serve) -> None:
    serve.until(lambda cluster: cluster.get("settled", False))

    def shown() -> tuple[bool, int]:
        told = httpx.get(f"{serve.url}/v1/cluster", timeout=60).json()
        return told["colocated"], len(told["prefill"])

    def computed_by_decode() -> float:
        page = httpx.get(f"{serve.url}/metrics", timeout=60).text
        found = re.search(r'^tandem_local_prefills_total\{.*reason="colocated".*\} (\S+)$', page, re.MULTILINE)
        return float(found[1]) if found else 0.0

    with Load(serve, num_clients=4) as load:
        for size, says in (("0", "no prefill, decode 1/1 ready"), ("1", "prefill 1/1 ready, decode 1/1 ready")):
            run = serve.tandem("scale", "--prefill", size)
            assert run.returncode == 0, run.stderr
            assert says in run.stdout
            wait_until(shown, says, 30, wanted=lambda seen, size=size: seen == (size == "0", int(size)))
            load.wait_for(len(load.responses) + 8)
            assert httpx.get(f"{serve.url}/health", timeout=60).status_code == 200
            wait_until(computed_by_decode, "prompts that decode computed", 60, wanted=lambda num: num >= 8)
    assert load.failures == []
    assert "from 1 to" in serve.tandem("scale", "--decode", "0").stderr


def test_more_workers_than_memory_are_refused(serve: Serve) -> None:
    too_many = psutil.virtual_memory().available // CACHE_BYTES + 2
    if too_many > MAX_POOL:
        pytest.skip("this host has memory for the largest pool")
    run = serve.tandem("scale", "--decode", str(too_many))
    assert run.returncode == 1
    assert "scale to fewer" in run.stderr
    assert serve.status()["settled"]


def test_idle_supervisor_and_routers_cost_nearly_nothing(serve: Serve) -> None:
    idle = ("Supervisor", "RouterActor")
    actors = [p for p in serve.processes() if any(name in " ".join(p.cmdline()) for name in idle)]
    assert len(actors) == 3

    def cpu_s() -> list[float]:
        return [p.cpu_times().user + p.cpu_times().system for p in actors]

    before, span_s = cpu_s(), 15.0  # in a shorter one a single tenth of a second counts for much
    time.sleep(span_s)
    for process, start_s, end_s in zip(actors, before, cpu_s(), strict=True):
        assert (end_s - start_s) / span_s < 0.03, process.cmdline()
