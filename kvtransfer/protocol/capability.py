"""Proves that the sender of a message about a grant was given that grant: an HMAC by a secret of the receiver.

A capability is for one grant: its epoch, incarnation, attempt and pages. It is good for nothing else, and worthless
once the lease or the record has ended. It tells peers and requests apart and hides nothing: grants travel inside the
control plane only. On the KV plane no channel proves who speaks. What a sender says there is sealed with the
capability, which itself does not travel.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

from kvtransfer.protocol.messages import Grant

_SEAL_BYTES = hashlib.sha256().digest_size


def make_capability(grant: Grant, secret: bytes) -> bytes:
    """HMAC-SHA256 over all that `grant` says but its lease and layout; 32 bytes."""
    texts = (grant.grant_id.encode(), grant.key.request_id.encode(), grant.receiver.encode())
    numbers = (grant.epoch, grant.key.attempt, grant.first_page, len(grant.pages), *grant.pages)
    # Each text behind its length, so that no two grants have the same encoding.
    encoded = b"".join(struct.pack("<Q", len(text)) + text for text in texts)
    encoded += struct.pack(f"<{len(numbers)}Q", *numbers)
    return hmac.digest(secret, encoded, "sha256")


def is_capability_of(grant: Grant, capability: bytes) -> bool:
    """Whether `capability` is the one that `grant` was given out with; takes the same time wherever they differ."""
    return hmac.compare_digest(grant.capability, capability)


def seal(capability: bytes, body: bytes) -> bytes:
    """`body` behind its HMAC-SHA256 by `capability`."""
    return _mac(capability, body) + body


def split_seal(sealed: bytes) -> tuple[bytes, bytes]:
    """Take apart what `seal` gave, or what claims to be that: (seal, body).

    Raises:
        ValueError: it is too short.
    """
    if len(sealed) < _SEAL_BYTES:
        raise ValueError(f"{len(sealed)} bytes bear no seal")
    return sealed[:_SEAL_BYTES], sealed[_SEAL_BYTES:]


def is_seal_of(capability: bytes, found: bytes, body: bytes) -> bool:
    """Whether `found` is the seal of `body` by `capability`; takes the same time wherever they differ."""
    return hmac.compare_digest(_mac(capability, body), found)


def _mac(capability: bytes, body: bytes) -> bytes:
    return hmac.digest(capability, body, "sha256")
