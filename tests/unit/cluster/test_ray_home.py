"""The settings that a Ray of our own gets by its environment; by which addresses a joined one must know its nodes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tandem.cluster.ray import home
from tandem.cluster.ray.home import RECONNECT_S, local_environment
from tandem.cluster.spec import ClusterSpec
from tandem.core.config import Config
from tandem.core.errors import ConfigError, InternalError


def test_ray_measures_nothing_of_itself_unless_the_user_wants_it() -> None:
    assert local_environment({})["RAY_enable_metrics_collection"] == "0"
    assert local_environment({"RAY_enable_metrics_collection": "1"})["RAY_enable_metrics_collection"] == "1"


def test_what_the_cluster_relies_on_holds_whatever_the_user_has_set() -> None:
    environment = local_environment({"RAY_gcs_rpc_server_reconnect_timeout_s": "1", "PATH": "/bin"})
    assert environment["RAY_gcs_rpc_server_reconnect_timeout_s"] == str(RECONNECT_S)
    assert environment["PATH"] == "/bin"


def test_a_ray_that_does_not_start_is_no_defect_and_its_logs_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import ray

    def late(**_: object) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", late)
    monkeypatch.setattr(os, "environ", {**os.environ, "RAY_TMPDIR": str(tmp_path)})
    with pytest.raises(InternalError, match=f"timed out during startup.*{tmp_path}/ray/session_latest/logs"):
        home.start_local_ray()


def nodes_of_ray(monkeypatch: pytest.MonkeyPatch, own: str, *others: str) -> None:
    """Ray, with the nodes that it knows by these addresses; this process is on the first."""
    import ray

    nodes = [{"NodeManagerAddress": address, "Alive": True} for address in (own, *others)]
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: own)
    monkeypatch.setattr(ray, "nodes", lambda: nodes)


@pytest.mark.parametrize("own", ["127.0.1.1", "127.0.0.1", "::1"])
def test_a_node_that_the_others_cannot_reach_is_refused(monkeypatch: pytest.MonkeyPatch, own: str) -> None:
    nodes_of_ray(monkeypatch, own, "10.0.0.2")
    with pytest.raises(ConfigError, match="--node-ip-address=ADDRESS"):
        home.check_reachable()


@pytest.mark.parametrize("others", [(), ("127.0.0.1",)])
def test_nodes_of_one_host_may_have_its_loopback_address(
    monkeypatch: pytest.MonkeyPatch, others: tuple[str, ...]
) -> None:
    nodes_of_ray(monkeypatch, "127.0.1.1", *others)
    home.check_reachable()


@pytest.mark.parametrize(("own", "is_refused"), [("127.0.1.1", True), ("10.0.0.3", False)])
def test_a_worker_of_a_node_that_the_head_cannot_reach_does_not_start(
    monkeypatch: pytest.MonkeyPatch, own: str, is_refused: bool
) -> None:
    from tandem.cluster.ray.actor import worker_host

    nodes_of_ray(monkeypatch, own)
    spec = ClusterSpec(Config(), "m", "", {}, {}, False, 1, "", "10.0.0.1:6379", "")
    if not is_refused:
        assert worker_host(spec) == own
        return
    with pytest.raises(ConfigError, match=f"this host is in Ray as {own}"):
        worker_host(spec)
