"""Two Ray nodes with the resource `router`: each gets a router, and a successor comes to its predecessor's node."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serving import ROOT, Serve, parent_of, raylet_of

from tandem.cluster.certs import make_certificates
from tandem.rpc.channel import host_of
from tandem.rpc.security import is_loopback

pytestmark = pytest.mark.timeout(300)

OBJECT_STORE = 100 << 20


@pytest.fixture(scope="module")
def nodes() -> Iterator[dict[str, Any]]:
    """A head for the supervisor alone, and two nodes for the rest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
        from ray._private.authentication_test_utils import reset_auth_token_state
        from ray.cluster_utils import Cluster

        reset_auth_token_state()  # Ray has read the variables already if another test has imported it
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": OBJECT_STORE})
        try:
            one, two = (
                cluster.add_node(num_cpus=1, resources={role: 1, "router": 1}, object_store_memory=OBJECT_STORE)
                for role in ("prefill", "decode")
            )
            yield {"cluster": cluster, "one": one, "two": two}
        finally:
            cluster.shutdown()
    reset_auth_token_state()


@pytest.fixture(scope="module")
def serve(nodes: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    certificates = tmp_path_factory.mktemp("certificates") / "certs"
    make_certificates(certificates, days=2)
    serve = Serve(
        tmp_path_factory.mktemp("routers"),
        *("--address", nodes["cluster"].address, "--routers", "2"),
        security={"certificates": str(certificates)},
        http={"host": "0.0.0.0", "allow_anonymous": True},
    )
    try:
        yield serve.wait_ready()
    finally:
        serve.clean_up()


def raylets(cluster: dict[str, Any]) -> dict[str, int]:
    """Of the nodes of the routers, by their names."""
    return {router["name"]: parent_of(router["pid"]) for router in cluster["routers"]}


def test_each_node_gets_one_which_the_supervisor_reaches_there(serve: Serve, nodes: dict[str, Any]) -> None:
    cluster = serve.status()
    assert set(raylets(cluster).values()) == {raylet_of(nodes["one"]), raylet_of(nodes["two"])}
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
