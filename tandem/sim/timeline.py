"""What the workers of a simulation did over time, in parts of equal length: its memory does not grow with the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

_MOST_PARTS = 2048


@dataclass(slots=True)
class _Worked:
    """Seconds of each part."""

    with_prompts_s: list[float] = field(default_factory=list)
    tokens_s: list[float] = field(default_factory=list)


class Timeline:
    """Args: part_s: length of a part at first; whenever there are too many, each two become one."""

    def __init__(self, part_s: float = 0.05) -> None:
        self.part_s = part_s
        self._workers: dict[str, _Worked] = {}

    @property
    def end_s(self) -> float:
        return self.part_s * max((len(worked.tokens_s) for worked in self._workers.values()), default=0)

    def note(self, worker: str, began_s: float, ended_s: float, *, with_prompts: bool) -> None:
        """Steps from `began_s` to `ended_s`, which computed tokens of prompts, or generated only."""
        while ended_s >= _MOST_PARTS * self.part_s:
            self._widen()
        worked = self._workers.setdefault(worker, _Worked())
        first, last = int(began_s / self.part_s), int(ended_s / self.part_s)
        for parts in (worked.with_prompts_s, worked.tokens_s):
            parts.extend([0.0] * (last + 1 - len(parts)))
        parts = worked.with_prompts_s if with_prompts else worked.tokens_s
        for number in range(first, last + 1):
            parts[number] += min(ended_s, (number + 1) * self.part_s) - max(began_s, number * self.part_s)

    def _widen(self) -> None:
        self.part_s *= 2
        for worked in self._workers.values():
            worked.with_prompts_s = _paired(worked.with_prompts_s)
            worked.tokens_s = _paired(worked.tokens_s)

    def shares(self, worker: str, num: int, until_s: float) -> list[tuple[float, float]]:
        """Of each `num`-th part of the time until `until_s`: the share in which the worker computed tokens of prompts,
        and in which it only generated."""
        worked = self._workers.get(worker, _Worked())
        kinds = [self._spread(seconds, num, until_s) for seconds in (worked.with_prompts_s, worked.tokens_s)]
        return list(zip(*kinds, strict=True))

    def _spread(self, seconds: Sequence[float], num: int, until_s: float) -> list[float]:
        found, width_s = [0.0] * num, until_s / num
        for number, worked_s in enumerate(seconds):
            if not worked_s:
                continue
            began_s, ended_s = number * self.part_s, (number + 1) * self.part_s
            for at in range(min(num - 1, int(began_s / width_s)), min(num - 1, int(ended_s / width_s)) + 1):
                within_s = min(ended_s, (at + 1) * width_s) - max(began_s, at * width_s)
                found[at] += worked_s * max(0.0, within_s) / self.part_s
        return [min(1.0, share / width_s) for share in found]


def _paired(seconds: Sequence[float]) -> list[float]:
    return [sum(seconds[number : number + 2]) for number in range(0, len(seconds), 2)]
