"""What a receiver must not believe: messages of a confused sender, and of somebody who was never given the grant."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvtransfer.protocol import receiver_events as rx
from kvtransfer.protocol.messages import AttemptKey, Commit, CommitPart, Grant
from tests.support.scripted_model import LAYOUT


def mangle(said: Commit | CommitPart, how: int) -> rx.CommitReceived | rx.PartReceived:
    """A message that is right but for one field; `how` chooses it."""
    changes: list[dict[str, Any]] = [
        {"epoch": said.epoch + 1},
        {"key": AttemptKey(said.key.request_id, said.key.attempt + 1)},
        {"receiver": "decode-9#1"},
        {"sender": "prefill-9#1"},
        {"digests": said.digests[:-1]},
    ]
    if isinstance(said, CommitPart):
        return rx.PartReceived(replace(said, **changes[how % len(changes)]))
    changes += [
        {"pages": said.pages[::-1]},
        {"pages": said.pages[:-1], "digests": tuple(d[:-1] for d in said.digests)},
        {"layout": replace(said.layout, page_size=99)},
    ]
    return rx.CommitReceived(replace(said, **changes[how % len(changes)]))


def forge(grant: Grant, sender: str, capability: bytes, how: int) -> rx.ReceiverEvent:
    """A message about `grant` with a capability that is not its own."""
    zeros = tuple((0,) * len(grant.pages) for _ in range(LAYOUT.num_layers))
    about = (grant.grant_id, grant.key, grant.epoch, grant.receiver, sender)
    forged: list[rx.ReceiverEvent] = [
        rx.WriterConfirmedIdle(grant.grant_id, sender, capability),
        rx.GrantGivenOut(grant.grant_id, sender, capability),
        rx.LeaseRenewed(grant.grant_id, sender, capability),
        rx.CommitReceived(Commit(*about, LAYOUT, grant.pages, zeros, capability=capability)),
        rx.PartReceived(CommitPart(*about, 0, zeros, capability)),
    ]
    return forged[how % len(forged)]
