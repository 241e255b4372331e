"""What the prefill role asks of the sender driver, and what the driver reports to its worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvtransfer.protocol import sender_events as ev
from kvtransfer.protocol.messages import AttemptKey, Commit, CommitPart, FirstToken
from prefill_worker.events import HandoffStats
from prefill_worker.links import LinkFigures


@dataclass(frozen=True, slots=True)
class SealedPages:
    """Pages of one prompt whose KV in some layers is final."""

    key: AttemptKey
    layers: range
    first_index: int  # place of the first among the prompt's pages
    local_pages: tuple[int, ...]


class SenderPort(Protocol):
    """The sender driver as the role calls it. Calls are carried out in order, perhaps later and in another thread."""

    def computed_layers(self, layers: range, pages: tuple[int, ...], sealed: list[SealedPages] = ...) -> None: ...

    def sealed(self, pages: list[SealedPages]) -> None: ...

    def computed(self, key: AttemptKey, first_tokens: tuple[FirstToken, ...], computed_s: float) -> None: ...

    def wait_taken(self) -> None:
        """Wait, for a short time at most, until the driver knows which prompts are computed."""

    def cancel(self, key: AttemptKey) -> None:
        """End this attempt, whether it had begun or not."""


class SenderCallbacks(Protocol):
    """What the driver reports to its worker. Called on the transfer thread; each call must hand over and return."""

    def commit_part(self, part: CommitPart) -> None: ...

    def commit(self, commit: Commit, *, again: bool) -> None:
        """`again`: an earlier sending had no answer."""

    def confirm_idle(self, idle: ev.ConfirmIdle) -> None:
        """Tell the receiver that nothing of the grant is outstanding, until it has heard."""

    def succeeded(self, key: AttemptKey, stats: HandoffStats) -> None: ...

    def failed(self, failure: ev.Fail) -> None: ...

    def quarantine(self, pages: tuple[int, ...]) -> None:
        """The attempt is over, and writes may still read these pages."""

    def release(self, pages: tuple[int, ...]) -> None:
        """No write can read these pages any more. Each sealed page comes exactly once."""

    def closed(self, key: AttemptKey) -> None:
        """The handoff is over; no other call about it follows."""

    def replace_self(self, num_quarantined: int) -> None:
        """Writes of ended attempts hold this many pages and do not end: only a new process frees them."""

    def links_changed(self, links: tuple[LinkFigures, ...]) -> None:
        """What is known of the links to decode workers has changed."""

    def link_hangs(self, receiver: str, why: str) -> None:
        """A write to this decode worker has had its time. `link_closed` settles it, when its connection is closed."""

    def deadline(self, deadline_s: float | None) -> None:
        """`tick` is due at this time."""
