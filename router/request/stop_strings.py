"""Finding stop strings in text that arrives in pieces. Pure.

Text is held back while it may still become a stop string: a client that does not ask for it never sees one, nor a
part of one. How the text was cut into pieces makes no difference: the stop string that is complete first wins; of those
complete at the same character, the longest.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


def possible_start(window: str, wanted: Collection[str]) -> int:
    """Where the longest tail of `window` begins that a `wanted` text begins with; its end where there is none.

    For a `window` that holds none of them whole.
    """
    most = max(map(len, wanted), default=1) - 1
    tails = range(max(0, len(window) - most), len(window))
    return next((at for at in tails if any(text.startswith(window[at:]) for text in wanted)), len(window))


class StopMatcher:
    """Watches the text of one choice."""

    def __init__(self, stops: Sequence[str], *, shows_stop: bool = False) -> None:
        """`stops` are not empty texts; with none, all text passes at once.

        `shows_stop`: the one that is found is shown too.
        """
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(stops)
        self._shows_stop = shows_stop
        self._held = ""
        self.stopped_by: str | None = None  # the stop string that was found

    @property
    def is_stopped(self) -> bool:
        return self.stopped_by is not None

    def push(self, text: str) -> str:
        """Take `text`; return what may be shown. After a match `is_stopped` is true and nothing more is shown."""
        if not self._stops or not text:
            return text
        window = self._held + text
        end = self._first_match(window, len(self._held))
        if end is not None:
            self.stopped_by = max((stop for stop in self._stops if window.endswith(stop, 0, end)), key=len)
            self._held = ""
            return window[: end if self._shows_stop else end - len(self.stopped_by)]
        keep = possible_start(window, self._stops)
        self._held = window[keep:]
        return window[:keep]

    def flush(self) -> str:
        """No more text comes: what was held back is shown."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, window: str, num_held: int) -> int | None:
        """Where the first complete stop string ends, or `None`. None ends in what was held."""
        starts = ((stop, window.find(stop, max(0, num_held + 1 - len(stop)))) for stop in self._stops)
        return min((start + len(stop) for stop, start in starts if start >= 0), default=None)
