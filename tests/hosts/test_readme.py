"""The README's way to a cluster on many machines, as it stands there, on five hosts. One cluster for all tests.


Each host takes its own name for 127.0.1.1, as on Debian, and none has a default route.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest

from tests.hosts.cluster import HostCluster
from tests.hosts.environment import ROOT
from tests.hosts.hosts import Hosts

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(3600)]

START_S = 1500.0
ROLES = {"node1": {"supervisor", "router", "client", "prefill", "decode"}} | {
    f"node{number}": {"prefill" if number < 4 else "decode"} for number in range(2, 6)
}


def commands(page: str, heading: str) -> list[str]:
    """Of the first block of shell under a heading."""
    section = (ROOT / page).read_text().partition(f"\n## {heading}\n")[2]
    found = re.search(r"```sh\n(.*?)```", section, re.DOTALL)
    assert found is not None, heading
    return found[1].replace("\\\n", " ").splitlines()


@pytest.fixture(scope="module")
def cluster(start_hosts: Callable[..., Hosts]) -> HostCluster:
    cluster = HostCluster(start_hosts(loopback_name=True), 2, 2)
    cluster.start_hosts()
    return cluster


def test_the_commands_of_the_readme_lead_to_an_answer(cluster: HostCluster) -> None:
    answer = ""
    for command in commands("README.md", "On many machines"):
        answer = cluster.desk.run(command, timeout_s=START_S).stdout
    assert json.loads(answer)["usage"]["completion_tokens"] in range(1, 33), answer


def test_every_host_that_was_named_has_its_worker(cluster: HostCluster) -> None:
    cluster.wait_ready()
    shown = cluster.shown()
    for role, hosts in (("prefill", cluster.prefill), ("decode", cluster.decode)):
        addresses = [worker["address"].rpartition(":")[0] for worker in shown[role]]
        assert sorted(addresses) == [host.address for host in hosts]


def test_another_host_with_the_clients_certificate_commands_the_cluster(cluster: HostCluster) -> None:
    there = "RAY_AUTH_MODE=token tandem {} --address node1:6379 --certificates ~/tandem-certs"
    assert "prefill 2/2 ready, decode 2/2 ready" in cluster.desk.run(there.format("status")).stdout
    cluster.desk.run(there.format("drain decode-0 --no-replace-first"), timeout_s=300)
    cluster.wait_ready()


def test_a_host_has_its_own_roles_certificates_and_nobody_the_authoritys_key(cluster: HostCluster) -> None:
    for host in (cluster.head, *cluster.prefill, *cluster.decode):
        assert host.run("find / -xdev -name 'ca.key' 2>/dev/null; find ~ -name ca.key", check=False).stdout == ""
        keys = host.run("cd ~/tandem-certs && ls *.key").stdout.split()
        assert {key.removesuffix(".key") for key in keys} == ROLES[host.name], host.name


def test_logs_of_all_workers_are_read_from_the_head(cluster: HostCluster) -> None:
    for worker in ("prefill-0", "prefill-1", "decode-1"):
        assert worker in cluster.head.run(f"RAY_AUTH_MODE=token tandem logs {worker}").stdout


def test_after_down_no_ray_runs_on_any_host(cluster: HostCluster) -> None:
    cluster.desk.run("tandem down hosts.yaml", timeout_s=START_S)
    for host in (cluster.head, *cluster.prefill, *cluster.decode):
        assert host.run("pgrep -a 'raylet|gcs_server|tandem'", check=False).stdout == "", host.name


def test_a_changed_wheel_of_the_same_version_reaches_every_host(cluster: HostCluster) -> None:
    cluster.desk.run("echo 'CHANGED = True' >> tandem/__init__.py", user="root")  # the checkout is not the user's
    cluster.desk.run("make wheel", timeout_s=300)
    cluster.desk.run("tandem up hosts.yaml --host 0.0.0.0", timeout_s=START_S)
    for host in (cluster.head, *cluster.prefill, *cluster.decode):
        assert host.run("cd / && python -c 'import tandem; print(tandem.CHANGED)'").stdout == "True\n", host.name
