"""Which machine is for what, as `tandem hosts` is told: addresses or names, and how many workers each has room for."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tandem.core.addresses import bare_host
from tandem.core.errors import ConfigError
from tandem.core.identity import Role

DEFAULT_KEY = "~/.ssh/id_ed25519"
DEFAULT_NAME = "tandem"

_BY_HAND = "start Ray on such hosts by hand: docs/deploy.md"


@dataclass
class Host:
    """One machine. `name`: as it was given, where that was no address."""

    address: str
    name: str = ""
    places: dict[Role, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Hosts:
    """All machines of a cluster, and how they are reached. The head may have places too."""

    head: Host
    workers: tuple[Host, ...]
    user: str
    key: str
    cluster_name: str

    @property
    def places(self) -> dict[Role, int]:
        """Of all hosts together."""
        all_places = [host.places for host in (self.head, *self.workers)]
        return {role: sum(places.get(role, 0) for places in all_places) for role in Role}


def plan_hosts(
    head: str, lists: Mapping[Role, Sequence[str]], *, user: str, key: str, cluster_name: str
) -> Hosts:
    """Hosts from what was typed.

    Args:
        lists: of each role, hosts as `HOST` or `HOST=NUMBER`. Without routers the head has the one.

    Raises:
        ConfigError: a host cannot be resolved, stands twice in a list, or is given by an address that leads others
            to themselves.
    """
    by_address: dict[str, Host] = {}

    def host_of(text: str) -> Host:
        found = _resolve(text)
        return by_address.setdefault(found.address, found)

    at_head = host_of(head)
    for role, items in ((Role.ROUTER, lists.get(Role.ROUTER) or [head]), *_worker_lists(lists)):
        for item in items:
            name, num = _split(item)
            host = host_of(name)
            if role in host.places:
                raise ConfigError(
                    f"{name} stands twice among the hosts for {role}; say {name}=2 for two workers there",
                    key=f"--{role}",
                )
            host.places[role] = num
    if len(by_address) > 1:
        _check_reachable(by_address)
    workers = tuple(host for host in by_address.values() if host is not at_head)
    return Hosts(at_head, workers, user, key, cluster_name)


def _worker_lists(lists: Mapping[Role, Sequence[str]]) -> list[tuple[Role, Sequence[str]]]:
    return [(role, lists.get(role, ())) for role in (Role.PREFILL, Role.DECODE)]


def _split(item: str) -> tuple[str, int]:
    """Host and number of `HOST=NUMBER`; 1 without a number."""
    name, equals, number = item.partition("=")
    if equals and not (number.isdigit() and int(number) > 0):
        raise ConfigError(f"{item!r} is no HOST=NUMBER; say gpu1=8 for eight workers on the host gpu1")
    return name, int(number or 1)


def _resolve(text: str) -> Host:
    """A name becomes the address that it has here: on its own host it may mean 127.0.1.1, as Debian sets it up."""
    text = bare_host(text)
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return Host(_address_of(text), text)
    if address.version == 6:
        raise ConfigError(f"{text}: Ray's launcher knows hosts by IPv4 addresses only; {_BY_HAND}")
    return Host(str(address))


def _check_reachable(addresses: Iterable[str]) -> None:
    """Of several hosts none has an address that means each host itself."""
    for address in addresses:
        parsed = ipaddress.ip_address(address)
        if parsed.is_loopback or parsed.is_unspecified:
            raise ConfigError(
                f"the address {address} leads nowhere from other hosts; give that host's address in the network"
            )


def _address_of(name: str) -> str:
    try:
        found = [entry[4][0] for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"the host {name} has no address here ({error}); give its address instead") from error
    for address in map(str, found):
        if ":" not in address and not ipaddress.ip_address(address).is_loopback:
            return address
    if any(":" not in str(address) for address in found):
        raise ConfigError(
            f"the host {name} has the address {found[0]} here, which leads nowhere from other hosts; give its address "
            "in the network"
        )
    raise ConfigError(f"the host {name} has IPv6 addresses only, which Ray's launcher does not know; {_BY_HAND}")
