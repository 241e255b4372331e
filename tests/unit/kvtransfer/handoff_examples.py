"""Small values that the handoff tests share."""

from __future__ import annotations

from dataclasses import replace

from kvtransfer.layout import LayoutId
from kvtransfer.protocol.messages import AttemptKey, Commit, CommitPart, FirstToken, Grant

LAYOUT = LayoutId("ab" * 32, "float32", num_layers=2, num_kv_heads=1, head_dim=2, page_size=4)
KEY = AttemptKey("request", 1)
PAGES = (7, 3, 4)
SENDER = "prefill-0#1"
RECEIVER = "decode-0#1"
FIRST = (FirstToken(0, 17),)
SECRET = b"the receiver's own secret"


def digest_of(layer: int, index: int) -> int:
    """A stand-in digest of the page at `index` of the prompt."""
    return 1000 * (layer + 1) + index


def commit_for(grant: Grant, **changes: object) -> Commit:
    """The commit that a faultless sender makes for `grant`."""
    last = grant.first_page + len(grant.pages)
    commit = Commit(
        grant_id=grant.grant_id,
        key=grant.key,
        epoch=grant.epoch,
        receiver=grant.receiver,
        sender=SENDER,
        layout=grant.layout,
        pages=grant.pages,
        digests=tuple(tuple(digest_of(la, i) for i in range(grant.first_page, last)) for la in range(2)),
        first_tokens=FIRST,
        capability=grant.capability,
    )
    return replace(commit, **changes)  # type: ignore[arg-type]


def part_for(grant: Grant, first: int = 0, last: int = 2, **changes: object) -> CommitPart:
    """The part that a faultless sender makes of the grant's pages `first` to `last - 1`."""
    indices = range(grant.first_page + first, grant.first_page + last)
    part = CommitPart(
        grant_id=grant.grant_id,
        key=grant.key,
        epoch=grant.epoch,
        receiver=grant.receiver,
        sender=SENDER,
        first_index=first,
        digests=tuple(tuple(digest_of(la, i) for i in indices) for la in range(2)),
        capability=grant.capability,
    )
    return replace(part, **changes)  # type: ignore[arg-type]


def a_grant(**changes: object) -> Grant:
    grant = Grant("decode-0#1/1", KEY, 1, RECEIVER, LAYOUT, PAGES, lease_s=10.0, capability=b"given")
    return replace(grant, **changes)  # type: ignore[arg-type]


def names(instructions: list[object]) -> list[str]:
    return [type(i).__name__ for i in instructions]
