"""How every gRPC channel and server of the cluster is made."""

from __future__ import annotations

from grpc import aio

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
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]

_SERVER: list[tuple[str, int]] = [
    *_COMMON,
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    ("grpc.so_reuseport", 0),
]


def make_channel(address: str) -> aio.Channel:
    """A channel to `host:port`; must be called in a running event loop."""
    return aio.insecure_channel(address, options=_CHANNEL)


def make_server() -> aio.Server:
    """A server without services or ports; must be called in the event loop that will run it."""
    return aio.server(options=_SERVER)


def bind(server: aio.Server, host: str, port: int) -> int:
    """Listen on `host:port`; port 0 takes a free one. Returns the port.

    Raises:
        OSError: the port is taken.
    """
    bound = server.add_insecure_port(f"{host}:{port}")
    if bound == 0:
        raise OSError(f"cannot listen on {host}:{port}")
    return bound
