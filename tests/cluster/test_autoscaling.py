"""Ray's autoscaler adds nodes for a larger pool, and gets them back; its nodes are processes of this host."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from serving import Rays, Serve

from tandem.cluster.certs import make_certificates
from tandem.core.ports import free_port
from tests.support.waiting import wait_until

# Seven nodes and as many workers: more than two cores start in a moment.
pytestmark = [pytest.mark.timeout(600), pytest.mark.faults]

MOST = 3
"""Nodes of each type at most."""

TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}

HEAD_ID = "fffffffffffffffffffffffffffffffffffffffffffffffffff00000"
"""Of the head, as Ray's provider of such nodes wants it."""

SETTINGS = {
    "RAY_FAKE_CLUSTER": "1",
    "RAY_enable_autoscaler_v2": "1",  # as `ray up` does
    "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    # A node whose Ray was killed shall be given up at once.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "3",
}


def launcher_file(directory: Path, gcs_address: str) -> Path:
    """As `ray up` hands it to the head: one node of each type at first."""
    pool = {"node_config": {}, "min_workers": 1, "max_workers": MOST}
    tree = {
        "cluster_name": "tandem-autoscaling",
        "max_workers": 2 * MOST,
        "idle_timeout_minutes": 0.05,
        "upscaling_speed": 100.0,
        "provider": {
            # Named by its class: the defaults of the type `fake_multinode` are missing from Ray's wheel.
            "type": "external",
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "launch_multiple": True,
            "head_node_id": HEAD_ID,
            "gcs_address": gcs_address,
        },
        "auth": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"node_config": {}, "max_workers": 0, "resources": {"CPU": 1, "router": 1}},
            **{
                role: {**pool, "resources": {"CPU": 1, role: 1, "object_store_memory": 100 << 20}}
                for role in ("prefill", "decode")
            },
        },
        **{
            f"{part}_commands": []
            for part in (
                "initialization",
                "setup",
                "head_setup",
                "worker_setup",
                "head_start_ray",
                "worker_start_ray",
            )
        },
    }
    file = directory / "autoscaling.json"
    file.write_text(json.dumps(tree))
    return file


@pytest.fixture(scope="module")
def rays(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Rays, str]]:
    """A head with an autoscaler, and its address."""
    from ray._private.services import get_node_ip_address

    rays, address = Rays(tmp_path_factory.mktemp("home")), f"{get_node_ip_address()}:{free_port()}"
    rays.env |= {**TOKEN, **SETTINGS}
    file = launcher_file(rays.home, address)
    head = ("--head", "--include-dashboard=false", f"--port={address.rpartition(':')[2]}")
    try:
        rays.start(*head, f"--autoscaling-config={file}", '--resources={"router": 1}', mode="token")
        yield rays, address
    finally:
        rays.end()


@pytest.fixture(scope="module")
def serve(rays: tuple[Rays, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    certificates = tmp_path_factory.mktemp("certificates") / "certs"
    make_certificates(certificates, days=2)
    security = {"certificates": str(certificates)}
    serve = Serve(tmp_path_factory.mktemp("scaled"), "--address", rays[1], env=TOKEN, security=security)
    try:
        yield serve.wait_ready()
    finally:
        serve.clean_up()


def num_nodes(rays: Rays) -> int:
    """Nodes with workers."""
    return sum(_is_raylet(process) for process in rays.processes()) - 1


def _is_raylet(process: psutil.Process) -> bool:
    try:
        return Path(process.cmdline()[0]).name == "raylet"
    except (psutil.NoSuchProcess, IndexError):
        return False


def nodes_of(serve: Serve) -> dict[str, int]:
    """The raylet below which each worker runs."""
    return {name: psutil.Process(member["pid"]).ppid() for name, member in serve.members().items()}


def scale(serve: Serve, **sizes: int) -> Any:
    options = [option for role, size in sizes.items() for option in (f"--{role}", str(size))]
    return serve.tandem("scale", *options, timeout_s=150)


def test_a_pool_that_is_made_larger_gets_nodes_of_its_type(serve: Serve, rays: tuple[Rays, str]) -> None:
    assert num_nodes(rays[0]) == 2
    run = scale(serve, prefill=MOST, decode=MOST)
    assert run.returncode == 0, run.stderr + run.stdout
    assert f"prefill {MOST}/{MOST} ready, decode {MOST}/{MOST} ready" in run.stdout
    assert len(set(nodes_of(serve).values())) == num_nodes(rays[0]) == 2 * MOST
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


def test_a_node_that_dies_is_replaced_and_its_worker_goes_to_the_new_one(serve: Serve, rays: tuple[Rays, str]) -> None:
    before = nodes_of(serve)
    lives = {name: member["incarnation"] for name, member in serve.members().items()}
    os.kill(before["decode-0"], 9)
    serve.until(lambda cluster: _member(cluster, "decode-0").get("incarnation") != lives["decode-0"])
    assert serve.complete().status_code == 200
    serve.until(lambda cluster: cluster.get("settled", False), timeout_s=90)
    after = nodes_of(serve)
    assert after.pop("decode-0") not in before.values()
    assert after == {name: node for name, node in before.items() if name != "decode-0"}
    assert num_nodes(rays[0]) == 2 * MOST


def test_a_pool_that_is_made_smaller_gives_its_nodes_back(serve: Serve, rays: tuple[Rays, str]) -> None:
    run = scale(serve, prefill=1, decode=1)
    assert run.returncode == 0, run.stderr + run.stdout
    kept = set(nodes_of(serve).values())
    wait_until(lambda: num_nodes(rays[0]), "nodes are given back", 120, wanted=lambda seen: seen == 2, every_s=1)
    assert set(nodes_of(serve).values()) == kept
    assert serve.complete().status_code == 200
    assert serve.interrupt() == 0, serve.output


def _member(cluster: dict[str, Any], name: str) -> dict[str, Any]:
    members = [worker["member"] for worker in cluster["workers"] if worker["member"]["worker_id"] == name]
    return members[0] if members else {}
