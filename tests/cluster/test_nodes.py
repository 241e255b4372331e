"""Several Ray nodes on one host: prefill on one, decode on another, a router on each, and Ray is not ours to stop.

They listen on the host's own address, so all that is asked for beyond loopback is there: Ray's token, certificates.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import ROOT, Load, Serve, parent_of, raylet_of

from tandem.cluster.certs import make_certificates
from tandem.rpc.channel import host_of
from tandem.rpc.security import is_loopback
from tests.support.waiting import nothing, wait_until

pytestmark = [pytest.mark.timeout(240), pytest.mark.faults]


@pytest.fixture(scope="module")
def nodes() -> Iterator[dict[str, Any]]:
    """A head for the supervisor alone, one node for each role, and the utility itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
        from ray._private.authentication_test_utils import reset_auth_token_state
        from ray.cluster_utils import Cluster

        reset_auth_token_state()  # Ray has read the variables already if another test has imported it
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 100 << 20})
        try:
            yield {
                "cluster": cluster,
                **{
                    role: cluster.add_node(num_cpus=1, resources={role: 1, "router": 1}, object_store_memory=100 << 20)
                    for role in ("prefill", "decode")
                },
            }
        finally:
            cluster.shutdown()
    reset_auth_token_state()


@pytest.fixture(scope="module")
def security(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    certificates = tmp_path_factory.mktemp("certificates") / "certs"
    make_certificates(certificates, days=2)
    return {"certificates": str(certificates)}


@pytest.fixture(scope="module")
def serve(nodes: dict[str, Any], security: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    serve = Serve(
        tmp_path_factory.mktemp("nodes"),
        *("--address", nodes["cluster"].address, "--routers", "2"),
        security=security,
        http={"host": "0.0.0.0", "allow_anonymous": True},
    )
    try:
        yield serve.wait_ready()
    finally:
        serve.clean_up()


def test_each_role_runs_on_its_own_node_and_requests_are_answered(serve: Serve, nodes: dict[str, Any]) -> None:
    members = serve.members()
    assert parent_of(members["prefill-0"]["pid"]) == raylet_of(nodes["prefill"])
    assert parent_of(members["decode-0"]["pid"]) == raylet_of(nodes["decode"])
    assert parent_of(serve.status()["pid"]) == raylet_of(nodes["cluster"].head_node)
    response = serve.complete(max_tokens=16)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] == 16


def raylets(cluster: dict[str, Any]) -> dict[str, int]:
    """Of the nodes of the routers, by their names."""
    return {router["name"]: parent_of(router["pid"]) for router in cluster["routers"]}


def test_each_node_gets_one_which_the_supervisor_reaches_there(serve: Serve, nodes: dict[str, Any]) -> None:
    cluster = serve.status()
    assert set(raylets(cluster).values()) == {raylet_of(nodes["prefill"]), raylet_of(nodes["decode"])}
    for router in cluster["routers"]:
        assert not is_loopback(host_of(router["control_address"]))
        body = {"model": "tandem-tiny", "prompt": "x", "max_tokens": 2}
        answer = httpx.post(f"{router['url']}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
    answers = re.findall(r'tandem_router_answers{router="(.*?)"} 1', httpx.get(f"{serve.url}/metrics").text)
    assert sorted(answers) == ["router-0", "router-1"], "the two nodes are on one host, and share its port"


def test_a_successor_comes_to_the_node_of_whom_it_replaces(serve: Serve, nodes: dict[str, Any]) -> None:
    before = raylets(serve.status())
    run = serve.tandem("drain", "router-0")
    assert run.returncode == 0, run.stdout + run.stderr
    after = raylets(serve.status())
    assert after == {"router-1": before["router-1"], "router-2": before["router-0"]}


def test_the_command_line_finds_it_through_ray(serve: Serve, nodes: dict[str, Any]) -> None:
    run = serve.tandem("status", "--address", nodes["cluster"].address)
    assert run.returncode == 0, run.stderr
    assert "prefill 1/1 ready, decode 1/1 ready, routers 2/2 ready" in run.stdout


REST = """
import logging, sys, ray
ray.init(address=sys.argv[1], namespace="tandem", log_to_driver=False, logging_level=logging.ERROR)
resting = ray.get_actor("supervisor").rest.remote(15)
print("asked", flush=True)
sys.stdin.read()
"""


def test_a_command_does_not_wait_for_the_supervisors_actor_which_rests(serve: Serve, nodes: dict[str, Any]) -> None:
    address = nodes["cluster"].address
    line = [sys.executable, "-c", REST, address]
    with subprocess.Popen(line, env=serve.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as asking:
        assert asking.stdout is not None
        assert asking.stdout.readline() == "asked\n"
        run = serve.tandem("status", "--address", address)
        asking.communicate()
    assert run.returncode == 0, run.stderr


def test_logs_of_all_processes_are_read_wherever_they_run(serve: Serve, nodes: dict[str, Any]) -> None:
    address = nodes["cluster"].address
    said = serve.tandem("logs", "--tail", "1000", "--address", address)
    assert said.returncode == 0, said.stderr
    for process in ("prefill-0", "decode-0", "router-1", "supervisor"):
        assert any(line.startswith(f"{process} ") for line in said.stdout.splitlines()), process
    following = serve.start("logs", "decode-0", "--tail", "1000", "--follow", "--address", address)
    try:
        assert following.stdout is not None
        assert next(line for line in following.stdout if "worker ready: decode-0" in line)
    finally:
        following.kill()
        following.wait()
    unknown = serve.tandem("logs", "decode-7", "--address", address)
    assert unknown.returncode == 1
    assert "there is no log of decode-7; there are those of decode-0" in unknown.stderr


STATUS_OF_THE_NEXT = """
import contextlib, sys, psutil
from tandem import cli
from tandem.cluster.ray import home
address, pid = sys.argv[1], int(sys.argv[2])
open_store = home.open_store
@contextlib.contextmanager
def open_and_kill(*args, **options):
    with open_store(*args, **options):
        supervisor = psutil.Process(pid)
        supervisor.kill()
        supervisor.wait(10)
        yield
home.open_store = open_and_kill
sys.exit(cli.main(["status", "--json", "--address", address]))
"""


def test_a_command_waits_for_a_supervisor_that_is_started_again(serve: Serve, nodes: dict[str, Any]) -> None:
    """It dies right before the command looks where it listens."""
    before = serve.status()["pid"]
    line = [sys.executable, "-c", STATUS_OF_THE_NEXT, nodes["cluster"].address, str(before)]
    run = subprocess.run(line, env=serve.env, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["pid"] != before
    serve.until(lambda cluster: cluster.get("settled", False))


def test_a_second_cluster_in_the_same_ray_is_refused(
    serve: Serve, nodes: dict[str, Any], security: dict[str, str], tmp_path: Path
) -> None:
    second = Serve(tmp_path, "--address", nodes["cluster"].address, security=security)
    assert second.process.wait(timeout=60) == 1
    assert "a Tandem cluster runs in the Ray cluster" in second.output
    assert serve.status()["settled"]


SCALE_SOON_ADVISED = """
import sys
from tandem import cli
from tandem.cluster import commands
commands.NODE_WAIT_S = 2.0
sys.exit(cli.main(["scale", *sys.argv[1:]]))
"""


def test_a_worker_waits_for_a_node_and_starts_when_one_comes(serve: Serve, nodes: dict[str, Any]) -> None:
    address = nodes["cluster"].address
    line = [sys.executable, "-c", SCALE_SOON_ADVISED, "--decode", "2", "--address", address]
    with subprocess.Popen(line, env=serve.env, stdout=subprocess.PIPE, text=True) as scaling:
        assert scaling.stdout is not None
        said = next(line for line in scaling.stdout if "Ray has no free node for" in line)
        assert "decode-1. Everything else goes on" in said
        assert f"""ray start --address={address} --resources='{{"decode": 1}}'""" in next(scaling.stdout)
        assert f"tandem scale --address {address} --decode 1" in next(scaling.stdout)
        with Load(serve, num_clients=2) as load:
            added = nodes["cluster"].add_node(num_cpus=1, resources={"decode": 1}, object_store_memory=100 << 20)
            rest, _ = scaling.communicate(timeout=150)
    assert load.failures == []
    assert "Done: prefill 1/1 ready, decode 2/2 ready, routers 2/2 ready" in rest
    assert parent_of(serve.members()["decode-1"]["pid"]) == raylet_of(added)


def test_a_watcher_that_dies_is_replaced_and_proves_what_ends_later(serve: Serve, nodes: dict[str, Any]) -> None:
    """The actor that watches on a node other than the supervisor's."""
    import psutil

    def watchers() -> list[psutil.Process]:
        raylet = psutil.Process(raylet_of(nodes["prefill"]))
        return [child for child in raylet.children() if "ray::WatcherActor" in " ".join(child.cmdline())]

    (watcher,) = watchers()
    watcher.kill()
    before = serve.members()["prefill-0"]
    prefill = psutil.Process(before["pid"])
    prefill.kill()
    serve.until(lambda c: all(w["member"]["incarnation"] != before["incarnation"] for w in c["workers"]))
    serve.until(lambda c: c.get("settled", False))
    proved = f"ProcessEnded(incarnation='{before['incarnation']}')"
    wait_until(lambda: proved in _supervisor_log(serve), proved, 30, every_s=0.5)
    (after,) = watchers()
    assert after.pid != watcher.pid


def test_a_node_that_is_lost_takes_its_worker_and_the_cluster_goes_on(serve: Serve, nodes: dict[str, Any]) -> None:
    before = serve.members()
    os.kill(raylet_of(nodes["decode"]), 9)
    serve.until(lambda c: any(w["member"]["incarnation"] not in _lives(before) for w in c["workers"]))
    # Its watcher died with the node: nobody can prove the end of the worker there.
    missed = "no proof that decode-0"
    wait_until(lambda: missed in _supervisor_log(serve), missed, 30, every_s=0.5)
    assert serve.complete().status_code == 200
    assert serve.tandem("scale", "--decode", "1").returncode == 0
    assert serve.status()["settled"]
    assert serve.complete().status_code == 200


def test_ctrl_c_stops_the_actors_but_not_ray(serve: Serve, nodes: dict[str, Any]) -> None:
    pids = [member["pid"] for member in serve.members().values()] + [serve.status()["pid"]]
    assert serve.interrupt() == 0, serve.output
    wait_until(lambda: [pid for pid in pids if _is_actor(pid)], "no actor", wanted=nothing, every_s=0.1)
    assert raylet_of(nodes["cluster"].head_node)
    assert nodes["cluster"].head_node.any_processes_alive()


def _lives(members: dict[str, dict[str, Any]]) -> set[str]:
    return {member["incarnation"] for member in members.values()}


def _supervisor_log(serve: Serve) -> str:
    directory = Path(next(line for line in serve.lines if "logs in" in line).rpartition("logs in ")[2])
    return (directory / "supervisor.log").read_text()


def _is_actor(pid: int) -> bool:
    import psutil

    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and "Actor" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False
