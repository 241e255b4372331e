"""The settings that a Ray of our own gets by its environment."""

from __future__ import annotations

from tandem.cluster.ray.home import RECONNECT_S, local_environment


def test_ray_measures_nothing_of_itself_unless_the_user_wants_it() -> None:
    assert local_environment({})["RAY_enable_metrics_collection"] == "0"
    assert local_environment({"RAY_enable_metrics_collection": "1"})["RAY_enable_metrics_collection"] == "1"


def test_what_the_cluster_relies_on_holds_whatever_the_user_has_set() -> None:
    environment = local_environment({"RAY_gcs_rpc_server_reconnect_timeout_s": "1", "PATH": "/bin"})
    assert environment["RAY_gcs_rpc_server_reconnect_timeout_s"] == str(RECONNECT_S)
    assert environment["PATH"] == "/bin"
