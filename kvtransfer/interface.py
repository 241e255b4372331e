"""Which network of a host carries pages: the value of `transport.interface`, found on the host that it is read on."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.core.errors import ConfigError

_KEY = "transport.interface"
_SYS = Path("/sys/class")


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface of this host, and its address there."""

    name: str
    address: str

    def __str__(self) -> str:
        return f"{self.name} {self.address}"

    def devices(self) -> list[str]:
        """Its names for UCX: the interface, and the RDMA devices behind it, each with the port.

        A bond or a VLAN has no device of its own: that it is carried by RDMA shows in the devices' tables of addresses.
        """
        here = _SYS / "net" / self.name
        own = {(path.name, _port(here)) for path in (here / "device" / "infiniband").glob("*")}
        return [self.name, *(f"{device}:{port}" for device, port in sorted(own | set(_carriers(self.name))))]


def find_interface(wanted: str) -> Interface:
    """The interface called `wanted`, or the first one with an address in the network `wanted` (as 10.1.0.0/16).

    Raises:
        ConfigError: this host has none, or it is down; names those that it has.
    """
    network = _network(wanted) if "/" in wanted else None
    psutil = _import_psutil()
    stats = psutil.net_if_stats()
    found = [i for i in _interfaces() if (_is_in(i.address, network) if network is not None else i.name == wanted)]
    for interface in found:
        if interface.name in stats and stats[interface.name].isup:
            return interface
    if found:
        raise ConfigError(f"{_KEY}: {found[0].name} of {socket.gethostname()} is down; bring it up", key=_KEY)
    what = f"address in {wanted}" if network is not None else f"interface {wanted!r} with an address"
    had = ", ".join(map(str, _interfaces()))
    raise ConfigError(f"{_KEY}: {socket.gethostname()} has no {what}; it has {had}", key=_KEY)


def _network(wanted: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    try:
        return ipaddress.ip_network(wanted, strict=False)
    except ValueError as error:
        raise ConfigError(f"{_KEY}: {wanted!r} is no network; write it as 10.1.0.0/16", key=_KEY) from error


def _is_in(address: str, network: ipaddress.IPv4Network | ipaddress.IPv6Network) -> bool:
    return ipaddress.ip_address(address) in network


def _interfaces() -> Iterator[Interface]:
    """Each with its addresses, IPv4 first. Addresses of one link (fe80::) mean nothing to other hosts."""
    for name, addresses in _import_psutil().net_if_addrs().items():
        for family in (socket.AF_INET, socket.AF_INET6):
            for address in addresses:
                if address.family == family and not address.address.startswith("fe80"):
                    yield Interface(name, address.address.partition("%")[0])


def _import_psutil() -> Any:
    """Needed only where an interface is named. Raises `ConfigError`."""
    try:
        import psutil
    except ModuleNotFoundError as error:
        text = f"{_KEY}: the interfaces of this host are read by psutil, which is not installed: `pip install psutil`"
        raise ConfigError(text, key=_KEY) from error
    return psutil


def _port(interface: Path) -> int:
    """The port of an RDMA device that this interface belongs to, counted from 1."""
    try:
        return int((interface / "dev_port").read_text()) + 1
    except (OSError, ValueError):
        return 1


def _carriers(interface: str) -> Iterator[tuple[str, int]]:
    """RDMA devices and their ports that have an address (GID) by this interface.

    Source: Documentation/ABI/stable/sysfs-class-infiniband of Linux, `gid_attrs/ndevs`.
    """
    for port in (_SYS / "infiniband").glob("*/ports/[0-9]*"):
        for entry in (port / "gid_attrs" / "ndevs").glob("*"):
            try:
                is_it = entry.read_text().strip() == interface
            except OSError:  # how the kernel says that the place is empty
                continue
            if is_it:
                yield port.parent.parent.name, int(port.name)
                break
