"""Ray's autoscaler adds nodes for a larger pool, and gets them back; its nodes are processes of this host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from serving import Serve

from benchmarks.autoscale.ray_hosts import TOKEN, RayHosts
from tandem.cluster.certs import make_certificates
from tests.support.waiting import wait_until

# Seven nodes and as many workers: more than two cores start in a moment.
pytestmark = [pytest.mark.timeout(600), pytest.mark.faults]

MOST = 3
"""Nodes of each type at most."""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHosts]:
    """A head with an autoscaler."""
    with RayHosts(tmp_path_factory.mktemp("home"), {"prefill": MOST, "decode": MOST}) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def serve(hosts: RayHosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    certificates = tmp_path_factory.mktemp("certificates") / "certs"
    make_certificates(certificates, days=2)
    security = {"certificates": str(certificates)}
    serve = Serve(tmp_path_factory.mktemp("scaled"), "--address", hosts.address, env=TOKEN, security=security)
    try:
        yield serve.wait_ready()
    finally:
        serve.clean_up()


def nodes_of(serve: Serve) -> dict[str, int]:
    """The raylet below which each worker runs."""
    return {name: psutil.Process(member["pid"]).ppid() for name, member in serve.members().items()}


def scale(serve: Serve, **sizes: int) -> Any:
    options = [option for role, size in sizes.items() for option in (f"--{role}", str(size))]
    return serve.tandem("scale", *options, timeout_s=150)


def test_a_pool_that_is_made_larger_gets_nodes_of_its_type(serve: Serve, hosts: RayHosts) -> None:
    assert hosts.num_nodes() == 2
    run = scale(serve, prefill=MOST, decode=MOST)
    assert run.returncode == 0, run.stderr + run.stdout
    assert f"prefill {MOST}/{MOST} ready, decode {MOST}/{MOST} ready" in run.stdout
    assert len(set(nodes_of(serve).values())) == hosts.num_nodes() == 2 * MOST
    assert serve.complete().status_code == 200


def test_more_than_there_may_be_says_so_and_everything_else_goes_on(serve: Serve) -> None:
    with serve.start("scale", "--decode", str(MOST + 1)) as scaling:
        assert scaling.stdout is not None
        said = next(line for line in scaling.stdout if "Ray has no free node for" in line)
        assert f"decode-{MOST}. Everything else goes on" in said
        assert serve.complete().status_code == 200
        assert serve.tandem("scale", "--decode", str(MOST), "--no-wait").returncode == 0
        scaling.communicate(timeout=60)
    assert scaling.returncode == 0
    assert serve.until(lambda cluster: cluster.get("settled", False))


def test_a_node_that_dies_is_replaced_and_its_worker_goes_to_the_new_one(serve: Serve, hosts: RayHosts) -> None:
    before = nodes_of(serve)
    lives = {name: member["incarnation"] for name, member in serve.members().items()}
    os.kill(before["decode-0"], 9)
    serve.until(lambda cluster: _member(cluster, "decode-0").get("incarnation") != lives["decode-0"])
    assert serve.complete().status_code == 200
    serve.until(lambda cluster: cluster.get("settled", False), timeout_s=90)
    after = nodes_of(serve)
    assert after.pop("decode-0") not in before.values()
    assert after == {name: node for name, node in before.items() if name != "decode-0"}
    assert hosts.num_nodes() == 2 * MOST


def test_a_pool_that_is_made_smaller_gives_its_nodes_back(serve: Serve, hosts: RayHosts) -> None:
    run = scale(serve, prefill=1, decode=1)
    assert run.returncode == 0, run.stderr + run.stdout
    kept = set(nodes_of(serve).values())
    wait_until(hosts.num_nodes, "nodes are given back", 120, wanted=lambda seen: seen == 2, every_s=1)
    assert set(nodes_of(serve).values()) == kept
    assert serve.complete().status_code == 200
    assert serve.interrupt() == 0, serve.output


def _member(cluster: dict[str, Any], name: str) -> dict[str, Any]:
    members = [worker["member"] for worker in cluster["workers"] if worker["member"]["worker_id"] == name]
    return members[0] if members else {}
