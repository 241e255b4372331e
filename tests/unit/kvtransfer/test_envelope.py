"""What a peer says of itself: believed only where an agent could be what it says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvtransfer.transports.envelope import Envelope, unpack
from tandem.core.errors import TransportError

GOOD = Envelope("ucx", "prefill-0#1", 1 << 40, 1 << 30, "cuda:0", "127.0.0.1", 4711)


@pytest.mark.parametrize("host", ["127.0.0.1", "203.0.113.9", "::1", "fe80::1"])
def test_a_description_comes_back_as_it_was(host: str) -> None:
    envelope = replace(GOOD, host=host)
    assert unpack(envelope.pack(b"blob"), "ucx") == (envelope, b"blob")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"host": "somewhere"}, "somewhere"),
        ({"host": ""}, "address"),
        ({"host": "fe80::1%eth0"}, "one link"),
        ({"host": "fe80::1%\0"}, "one link"),
        ({"host": None}, "texts"),
        ({"agent_name": 7}, "texts"),
        ({"door": -1}, "neither"),
        ({"door": 1 << 16}, "no port"),
        ({"door": True}, "neither"),
        ({"num_bytes": 1 << 64}, "beyond all memory"),
        ({"address": "0"}, "neither"),
    ],
)
def test_one_that_cannot_be_is_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(TransportError, match=match):
        unpack(replace(GOOD, **changes).pack(), "ucx")


@pytest.mark.parametrize("metadata", [b"", b"TNDM", b"nonsense" * 9, GOOD.pack()[:-3], GOOD.pack()[:7]])
def test_what_is_no_description_is_refused(metadata: bytes) -> None:
    with pytest.raises(TransportError, match=r"no description|damaged"):
        unpack(metadata, "ucx")


def test_one_of_another_transport_names_both() -> None:
    with pytest.raises(TransportError, match="prefill-0#1 speaks 'ucx', this worker 'nccl'"):
        unpack(GOOD.pack(), "nccl")
