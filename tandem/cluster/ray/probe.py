"""Asks a Ray cluster without its token: is it one, and does it let everybody in?"""

from __future__ import annotations

import os

import grpc

from tandem.core.addresses import split_address
from tandem.core.errors import ConfigError
from tandem.rpc.security import is_loopback

TIMEOUT_S = 5.0

_HARMLESS = "/ray.rpc.NodeInfoGcsService/CheckAlive"
"""Reads, changes nothing; its request may be empty."""


def asks_for_token(address: str, *, remedy: str) -> bool:
    """Whether the Ray whose control store is at `address` (host:port) refuses who has no token.

    Raises:
        ConfigError: nothing answers there, or it is no Ray; `remedy` says what to do.
    """
    if os.environ.get("RAY_USE_TLS", "0") in ("1", "true"):  # Ray's own TLS: a stranger gets no answer at all
        return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        call = channel.unary_unary(_HARMLESS, request_serializer=bytes, response_deserializer=bytes)
        try:
            call(b"", timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                return True
            raise ConfigError(
                f"no Ray answers at {address} ({error.code().name.lower()}); {remedy}", key="--address"
            ) from error
    return False


def require_token(address: str) -> None:
    """Raises `ConfigError` when others than this host reach the Ray at `address` and it lets them in."""
    if is_loopback(split_address(address)[0]) or asks_for_token(address, remedy="look at its logs"):
        return
    raise ConfigError(
        f"Ray at {address} lets in whoever reaches its ports, and they are open beyond this host; make a token with "
        "`ray get-auth-token --generate`, copy ~/.ray/auth_token to every node, and start Ray everywhere with "
        "RAY_AUTH_MODE=token",
        key="--address",
    )
