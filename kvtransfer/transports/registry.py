"""Transports by name. A transport's library is imported only when it is chosen."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kvtransfer.interface import Interface
from kvtransfer.transports.base import DEFAULT_TIMEOUT_S, Transport
from tandem.core.errors import ConfigError

_CLASSES = {
    "ucx": "kvtransfer.transports.ucx:UcxTransport",
    "nccl": "kvtransfer.transports.nccl:NcclTransport",
    "loopback": "kvtransfer.transports.loopback:LoopbackTransport",
}


def transport_names() -> list[str]:
    return sorted(_CLASSES)


def create_transport(
    name: str,
    agent_name: str,
    *,
    host: str = "127.0.0.1",
    interface: Interface | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    **options: Any,
) -> Transport:
    """Make the transport called `name`.

    Args:
        agent_name: one for each incarnation of a worker.
        host: address of this host that peers can reach.
        interface: of the network that carries pages, in place of `host`.
        timeout_s: bound of each step of a transfer in which a library blocks.
        options: passed to the transport's constructor.

    Raises:
        ConfigError: no transport has this name.
        TransportError: its library is missing or cannot start.
    """
    if name not in _CLASSES:
        raise ConfigError(
            f"unknown transport {name!r}; known: {', '.join(transport_names())}", key="transport.name"
        )
    module, _, attribute = _CLASSES[name].partition(":")
    cls: type[Transport] = getattr(import_module(module), attribute)
    address = interface.address if interface else host
    return cls(agent_name, host=address, interface=interface, timeout_s=timeout_s, **options)
