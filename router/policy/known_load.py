"""What a router knows of one worker's load: the worker's last report, and what was sent there since. Pure.

A report tells of the requests of all routers, and lags. It says how many of this router's commands it shows: what it
does not show yet counts beside it, exactly once, also where most of the report is of other routers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtransfer.layout import KvFormat
from router.policy.worker_load import WorkerLoad
from tandem.core.identity import WorkerKey
from tandem.core.step_times import NO_PROMPTS, PromptSteps


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker says of itself.

    Attributes:
        num_active: requests that run there, wait, or have pages that are on their way.
        num_queued_tokens: of prompts that are not computed yet.
        num_available_pages: free or evictable.
        num_stepping: requests in the batch.
        num_commands: of this router, that it shows; `None`: the worker does not say.
        prompt_steps: of a decode worker: what prompts would take beside what it generates.
    """

    num_active: int = 0
    num_queued_tokens: int = 0
    num_available_pages: int = 0
    num_stepping: int = 0
    num_commands: int | None = None
    prompt_steps: PromptSteps = NO_PROMPTS


@dataclass(slots=True)
class _Held:
    """One request that the worker holds for this router."""

    number: int  # of the command that started it there
    num_sequences: int  # that it will be
    num_queued_tokens: int  # of its prompt, to be computed there
    num_pages: int  # that its reservation will take
    steps: bool  # it takes part in the worker's steps: computed or generated there


@dataclass(slots=True)
class KnownLoad:
    """Figures of one worker, kept as they change."""

    report: Report = field(default_factory=Report)
    _held: dict[str, _Held] = field(default_factory=dict)
    # Those that count beside the report, as neither it nor an event has shown them; in the order of their commands.
    _unseen: dict[str, _Held] = field(default_factory=dict)
    # Sums over what is held: sequences; queued tokens of the unseen; pages of reservations that are not granted; those
    # that step.
    _num_sequences: int = 0
    _num_tokens: int = 0
    _num_pages: int = 0
    _num_stepping: int = 0

    def hear(self, report: Report) -> bool:
        """Whether it says anything that the last one did not."""
        if report == self.report:
            return False
        self.report = report
        while self._unseen and report.num_commands is not None:
            request_id, held = next(iter(self._unseen.items()))
            if held.number > report.num_commands:
                break
            self._see(request_id, held)
        return True

    def hold(
        self, request_id: str, number: int, num_tokens: int, num_pages: int, *, computes: bool, num_sequences: int = 1
    ) -> None:
        """`number` is that of the command which starts it; numbers grow. `computes`: its prompt is computed there."""
        self.let_go(request_id)
        held = _Held(number, num_sequences, num_tokens if computes else 0, num_pages, computes)
        self._held[request_id] = self._unseen[request_id] = held
        self._num_sequences += num_sequences
        self._num_tokens += held.num_queued_tokens
        self._num_pages += held.num_pages
        self._num_stepping += held.steps

    def note_taken_up(self, request_id: str, *, steps: bool) -> bool:
        """The worker has pages for it, computes it or generates: its report shows so. Whether it is held."""
        held = self._held.get(request_id)
        if held is None:
            return False
        self._see(request_id, held)
        self._num_pages -= held.num_pages
        self._num_stepping += steps - held.steps
        held.num_pages, held.steps = 0, steps
        return True

    def let_go(self, request_id: str) -> bool:
        """Whether it was held."""
        held = self._held.pop(request_id, None)
        if held is None:
            return False
        self._see(request_id, held)
        self._num_sequences -= held.num_sequences
        self._num_pages -= held.num_pages
        self._num_stepping -= held.steps
        return True

    @property
    def num_sequences(self) -> int:
        """Of the requests that are held."""
        return self._num_sequences

    def clear(self) -> None:
        """Nothing is held any more."""
        self._held.clear()
        self._unseen.clear()
        self._num_sequences = self._num_tokens = self._num_pages = self._num_stepping = 0

    def _see(self, request_id: str, held: _Held) -> None:
        if self._unseen.pop(request_id, None) is not None:
            self._num_tokens -= held.num_queued_tokens

    def load(self, key: WorkerKey, kv_format: KvFormat, page_size: int, max_num_seqs: int = 0) -> WorkerLoad:
        report = self.report
        num_active, num_queued_tokens = report.num_active, report.num_queued_tokens
        if report.num_commands is None:  # of an earlier version: which of ours are in its figures is not known
            num_queued_tokens = max(num_queued_tokens, self._num_tokens)
        else:
            num_active += len(self._unseen)
            num_queued_tokens += self._num_tokens
        num_active = max(num_active, len(self._held))
        return WorkerLoad(
            key=key,
            kv_format=kv_format,
            page_size=page_size,
            num_active=num_active,
            num_others=max(0, num_active - self._num_sequences),
            num_queued_tokens=num_queued_tokens,
            num_available_pages=report.num_available_pages - self._num_pages,
            num_stepping=max(report.num_stepping, self._num_stepping),
            prompt_steps=report.prompt_steps,
            max_num_seqs=max_num_seqs,
        )
