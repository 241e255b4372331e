"""`transport.interface` says which network of a host carries pages; requests stay where they were."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
import yaml

from kvtransfer.interface import find_interface
from tests.scenarios.client import complete
from tests.scenarios.processes import ROOT, ProcessCluster, running
from tests.support import fork_server

MODEL = {"model": {"served_names": ["*"]}, "scheduling": {"mixed_pool": False}}


def other_interface() -> str:
    """One beside the loopback, which all else uses; skips where there is none."""
    stats = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        if name != "lo" and stats[name].isup and any(a.family.name == "AF_INET" for a in addresses):
            return name
    pytest.skip("this host has no network beside the loopback")


def addresses_of_pages(cluster: ProcessCluster) -> set[str]:
    """Where TCP connections between the two workers lie, but for their gRPC services'."""
    prefill, decode = (psutil.Process(cluster.workers[name].pid) for name in ("prefill-0", "decode-0"))
    services = {int(cluster.workers[name].facts["address"].rpartition(":")[2]) for name in cluster.workers}
    theirs = {c.raddr for c in decode.net_connections("tcp") if c.raddr}
    mine = [c for c in prefill.net_connections("tcp") if c.raddr and c.laddr in theirs]
    return {c.laddr.ip for c in mine if c.laddr.port not in services and c.raddr.port not in services}


@pytest.mark.parametrize("which", [pytest.param("loopback", marks=pytest.mark.faults), "other"])
def test_pages_take_the_network_that_is_said(which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    wanted = "127.0.0.0/8" if which == "loopback" else other_interface()
    interface = find_interface(wanted)
    with running(tmp_path, config={**MODEL, "transport": {"interface": wanted}}) as cluster:
        complete(cluster.url, list(range(5, 105)), max_tokens=4)
        assert addresses_of_pages(cluster) == {interface.address}
        told = [*cluster.status()["prefill"], *cluster.status()["decode"]]
        assert [worker["page_network"] for worker in told] == [str(interface)] * 2


def test_a_worker_without_that_interface_does_not_start_and_says_what_there_is(tmp_path: Path) -> None:
    config = tmp_path / "tandem.yaml"
    config.write_text(yaml.safe_dump({"transport": {"interface": "eth77"}}))
    line = ["--worker-id", "prefill-0", "--config", str(config), "--kv-bytes", str(1 << 20)]
    line += ["--model-dir", str(ROOT / "tandem" / "models" / "tiny")]
    log = tmp_path / "log"
    assert fork_server.start("prefill_worker", line, log, ROOT, os.environ).wait(100) != 0
    assert "has no interface 'eth77' with an address; it has lo 127.0.0.1" in log.read_text()
