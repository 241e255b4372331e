"""Ports for the processes that a test starts."""

from __future__ import annotations

import random
import socket

_FROM, _TO = 20_000, 32_000
"""Below what the kernel gives to whoever asks for any port (from 32,768), and above what Ray gives its workers."""

_random = random.SystemRandom()  # hypothesis seeds the other one, and then two test processes would choose alike


def free_port() -> int:
    """A TCP port that nobody uses now, nor is given to another while the process that is to listen there starts."""
    while True:
        port = _random.randrange(_FROM, _TO)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:  # somebody uses it
                continue
        return port
