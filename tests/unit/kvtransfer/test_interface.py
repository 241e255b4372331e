"""`transport.interface` names a network; each host finds its own interface in it."""

from __future__ import annotations

import os
import socket
from collections import namedtuple

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
