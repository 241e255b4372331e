"""Keeps the two ends of a handoff on different cores, where both are on one host.

A datagram that wakes a thread moves it to the sender's core, as if the sender were about to sleep. But the sender goes
on copying pages, and the receiver waits for slices of that core while another core idles (seen on a virtual machine).
"""

from __future__ import annotations

from collections.abc import Collection

from tandem.core.identity import Role


def transfer_cores(role: Role, cores: Collection[int]) -> frozenset[int]:
    """Of a worker's `cores` those for its transfer thread: one half for prefill's, the other for decode's.

    Halves, not single cores: a long computation on one core must not hold the thread up.
    """
    ordered = sorted(cores)
    middle = len(ordered) // 2
    if middle == 0:
        return frozenset(ordered)
    return frozenset(ordered[:middle] if role is Role.PREFILL else ordered[middle:])
