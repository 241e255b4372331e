"""Who counts as one client: a tenant; without keys an IPv4 address, or a network of IPv6."""

from __future__ import annotations

import pytest

from router.http.clients import Shared, client_of, holder_of
from router.request.tenant import ANYBODY, Tenant

HOLDERS = [
    ("192.0.2.7", "192.0.2.7"),
    ("2001:db8:1:2::7", "2001:db8:1:2::/64"),
    ("2001:db8:1:2:ffff:ffff:ffff:ffff", "2001:db8:1:2::/64"),
    ("2001:db8:1:3::7", "2001:db8:1:3::/64"),
    ("::ffff:192.0.2.7", "192.0.2.7"),
    ("fe80::1%eth0", "fe80::/64"),
    ("::1", "::1"),
    ("64:ff9b::192.0.2.7", "64:ff9b::c000:207"),
    ("", ""),
    ("/run/router.sock", "/run/router.sock"),
]


@pytest.mark.parametrize(("host", "holder"), HOLDERS)
def test_who_has_an_address(host: str, holder: str) -> None:
    assert holder_of(host) == holder


def test_a_tenant_is_one_client_wherever_it_asks_from() -> None:
    tenant = Tenant("acme", owner="acme's", circle="")
    hosts = ["2001:db8:1:2::7", "192.0.2.7"]
    assert {client_of({"client": (host, 1)}, tenant) for host in hosts} == {tenant.owner}
    assert {client_of({"client": (host, 1)}, ANYBODY) for host in hosts} == {"2001:db8:1:2::/64", "192.0.2.7"}
    assert client_of({}, ANYBODY) == ""


def test_one_client_holds_half_of_what_all_share() -> None:
    shared = Shared(8)
    assert [shared.take("a", 2) for _ in range(3)] == [True, True, False]
    assert [shared.take("b", 3), shared.take("c", 2), shared.take("c", 1)] == [True, False, True]
    assert [shared.take(client, 1) for client in "abcd"] == [False] * 4
    assert shared.take("d", 0)
    shared.give_back("a", 1)
    assert [shared.take("b", 1), shared.take("a", 1)] == [True, False]
