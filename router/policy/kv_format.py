"""Which workers may exchange pages, and in what two differ that may not.

Two that differ in layout, protocol version, digest or transport never serve a request together: the pages of one mean
nothing to the other, or never reach it.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.rpc.v1.common_pb2 import WorkerInfo

#: Every field that must be equal on both sides, with its value, in declaration order.
KvFormat = tuple[tuple[str, object], ...]


def kv_format(info: WorkerInfo) -> KvFormat:
    """What a worker's pages are and how they travel; equal for two workers that may pair."""
    layout = info.layout
    fields = [(field.name, getattr(layout, field.name)) for field in layout.DESCRIPTOR.fields]
    return (*fields, ("transport", info.transport))


def differences(a_name: str, a: KvFormat, b_name: str, b: KvFormat) -> list[str]:
    """Each field in which the two differ, with both values, for people."""
    ours, theirs = dict(a), dict(b)
    return [
        f"{name}: {a_name} has {ours.get(name)!r}, {b_name} has {theirs.get(name)!r}"
        for name in {**ours, **theirs}
        if ours.get(name) != theirs.get(name)
    ]


def mismatches(
    prefill: Sequence[tuple[str, KvFormat]], decode: Sequence[tuple[str, KvFormat]]
) -> list[tuple[str, str, list[str]]]:
    """Every pair (prefill worker, decode worker) that may not serve a request together, with what differs."""
    return [(p, d, differences(p, ours, d, theirs)) for p, ours in prefill for d, theirs in decode if ours != theirs]
