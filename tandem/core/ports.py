"""Ports that stay with those who listen there, also while they start again."""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence
from pathlib import Path

# Above what Ray gives its workers.
_FIRST, _LAST = 20_000, 65_535
_GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")
# What Linux gives, where it does not say.
_USUALLY_GIVEN = 32_768, 60_999

_random = random.SystemRandom()  # whoever seeds the other one would choose as all that do


def free_port() -> int:
    """A TCP port of this host that nobody uses now, and that the kernel gives to nobody who asks for any port, as each
    connection to elsewhere does: while its owner starts again, none of them takes it."""
    ports = _not_given()
    while True:
        port = _random.choice(ports)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:  # somebody uses it
                continue
        return port


def _not_given() -> Sequence[int]:
    """Ports that the kernel gives to nobody; all, where it gives nearly all."""
    try:
        first, last = map(int, _GIVEN.read_text().split())
    except (OSError, ValueError):
        first, last = _USUALLY_GIVEN
    ports = [port for port in range(_FIRST, _LAST + 1) if not first <= port <= last]
    return ports if len(ports) >= 1000 else range(_FIRST, _LAST + 1)
