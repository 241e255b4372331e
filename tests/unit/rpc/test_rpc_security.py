"""When gRPC is TLS, who gets through, and what is never done without being asked for; real servers on loopback."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tandem.cluster.certs import default_authority_key
from tandem.core.config import SecurityConfig
from tandem.core.errors import ConfigError
from tandem.rpc import security
from tandem.rpc.channel import bind, make_blocking_channel, make_channel, make_server
from tandem.rpc.identity import AUTHORITY_FILE, certificate_file, key_file
from tandem.rpc.permissions import SERVER_NAME, PeerRole
from tandem.rpc.security import Security, is_loopback
from tandem.rpc.v1 import control_pb2, control_pb2_grpc
from tandem.rpc.v1.common_pb2 import WorkerStatus
from tests.support import grpc_server

LOOPBACK, BEYOND = "127.0.0.1", "0.0.0.0"
PLAIN = Security(SecurityConfig(tls="off"), None, LOOPBACK)


def member(directory: Path, role: PeerRole) -> Security:
    return Security(SecurityConfig(tls="on", certificates=str(directory)), role, LOOPBACK)


class _Control(control_pb2_grpc.WorkerControlServicer):
    async def Status(self, request: Any, context: Any) -> WorkerStatus:
        return WorkerStatus(num_running=7)


def serving(own: Security, host: str = LOOPBACK) -> AbstractAsyncContextManager[int]:
    """A worker's control service; its port."""
    return grpc_server.serving(control_pb2_grpc.add_WorkerControlServicer_to_server, _Control(), own, host=host)


async def ask(port: int, own: Security) -> int:
    async with make_channel(f"{LOOPBACK}:{port}", own) as channel:
        stub = control_pb2_grpc.WorkerControlStub(channel)
        return int((await stub.Status(control_pb2.StatusRequest(), timeout=10)).num_running)


async def refused(port: int, own: Security) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(port, own)
    return caught.value.code()


@pytest.fixture(autouse=True)
def _unconfigured() -> Iterator[None]:
    before = security.current()
    yield
    security._process = before


# -- who gets through


async def test_members_of_one_cluster_understand_each_other(certificates: Path) -> None:
    async with serving(member(certificates, PeerRole.DECODE)) as port:
        assert await ask(port, member(certificates, PeerRole.SUPERVISOR)) == 7


async def test_a_blocking_client_gets_through_too(certificates: Path) -> None:
    def ask_blocking(port: int) -> int:
        with make_blocking_channel(f"{LOOPBACK}:{port}", member(certificates, PeerRole.CLIENT)) as channel:
            stub = control_pb2_grpc.WorkerControlStub(channel)
            return int(stub.Status(control_pb2.StatusRequest(), timeout=10).num_running)

    async with serving(member(certificates, PeerRole.DECODE)) as port:
        assert await asyncio.to_thread(ask_blocking, port) == 7


async def test_a_plain_connection_to_a_tls_port_is_refused(certificates: Path) -> None:
    async with serving(member(certificates, PeerRole.DECODE)) as port:
        assert await refused(port, PLAIN) is grpc.StatusCode.UNAVAILABLE


async def test_a_member_does_not_speak_to_a_plain_port(certificates: Path) -> None:
    async with serving(PLAIN) as port:
        assert await refused(port, member(certificates, PeerRole.SUPERVISOR)) is grpc.StatusCode.UNAVAILABLE


async def test_another_clusters_members_are_strangers(certificates: Path, foreign_certificates: Path) -> None:
    ours, theirs = (member(d, PeerRole.SUPERVISOR) for d in (certificates, foreign_certificates))
    async with serving(member(certificates, PeerRole.DECODE)) as port:
        assert await refused(port, theirs) is grpc.StatusCode.UNAVAILABLE
    async with serving(member(foreign_certificates, PeerRole.DECODE)) as port:
        assert await refused(port, ours) is grpc.StatusCode.UNAVAILABLE


async def test_no_certificate_is_no_membership(certificates: Path) -> None:
    credentials = grpc.ssl_channel_credentials((certificates / AUTHORITY_FILE).read_bytes())
    options = [("grpc.ssl_target_name_override", SERVER_NAME)]
    async with (
        serving(member(certificates, PeerRole.DECODE)) as port,
        grpc.aio.secure_channel(f"{LOOPBACK}:{port}", credentials, options=options) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await control_pb2_grpc.WorkerControlStub(channel).Status(control_pb2.StatusRequest(), timeout=10)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_clients_certificate_makes_no_server(certificates: Path) -> None:
    async with serving(member(certificates, PeerRole.CLIENT)) as port:
        assert await refused(port, member(certificates, PeerRole.SUPERVISOR)) is grpc.StatusCode.UNAVAILABLE


async def test_a_certificate_that_the_authority_signed_without_a_role_may_nothing(certificates: Path) -> None:
    authority = x509.load_pem_x509_certificate((certificates / AUTHORITY_FILE).read_bytes())
    authority_key = serialization.load_pem_private_key(default_authority_key(certificates).read_bytes(), None)
    assert isinstance(authority_key, ec.EllipticCurvePrivateKey)
    template = x509.load_pem_x509_certificate(certificate_file(certificates, PeerRole.SUPERVISOR).read_bytes())
    # The role stands where it does not count: in a DNS name.
    names = [x509.DNSName(SERVER_NAME), x509.DNSName("tandem://role/supervisor")]
    own = (
        x509.CertificateBuilder(
            authority.subject,
            template.subject,
            template.public_key(),
            x509.random_serial_number(),
            template.not_valid_before_utc,
            template.not_valid_after_utc,
        )
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(authority_key, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
    )
    key = key_file(certificates, PeerRole.SUPERVISOR).read_bytes()
    credentials = grpc.ssl_channel_credentials((certificates / AUTHORITY_FILE).read_bytes(), key, own)
    options = [("grpc.ssl_target_name_override", SERVER_NAME)]
    async with (
        serving(member(certificates, PeerRole.DECODE)) as port,
        grpc.aio.secure_channel(f"{LOOPBACK}:{port}", credentials, options=options) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await control_pb2_grpc.WorkerControlStub(channel).Status(control_pb2.StatusRequest(), timeout=10)
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


# -- when it is TLS


@pytest.mark.parametrize(
    ("tls", "process_host", "server_host", "is_tls"),
    [
        ("auto", LOOPBACK, LOOPBACK, False),
        ("auto", BEYOND, BEYOND, True),
        ("auto", BEYOND, LOOPBACK, True),  # the router's control service on the head of a cluster of many hosts
        ("auto", LOOPBACK, BEYOND, True),
        ("on", LOOPBACK, LOOPBACK, True),
        ("on", BEYOND, BEYOND, True),
        ("off", LOOPBACK, LOOPBACK, False),
        ("off", BEYOND, BEYOND, False),
    ],
)
async def test_plain_only_where_it_stays_on_loopback_or_was_asked_for(
    certificates: Path, tls: str, process_host: str, server_host: str, is_tls: bool
) -> None:
    own = security.configure(SecurityConfig(tls, str(certificates)), PeerRole.DECODE, process_host)
    assert security.current() is own
    async with serving(own, server_host) as port:
        if is_tls:
            assert await refused(port, PLAIN) is grpc.StatusCode.UNAVAILABLE
            assert await ask(port, member(certificates, PeerRole.SUPERVISOR)) == 7
        else:
            assert await ask(port, PLAIN) == 7


async def test_nothing_leaves_loopback_before_anybody_has_decided() -> None:
    with pytest.raises(ConfigError, match=r"tandem certs.*security\.tls: off") as caught:
        bind(make_server(), BEYOND, 0)
    assert caught.value.key == "security.certificates"
    for address in ("192.0.2.1:7001", "decode-0.example:7001", "[2001:db8::1]:7001"):
        with pytest.raises(ConfigError, match="tandem certs"):
            make_channel(address)
    assert bind(make_server(), LOOPBACK, 0) > 0


def test_the_end_of_a_certificate_is_told_where_it_is_shown(certificates: Path) -> None:
    shown = Security(SecurityConfig("on", str(certificates)), PeerRole.DECODE, LOOPBACK)
    assert shown.certificate_expires == shown.identity.expires.timestamp()
    assert Security(SecurityConfig("auto", str(certificates)), PeerRole.DECODE, LOOPBACK).certificate_expires == 0


async def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server((LOOPBACK, 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on {LOOPBACK}:{port}"):
            bind(make_server(), LOOPBACK, port)


def test_beyond_loopback_without_certificates_does_not_start() -> None:
    with pytest.raises(ConfigError, match="tandem certs"):
        security.configure(SecurityConfig(), PeerRole.DECODE, "192.0.2.1")
    with pytest.raises(ConfigError, match="tandem certs"):
        security.configure(SecurityConfig(tls="on"), PeerRole.DECODE, LOOPBACK)


def test_off_beyond_loopback_is_told_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        security.configure(SecurityConfig(tls="off"), PeerRole.DECODE, LOOPBACK)
        assert not caplog.records
        security.configure(SecurityConfig(tls="off"), PeerRole.DECODE, BEYOND)
    assert "write into the KV pages" in caplog.text


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "[::1]", "localhost"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.1", "localhost.example.com", "127.0.0.1.nip.io"])
def test_beyond(host: str) -> None:
    assert not is_loopback(host)


def test_no_other_file_opens_a_way_in_or_out() -> None:
    """Every channel and server is made in one place; Ray's own control store is asked in Ray's own way."""
    root = Path(security.__file__).parents[2]
    packages = ("tandem", "router", "prefill_worker", "decode_worker", "kvtransfer")
    calls = (
        "insecure_channel(",
        "secure_channel(",
        "aio.server(",
        "grpc.server(",
        "add_insecure_port(",
        "add_secure_port(",
    )
    found = {
        str(file.relative_to(root))
        for package in packages
        for file in (root / package).rglob("*.py")
        if any(call in file.read_text() for call in calls)
    }
    assert found == {"tandem/rpc/channel.py", "tandem/cluster/ray/probe.py"}
