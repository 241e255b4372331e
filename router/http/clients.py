"""Who asks, where clients take turns or share what there is."""

from __future__ import annotations

from collections import Counter
from ipaddress import IPv6Address, IPv6Network, ip_address

from starlette.types import Scope

from router.request.tenant import ANYBODY, Tenant

#: Bits of an IPv6 address that a network has in common; what comes behind, a host may change as it likes. Not so where
#: the first three bits are zero (RFC 4291, 2.5.4), as of the host itself, or of IPv4 behind a translator.
_NETWORK_BITS = 64
_BITS_BEHIND_ZEROS = 125
#: Of what clients share, one of them holds at most one part in so many.
_PARTS = 2


def client_of(scope: Scope, tenant: Tenant) -> str:
    """A tenant, or where there are no keys what an address belongs to."""
    if tenant.owner != ANYBODY.owner:
        return tenant.owner
    host, _ = scope.get("client") or ("", 0)
    return holder_of(host)


def holder_of(host: str) -> str:
    """What one client has of addresses: of IPv4 the one, of IPv6 all of a /64 that a host may have. What is no address
    stays as it is."""
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if not isinstance(address, IPv6Address):
        return host
    if address.ipv4_mapped is not None:  # a socket for both has such
        return str(address.ipv4_mapped)
    if int(address) >> _BITS_BEHIND_ZEROS == 0:
        return str(address)
    return str(IPv6Network((int(address), _NETWORK_BITS), strict=False))


class Shared:
    """An amount that all clients share, and of which one alone holds no more than a half."""

    def __init__(self, amount: int) -> None:
        self._amount = amount
        # Invariant: 0 < each of _held <= _amount / _PARTS, and _sum, which is all of them, <= _amount
        self._held = Counter[str]()
        self._sum = 0

    @property
    def most_of_one(self) -> int:
        return self._amount // _PARTS

    def take(self, client: str, amount: int) -> bool:
        """Whether there is so much for this client; if so, it has it from now on."""
        if self._sum + amount > self._amount or self._held[client] + amount > self.most_of_one:
            return False
        self._add(client, amount)
        return True

    def give_back(self, client: str, amount: int) -> None:
        self._add(client, -amount)

    def _add(self, client: str, amount: int) -> None:
        self._sum += amount
        self._held[client] += amount
        if not self._held[client]:
            del self._held[client]
