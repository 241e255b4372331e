"""A head, a prefill host and a decode host, brought up by `tandem up`: they serve; a short partition harms nobody."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.hosts.cluster import HostCluster
from tests.hosts.hosts import Hosts
from tests.hosts.oracle import assert_right_or_typed_error, expected
from tests.scenarios.faults.site import story
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def cluster(start_hosts: Callable[..., Hosts], tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostCluster]:
    cluster = HostCluster(start_hosts(), 1, 1)
    try:
        cluster.start_hosts()
        cluster.up()
        yield cluster
    finally:
        cluster.save_logs(tmp_path_factory.getbasetemp() / "logs-of-hosts")


def test_a_stream_over_hosts_gives_the_tokens_of_the_model_itself(cluster: HostCluster) -> None:
    prompt = story("over hosts")
    answer = cluster.ask(prompt, max_tokens=64, ignore_eos=True)
    assert assert_right_or_typed_error(answer, expected(prompt, 64)) == "the same tokens"
    wait_until(cluster.transferred_bytes, "a report of what went from host to host", 30, every_s=0.2)
    cluster.wait_idle()


def test_a_short_partition_of_the_decode_host_costs_no_token(cluster: HostCluster) -> None:
    prompt, num_tokens = story("parted"), 1200
    asking = cluster.asking(prompt, max_tokens=num_tokens, ignore_eos=True)
    asking.wait_for_token()
    cluster.hosts.cut(*cluster.decode)
    time.sleep(4)  # less than a lease
    cluster.hosts.heal()
    assert_right_or_typed_error(asking.answer(), expected(prompt, num_tokens))
    cluster.wait_ready()
    cluster.wait_idle()


def test_a_stranger_without_the_key_is_refused(cluster: HostCluster) -> None:
    assert cluster.ask("Once", max_tokens=1, key="").status == 401


def test_the_key_is_in_no_log(cluster: HostCluster, tmp_path: Path) -> None:
    cluster.save_logs(tmp_path)
    found = [path for path in tmp_path.rglob("*") if path.is_file() and cluster.key.encode() in path.read_bytes()]
    assert not found
