"""`transport.interface` names a network; each host finds its own interface in it."""

from __future__ import annotations

import os
import socket
from collections import namedtuple
from pathlib import Path

import psutil
import pytest

from kvtransfer.interface import Interface, find_interface
from tandem.core.errors import ConfigError

Address = namedtuple("Address", "family address")
Stats = namedtuple("Stats", "isup")


@pytest.fixture(autouse=True)
def two_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with a management network, two for pages, and one that is down."""
    v4, v6 = socket.AF_INET, socket.AF_INET6
    addresses = {
        "lo": [Address(v4, "127.0.0.1"), Address(v6, "::1")],
        "eth0": [Address(v4, "192.168.7.4")],
        "eth1": [Address(v6, "fe80::1%eth1"), Address(v6, "fd00:1::4"), Address(v4, "10.1.0.4")],
        "ib0": [Address(v4, "10.2.0.4")],
        "bare": [Address(v6, "fe80::2%bare")],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {name: Stats(name != "ib0") for name in addresses})


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("eth1", Interface("eth1", "10.1.0.4")),
        ("10.1.0.0/16", Interface("eth1", "10.1.0.4")),
        ("10.1.0.9/16", Interface("eth1", "10.1.0.4")),
        ("fd00:1::/64", Interface("eth1", "fd00:1::4")),
        ("192.168.0.0/16", Interface("eth0", "192.168.7.4")),
    ],
)
def test_a_name_or_a_network_gives_the_interface_and_its_address(wanted: str, found: Interface) -> None:
    assert find_interface(wanted) == found


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ("eth7", "has no interface 'eth7' with an address; it has lo 127.0.0.1"),
        ("bare", "has no interface 'bare' with an address"),
        ("10.9.0.0/16", "has no address in 10.9.0.0/16; it has .*eth1 10.1.0.4"),
        ("10.1/16/3", "'10.1/16/3' is no network; write it as"),
        ("ib0", "ib0 of .* is down; bring it up"),
    ],
)
def test_what_a_host_does_not_have_is_refused_by_name(wanted: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        find_interface(wanted)
    assert raised.value.key == "transport.interface"


def test_an_interface_without_rdma_is_its_own_only_device() -> None:
    assert Interface("eth1", "10.1.0.4").devices() == ["eth1"]
    assert str(Interface("eth1", "10.1.0.4")) == "eth1 10.1.0.4"
    assert os.environ.get("UCX_NET_DEVICES") is None, "the test's own environment chooses no network"


def test_rdma_is_found_also_behind_a_bond_and_a_vlan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Linux tells of a card with a port of its own, and of one whose two ports are bonded and have a VLAN."""
    monkeypatch.setattr("kvtransfer.interface._SYS", tmp_path)
    (tmp_path / "net/ib1/device/infiniband/mlx5_0").mkdir(parents=True)
    (tmp_path / "net/ib1/dev_port").write_text("1\n")
    tables = {"mlx5_0/ports/2": ["ib1"], "mlx5_bond_0/ports/1": ["bond0", "bond0", "bond0.100"]}
    for port, names in tables.items():
        table = tmp_path / "infiniband" / port / "gid_attrs/ndevs"
        table.mkdir(parents=True)
        for number, name in enumerate(names):
            (table / str(number)).write_text(f"{name}\n")
        (table / "9").mkdir()  # cannot be read, as a place without an address
    for name, device in (("ib1", "mlx5_0:2"), ("bond0", "mlx5_bond_0:1"), ("bond0.100", "mlx5_bond_0:1")):
        assert Interface(name, "10.2.0.4").devices() == [name, device]
    assert Interface("bond0.200", "10.2.0.4").devices() == ["bond0.200"]
