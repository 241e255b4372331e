"""Which Ray is not joined. Who may join one that wants a token is shown in test_joined.py."""

from __future__ import annotations

import socket
from pathlib import Path

import psutil
import pytest
from serving import Rays

from tandem.core.ports import free_port
from tandem.rpc.security import is_loopback

pytestmark = [pytest.mark.timeout(240), pytest.mark.faults]


def test_a_ray_that_lets_anyone_in_beyond_this_host_is_not_joined(tmp_path: Path) -> None:
    addresses = [a.address for each in psutil.net_if_addrs().values() for a in each if a.family is socket.AF_INET]
    own = next((address for address in addresses if not is_loopback(address)), None)
    if own is None:
        pytest.skip("this host has no address but loopback")
    rays, address = Rays(tmp_path), f"{own}:{free_port()}"
    try:
        head = ("--head", "--include-dashboard=false", f"--port={address.partition(':')[2]}")
        rays.start(*head, f"--node-ip-address={own}", mode="disabled")
        run = rays.tandem("serve", "--address", address, "--port", str(free_port()))
        assert run.returncode == 1
        assert f"Ray at {address} lets in whoever reaches its ports" in run.stderr
        assert "RAY_AUTH_MODE=token" in run.stderr
    finally:
        rays.end()
