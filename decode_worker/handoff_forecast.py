"""Foresees when a handoff will be complete, from the layers that have arrived. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class HandoffForecast:
    """When one handoff will be complete; times in seconds on one clock.

    The last page is written layer by layer while the last chunk is computed, and all layers take equally long.
    """

    num_layers: int
    last_s: float = 0.0  # when the newest layer arrived
    _first_s: float = 0.0
    _num_first: int = 0  # layers that the first write brought
    _layers: set[int] = field(default_factory=set)

    def arrived(self, layers: set[int], now_s: float) -> None:
        """The last page has arrived in these layers."""
        if not self._layers:
            self._first_s, self._num_first = now_s, len(layers)
        if layers - self._layers:
            self.last_s = now_s
            self._layers |= layers

    @property
    def num_left(self) -> int:
        """Layers in which the last page has not arrived."""
        return self.num_layers - len(self._layers)

    def complete_s(self) -> float | None:
        """When the last layer will arrive, or arrived; `None`: not known yet."""
        if not self.num_left:
            return self.last_s
        num_timed = len(self._layers) - self._num_first
        if num_timed < 1:
            return None
        return self.last_s + self.num_left * (self.last_s - self._first_s) / num_timed
