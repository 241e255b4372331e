"""Makes every gRPC channel and server of the cluster. `tandem.rpc.security` decides which of them use TLS."""

from __future__ import annotations

import grpc
from grpc import aio

from tandem.core.addresses import bare_host, join_address
from tandem.rpc.guard import RoleGuard
from tandem.rpc.permissions import SERVER_NAME
from tandem.rpc.security import Security, current

# Prompts of a million tokens fit; nothing larger is ever sent.
_MAX_MESSAGE_BYTES = 64 << 20

_COMMON: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    # A peer whose host has vanished answers no ping: the stream breaks instead of hanging for minutes.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]

# A worker that has been started again must be reached at once, not after gRPC's default of up to two minutes.
_CHANNEL: list[tuple[str, int]] = [
    *_COMMON,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Despite its name: how long a connection may take, up to the server's first HTTP/2 frame. When it is over, calls
    # fail. A busy host needs more than a moment; gRPC's default of 20 s keeps calls waiting for one that hangs.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]

_SECURE_CHANNEL: list[tuple[str, int | str]] = [
    *_CHANNEL,
    ("grpc.ssl_target_name_override", SERVER_NAME),  # the one name of all certificates, whatever address is dialled
]

_SERVER: list[tuple[str, int]] = [
    *_COMMON,
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    ("grpc.so_reuseport", 0),
]


# What a peer may send beyond what is read. With gRPC's default of 64 KiB and more a stream of small messages runs
# hundreds of them ahead of a reader that is behind, and what is urgent comes last. It costs each message that is longer
# one more way there and back: the steps of some eighty sequences, and what is told of caches.
_NEAR: list[tuple[str, int]] = [("grpc.http2.lookahead_bytes", 4096), ("grpc.http2.bdp_probe", 0)]


def make_channel(address: str, security: Security | None = None, *, is_near: bool = False) -> aio.Channel:
    """A channel to `host:port`; must be called in a running event loop.

    Args:
        security: of the caller; default: this process's.
        is_near: the other side does not send far ahead of what is read here: what comes is newest, and it may join what
            waits there.

    Raises:
        ConfigError: the address is beyond loopback, and there are no certificates.
    """
    credentials = (security or current()).channel_credentials(host_of(address))
    if credentials is None:
        return aio.insecure_channel(address, options=[*_CHANNEL, *(_NEAR if is_near else ())])
    return aio.secure_channel(address, credentials, options=[*_SECURE_CHANNEL, *(_NEAR if is_near else ())])


def make_blocking_channel(address: str, security: Security | None = None) -> grpc.Channel:
    """As `make_channel`, for callers without an event loop."""
    credentials = (security or current()).channel_credentials(host_of(address))
    if credentials is None:
        return grpc.insecure_channel(address, options=_CHANNEL)
    return grpc.secure_channel(address, credentials, options=_SECURE_CHANNEL)


def make_server(guard: RoleGuard | None = None) -> aio.Server:
    """A server without services or ports; must be called in the event loop that will run it.

    `guard` is for callers that read what it has refused.
    """
    return aio.server(options=_SERVER, interceptors=[guard or RoleGuard()])


def bind(server: aio.Server, host: str, port: int, security: Security | None = None) -> int:
    """Listen on `host:port`; port 0 takes a free one. Returns the port.

    Raises:
        OSError: the port is taken.
        ConfigError: `host` is beyond loopback, and there are no certificates.
    """
    credentials = (security or current()).server_credentials(host)
    where = join_address(host, port)
    try:
        return server.add_insecure_port(where) if credentials is None else server.add_secure_port(where, credentials)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {where}: is its port taken?") from error


def host_of(address: str) -> str:
    """`10.0.0.5` of `10.0.0.5:7001`, `fd00::5` of `[fd00::5]:7001`."""
    return bare_host(address.rpartition(":")[0])
