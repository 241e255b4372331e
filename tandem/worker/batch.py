"""One step of a worker as plain data: what is computed in it, and its bounds."""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.worker.sequence import Sequence

NO_TOKENS = range(0)


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of one step and of the queue; counts of sequences and tokens."""

    max_num_seqs: int
    max_num_batched_tokens: int
    chunk_size: int  # a multiple of the page size: all chunks but a prompt's last one fill whole pages
    queue_bound: int
    # Sequences that are not promoted are admitted while no more than this share of the pool is in use. One is always
    # admitted when there is no other.
    unpromoted_share: float = 1.0
    # A step takes tokens of paced prompts until it has so many tokens; 0: as many as the wanted time leaves.
    paced_tokens: int = 0
    # Of a decode worker: it takes new prompts beside what it generates.
    computes_prompts: bool = False
    # So many tokens of chunks keep the processor busy; `_may_join` says what may still join such a step.
    saturating_tokens: int = 512
    # From so many sequences on, a step completes two prompts even if one keeps the processor busy; 0: never.
    num_to_pair: int = 0
    # A token sees so many tokens in each layer, itself included: pages wholly behind that are given back; 0: all.
    window: int = 0
    # Of a mixed model, where some layers do so: pages of a place for these; see `tandem.core.layer_groups`.
    num_windowed: int = 0


@dataclass(slots=True)  # one for each row of each step: a frozen one takes six times as long to make
class ScheduledSequence:
    """What one sequence computes in this step: tokens [start, start + num_tokens)."""

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool  # the step reaches the newest token, and a token is sampled after it
    scored: range = NO_TOKENS  # tokens of the prompt whose log-probabilities the step gives
    pooled: range = NO_TOKENS  # tokens of the prompt whose hidden states become part of its vector
    guesses: tuple[int, ...] = ()  # the last of `num_tokens`: they are not the sequence's, and may not become so

    @property
    def num_logits(self) -> int:
        """After so many of its last tokens logits are needed."""
        end = self.start + self.num_tokens
        if self.pooled:
            return end - self.pooled.start
        return end - self.scored.start + 1 if self.scored else self.num_to_sample

    @property
    def num_to_sample(self) -> int:
        """Of so many of its last tokens' logits tokens may be sampled: of the newest one's, and of each guess's."""
        return 1 + len(self.guesses) if self.samples else 0


@dataclass(slots=True)
class Batch:
    """One step, as plain data. It is empty when nothing can run now."""

    items: list[ScheduledSequence] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (source page, target page), before the step
    preempted: list[Sequence] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    # Running sequences that got no page and could preempt none; they go on when pages come back.
    stalled: list[Sequence] = field(default_factory=list)
    # Of chunks that are not paced: all their tokens; how many of them complete their sequence; the tokens of those.
    num_chunk_tokens: int = 0
    num_ending: int = 0
    num_ending_tokens: int = 0
    num_paced_tokens: int = 0  # of chunks that are paced
    # Tokens of prompts that yield, which leave those that generate their time; `None`: nobody has reckoned it yet.
    most_beside: int | None = None
    most_paced: int | None = None  # as `most_beside`, of paced prompts
    num_scored_tokens: int = 0  # of chunks whose logits are needed, each after every token

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.items)
