"""Who asks, where clients take turns."""

from __future__ import annotations

from ipaddress import IPv6Address, IPv6Network, ip_address

from starlette.types import Scope

from router.request.tenant import ANYBODY, Tenant

#: Bits of an IPv6 address that a network has in common; what comes behind, a host may change as it likes. Not so where
#: the first three bits are zero (RFC 4291, 2.5.4), as of the host itself, or of IPv4 behind a translator.
_NETWORK_BITS = 64
_BITS_BEHIND_ZEROS = 125


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
