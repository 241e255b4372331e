"""Handoffs between two hosts whose network is slow: real drivers, NIXL and TCP, without a model."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts.environment import ROOT
from tests.hosts.host import Host
from tests.hosts.hosts import Hosts
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(900)]

CODE = ("benchmarks", "kvtransfer", "prefill_worker", "decode_worker", "tandem")
LINK = "TANDEM_LINK_SECRET=tests OMP_NUM_THREADS=1 python -u -m benchmarks link"
BYTES_PER_S = 1e6


def push_code(host: Host) -> None:
    """What measures, into the home of the user."""
    packed = subprocess.run(
        ["tar", "-C", str(ROOT), "--exclude=__pycache__", "--exclude=*.safetensors", "-cf", "-", *CODE],
        capture_output=True, check=True,
    )  # fmt: skip
    subprocess.run(host.line("tar -xf -"), input=packed.stdout, check=True)


def test_a_handoff_that_takes_longer_than_a_write_may_wait_ends_well(
    start_hosts: Callable[..., Hosts], tmp_path: Path
) -> None:
    """12.6 MB over 8 Mbit/s: posted at once, its last write would be over its ten seconds."""
    hosts = start_hosts()
    sender, receiver = hosts.add(1), hosts.add(2)
    for host in (sender, receiver):
        push_code(host)
    log = tmp_path / "receiver.log"
    listening = receiver.start(f"{LINK} --listen {receiver.address}", log)
    wait_until(log.read_text, "a listener", 120)
    sender.shape("8mbit")
    sender.run(
        f"{LINK} --to {receiver.address} --layouts 82m --tokens 512 --runs 1 --json ~/out.json", timeout_s=600
    )
    sender.shape("off")
    listening.terminate()
    sender.fetch("out.json", tmp_path)
    (link,) = json.loads((tmp_path / "out.json").read_text())["links"]
    (measured,) = link["measured"]
    needed_s = measured["num_bytes"] / BYTES_PER_S
    assert needed_s > 12
    assert 0.8 * needed_s < measured["handoff_s"][0] < 2 * needed_s
