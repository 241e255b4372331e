"""Who may join a Ray with token authentication, started as the documentation says, and which Ray is not joined.

That a cluster of several nodes serves with a token is shown in test_nodes.py.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from serving import RAY, Rays

from tandem.core.ports import free_port
from tandem.rpc.security import is_loopback

pytestmark = pytest.mark.timeout(240)

@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's home, with Ray's token in it."""
    home = tmp_path_factory.mktemp("home")
    made = subprocess.run(
        [RAY, "get-auth-token", "--generate"], env={**os.environ, "HOME": str(home)}, capture_output=True, timeout=60
    )
    assert made.returncode == 0, made.stderr
    assert (home / ".ray" / "auth_token").read_bytes() == made.stdout
    return home


@pytest.fixture(scope="module")
def guarded(home: Path) -> Iterator[tuple[Rays, str]]:
    """A node that wants the token, and its address."""
    rays, address = Rays(home), f"127.0.0.1:{free_port()}"
    try:
        head = ("--head", "--include-dashboard=false", f"--port={address.partition(':')[2]}")
        rays.start(*head, "--node-ip-address=127.0.0.1", mode="token")
        yield rays, address
    finally:
        rays.end()


def test_a_client_without_the_token_is_refused(guarded: tuple[Rays, str], tmp_path: Path) -> None:
    rays, address = guarded
    run = rays.tandem("status", "--address", address, HOME=str(tmp_path))
    assert run.returncode == 1
    assert f"Ray at {address} wants a token; set RAY_AUTH_MODE=token" in run.stderr
    assert run.stderr.count("\n") == 1


@pytest.mark.faults
def test_a_client_with_another_token_is_refused(guarded: tuple[Rays, str], tmp_path: Path) -> None:
    rays, address = guarded
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("0" * 64)
    run = rays.tandem("status", "--address", address, HOME=str(tmp_path))
    assert run.returncode == 1
    assert "wants a token" in run.stderr


def test_a_client_with_the_token_in_its_home_asks_without_being_told_to(guarded: tuple[Rays, str]) -> None:
    """It joins nothing, so it need not be a node; that there is no cluster in this Ray is what it was told."""
    rays, address = guarded
    run = rays.tandem("status", "--address", address)
    assert run.returncode == 3
    assert f"no Tandem cluster runs in the Ray cluster at {address}" in run.stderr


def test_a_ray_that_lets_anyone_in_beyond_this_host_is_not_joined(home: Path, tmp_path: Path) -> None:
    addresses = [a.address for each in psutil.net_if_addrs().values() for a in each if a.family is socket.AF_INET]
    own = next((address for address in addresses if not is_loopback(address)), None)
    if own is None:
        pytest.skip("this host has no address but loopback")
    rays, address = Rays(home), f"{own}:{free_port()}"
    try:
        head = ("--head", "--include-dashboard=false", f"--port={address.partition(':')[2]}")
        rays.start(*head, f"--node-ip-address={own}", mode="disabled")
        run = rays.tandem("serve", "--address", address, "--port", str(free_port()))
        assert run.returncode == 1
        assert f"Ray at {address} lets in whoever reaches its ports" in run.stderr
        assert "RAY_AUTH_MODE=token" in run.stderr
    finally:
        rays.end()
