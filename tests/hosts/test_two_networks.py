"""Hosts with two networks: pages go by the one that is named, everything else by the one that addresses belong to."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.hosts.cluster import HostCluster
from tests.hosts.host import NET_TWO, Host
from tests.hosts.hosts import Hosts
from tests.hosts.oracle import assert_right_or_typed_error, expected
from tests.scenarios.faults.site import story
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def cluster(start_hosts: Callable[..., Hosts], tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostCluster]:
    cluster = HostCluster(start_hosts(second=True), 1, 1, transport={"interface": f"{NET_TWO}.0/24"})
    try:
        cluster.start_hosts()
        cluster.up()
        yield cluster
    finally:
        cluster.save_logs(tmp_path_factory.getbasetemp() / "logs-of-two-networks")


def received(host: Host, interface: str) -> int:
    """Bytes, since the host is up."""
    return int(host.run(f"cat /sys/class/net/{interface}/statistics/rx_bytes").stdout)


def test_pages_go_by_the_network_that_is_named(cluster: HostCluster) -> None:
    (decode,) = cluster.decode
    before = received(decode, "eth1")
    prompt = story("two networks")
    answer = cluster.ask(prompt, max_tokens=16, ignore_eos=True)
    assert assert_right_or_typed_error(answer, expected(prompt, 16)) == "the same tokens"
    sent = wait_until(cluster.transferred_bytes, "a report of what went from host to host", 30, every_s=0.2)
    assert received(decode, "eth1") - before >= sent
