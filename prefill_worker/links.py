"""The links from this worker to its decode workers, and what is told of them: how fast each is."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvtransfer.protocol.link import Link
from kvtransfer.protocol.link_window import LinkLimits

# Only so many links are told of, those that were used last.
MOST_TOLD = 64
# A rate is told when it has changed by this factor; while pages are under way, not more often than once in this time.
_NOTICEABLE = 1.25
_TELL_EVERY_S = 1.0
# What has not changed is told again after so long, if pages go there at all. A link that has carried none for longer is
# not known any more: one that was slow once is tried again.
_TELL_AGAIN_S = 10.0
REMEMBERED_S = 30.0


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """What is known of one link.

    Attributes:
        receiver: incarnation of the decode worker.
        bytes_per_s: what it carries; 0: not known yet.
        used_s: when pages were sent last.
    """

    receiver: str
    bytes_per_s: float
    used_s: float = 0.0


def remembered(links: Iterable[LinkFigures], now_s: float) -> list[LinkFigures]:
    """Those that still tell something."""
    return [link for link in links if now_s - link.used_s <= REMEMBERED_S]


class Links:
    """All links of one worker, by the receiver's incarnation.

    Args:
        tell: gets the figures when something noticeable has changed.
    """

    def __init__(self, limits: LinkLimits, tell: Callable[[tuple[LinkFigures, ...]], None]) -> None:
        self._limits = limits
        self._tell = tell
        self._links: dict[str, Link] = {}
        self._told: dict[str, float] = {}  # the rates
        self._told_s = float("-inf")

    def get(self, receiver: str) -> Link | None:
        """`None`: nothing was ever sent there, or its process has ended."""
        return self._links.get(receiver)

    def open(self, receiver: str) -> Link:
        """The link to this receiver, which is paired."""
        link = self._links.get(receiver)
        if link is None:
            link = self._links[receiver] = Link(self._limits)
        return link

    def forget(self, receiver: str) -> None:
        """Its process has ended."""
        if self._links.pop(receiver, None) is not None:
            self._told.pop(receiver, None)
            self._tell_all(self._told_s)

    def tell_news(self, receiver: str, now_s: float) -> None:
        """Something has happened on this link: tell of its rate, if that has changed noticeably. Of a link that is idle
        at once: nothing more may happen on it for long."""
        link = self._links.get(receiver)
        if link is None or link.window.bytes_per_s is None:
            return
        low, high = sorted((link.window.bytes_per_s, self._told.get(receiver, 0.0)))
        is_due = not link.window.num_bytes or now_s >= self._told_s + _TELL_EVERY_S
        if is_due and (high > low * _NOTICEABLE or now_s >= self._told_s + _TELL_AGAIN_S):
            self._tell_all(now_s)

    def _tell_all(self, now_s: float) -> None:
        newest = heapq.nlargest(MOST_TOLD, self._links.items(), key=lambda item: item[1].used_s)
        self._told = {receiver: link.window.bytes_per_s or 0.0 for receiver, link in newest}
        self._told_s = now_s
        self._tell(tuple(LinkFigures(receiver, self._told[receiver], link.used_s) for receiver, link in newest))
