"""Host and port as one text, for IPv4, IPv6 and names."""

from __future__ import annotations

import asyncio
import socket

import pytest

from router.http.server import listen
from tandem.core.addresses import bare_host, join_address, split_address, url_host
from tandem.core.config import SecurityConfig
from tandem.rpc.channel import bind, host_of, make_channel, make_server
from tandem.rpc.security import Security

PLAIN = Security(SecurityConfig(), None, "127.0.0.1")


@pytest.mark.parametrize(
    ("host", "address"),
    [("10.0.0.5", "10.0.0.5:7001"), ("node-1.lab", "node-1.lab:7001"), ("fd00::5", "[fd00::5]:7001")],
)
def test_what_is_joined_is_split_again(host: str, address: str) -> None:
    assert join_address(host, 7001) == address
    assert join_address(url_host(host), 7001) == address
    assert split_address(address) == (host, 7001)
    assert host_of(address) == host


WRONG = ["fd00::5:6379", "10.0.0.5", "10.0.0.5:", ":6379", "[10.0.0.5]:1", "ray://a:1", "a:b"]


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_address_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="is no host:port"):
        split_address(wrong)


def test_only_whole_brackets_are_taken_off() -> None:
    assert [bare_host(host) for host in ("[::1]", "::1", "node", "[::1")] == ["::1", "::1", "node", "[::1"]


async def test_grpc_is_served_and_reached_by_an_ipv6_address() -> None:
    server = make_server()
    port = bind(server, "::1", 0, PLAIN)
    await server.start()
    try:
        async with asyncio.timeout(10), make_channel(join_address("::1", port), PLAIN) as channel:
            await channel.channel_ready()
    finally:
        await server.stop(None)


@pytest.mark.parametrize("host", ["::1", "[::1]", "127.0.0.1", "localhost"])
def test_http_listens_by_any_kind_of_host(host: str) -> None:
    with listen(host, 0) as listener:
        family = socket.getaddrinfo(bare_host(host), 0)[0][0]
        assert listener.family is family
