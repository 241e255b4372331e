"""Tokens that may come next, proposed by a small model that reads along. Pure; runs between steps, on their thread.

The small model, the *draft*, has KV of its own, in pages of its own: it computes a prompt when the steps have begun, in
chunks that hold no step up for long, and what was generated as it comes. Its proposals are guesses as others are: the
step computes them beside the newest token, and they are taken as far as they are what is sampled. It draws by the same
random number as the step will, so it proposes what the step draws if both models agree on how likely tokens are.

**When.** A proposal costs a pass of the draft, and all that generate wait for it. So as many are made as give the most
tokens a second, by how long steps and passes took and how many proposals were right; where none pay there are none, and
every now and then one is made to see whether it does now. A prompt is computed only once the output has become so long
that this would have paid for it: outputs that end soon cost nothing, and no output more than twice what it might have.
Reference: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", ICML 2023.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as SeqOf
from dataclasses import dataclass, field, replace
from itertools import accumulate

from tandem.core.clock import Clock
from tandem.core.pages import PagePool, PageTable, page_table, pages_for
from tandem.core.sampling import SampleRow
from tandem.worker.draft_costs import Acceptance, Costs, Timing, Timings
from tandem.worker.guesses import Source, may_end
from tandem.worker.sequence import Sequence

_log = logging.getLogger(__name__)

# Of the time since the last one: so much may a proposal cost that is made to see whether they pay.
_TRIAL_SHARE = 0.02
# Steps between two proposals that are made to see whether they pay, at most.
_MOST_TO_WAIT = 64
# A draft that fails so many times in a row is asked no more: no output depends on it.
_MAX_FAILED = 3


@dataclass(frozen=True, slots=True)
class DraftInput:
    """What the draft computes of one sequence: KV of `[0, start)` is in its `pages`."""

    token_ids: SeqOf[int]
    start: int
    pages: SeqOf[int]
    row: SampleRow | None  # what is drawn behind the last token; `None`: nothing


DraftPass = Callable[[SeqOf[DraftInput]], list[int | None]]
"""Computes one batch; returns the token of each input, `None` where none is asked for or none can be drawn."""


@dataclass(slots=True, eq=False)
class Follower:
    """The draft's side of one sequence.

    token_ids:  [ num_known: KV in pages | to compute ] ahead: KV in pages, if these tokens come
    """

    sequence: Sequence
    acceptance: Acceptance
    of_all: Acceptance  # those that begin take it over
    pages: PageTable = field(default_factory=page_table)
    num_known: int = 0
    ahead: list[int] = field(default_factory=list)
    num_published: int = 0  # leading pages that others may find
    is_lost: bool = False  # the draft cannot read it
    num_idle_steps: int = 0  # since it last had proposals
    num_trials: int = 0  # in a row
    last_used: int = 0  # number of the plan
    rank: int = -1  # in the present plan; -1: it has no part in it

    source = Source.DRAFT

    def judge(self, num: int, num_right: int) -> None:
        """Of `num` proposals the first `num_right` were right."""
        self.acceptance.learn(num, num_right)
        self.of_all.learn(num, num_right)

    @property
    def num_to_compute(self) -> int:
        return len(self.sequence.token_ids) - self.num_known

    def note_sampled(self) -> None:
        """The KV of proposals that came is the sequence's own."""
        token_ids = self.sequence.token_ids
        for token_id in self.ahead:
            if self.num_known == len(token_ids) or token_ids[self.num_known] != token_id:
                break
            self.num_known += 1
        self.ahead = []
        # Behind the newest token something is drawn, also once more where no step came between.
        self.num_known = min(self.num_known, len(token_ids) - 1)


@dataclass(slots=True, eq=False)
class Candidate:
    """A sequence that may get proposals, and how many."""

    follower: Follower
    most: int
    num: int = 0


class Drafts:
    """Proposals for the sequences of a batch.

    Args:
        compute: a pass of the draft.
        pool: of the draft's own pages.
        most: proposals for one sequence in a step.
        num_rows: tokens that a pass computes at hardly more cost than one.
        max_context, vocab_size: the draft's own.
        ends: tokens that end a text are not proposed.
    """

    def __init__(
        self,
        compute: DraftPass,
        pool: PagePool,
        *,
        most: int,
        num_rows: int,
        max_context: int,
        vocab_size: int,
        ends: Collection[int],
        clock: Clock,
    ) -> None:
        self.pool = pool
        self._compute = compute
        self._most = most
        self._num_rows = num_rows
        self._max_context = min(max_context, pool.num_pages * pool.page_size)
        self._vocab_size = vocab_size
        self._ends = ends
        self._clock = clock
        # Of sequences in the batch; invariant: nobody else holds pages of the pool.
        self._followers: dict[Sequence, Follower] = {}
        # Of texts that follow a grammar, which the draft does not know, and of all others.
        self._acceptance = {True: Acceptance(), False: Acceptance()}
        self._timings = Timings()
        self._num_plans = 0
        self._num_failed = 0
        self._is_off = False

    # -- what the worker tells

    def keep(self, running: Iterable[Sequence]) -> None:
        """Give back the pages of all other sequences: they have ended, or have lost their own."""
        kept = set(running)
        for sequence in [sequence for sequence in self._followers if sequence not in kept]:
            self._let_go(self._followers.pop(sequence))

    def step_took(self, seconds: float, *, is_checked: bool) -> None:
        """So long took a step of single tokens; `is_checked`: it computed proposals beside them."""
        (self._timings.checked if is_checked else self._timings.plain).learn(seconds, self._clock.now())

    # -- proposing

    def propose(self, sequences: SeqOf[tuple[Sequence, int]], room: int, num_running: int) -> None:
        """Set the guesses of these sequences, each with how many it may have; `room`: of all together.

        All of `num_running` wait meanwhile.
        """
        if self._is_off:
            return
        try:
            self._propose(sequences, room, num_running)
        except Exception:  # noqa: BLE001 - said, and counted
            # No output depends on it: the step goes on without.
            _log.exception("the draft failed")
            self._num_failed += 1
            self.keep([])
            for sequence, _ in sequences:
                sequence.guesses = ()
            if self._num_failed >= _MAX_FAILED:
                _log.error("the draft has failed %d times in a row: none is asked any more", self._num_failed)
                self._is_off = True
        else:
            self._num_failed = 0

    def _propose(self, sequences: SeqOf[tuple[Sequence, int]], room: int, num_running: int) -> None:
        self._num_plans += 1
        costs = self._timings.costs(self._num_rows, self._clock.now())
        if not any(
            costs.rate(num_running + min(room, place * len(sequences)), place) > costs.rate(num_running, 0)
            for place in range(1, self._most + 1)
        ):
            return  # not even if all were right
        for follower in self._followers.values():
            follower.rank = -1
        candidates = [self._candidate(rank, *each) for rank, each in enumerate(sequences)]
        self._catch_up(candidates, room, num_running, costs)
        ready = [each for each in candidates if each.most > 0 and self._is_ready(each.follower)]
        if not _choose(ready, room, num_running, costs):
            _try(ready, costs)
        self._draw([each for each in ready if each.num and self._prepares(each)])

    def _candidate(self, rank: int, sequence: Sequence, most: int) -> Candidate:
        follower = self._followers.get(sequence)
        if follower is None:
            of_all = self._acceptance[bool(sequence.params.grammar)]
            follower = Follower(sequence, Acceptance(of_all.value), of_all)
            self._followers[sequence] = follower
        follower.rank = rank
        follower.num_idle_steps += 1
        if len(sequence.token_ids) >= self._max_context:
            self._lose(follower)
        if not follower.is_lost:
            follower.note_sampled()
            self._publish(follower)
            self._find(follower)
        return Candidate(follower, min(most, self._most, self._max_context - len(sequence.token_ids)))

    def _is_ready(self, follower: Follower) -> bool:
        """Whether it takes but a pass to reach the newest token."""
        return not follower.is_lost and follower.num_to_compute <= self._num_rows

    def _prepares(self, each: Candidate) -> bool:
        """Whether its proposals can be made now: who comes before it may have taken its pages."""
        follower = each.follower
        num_tokens = len(follower.sequence.token_ids)
        if not self._is_ready(follower) or not self._can_read(follower, num_tokens):
            return False
        return self._take_pages(follower, num_tokens + each.num - 1)  # the last one's KV is not computed

    def _draw(self, planned: list[Candidate]) -> None:
        """Make the proposals: a pass for each place, of all that have one there."""
        proposed: dict[Follower, list[int]] = {each.follower: [] for each in planned}
        for place in range(max((each.num for each in planned), default=0)):
            going_on = [each.follower for each in planned if each.num > place and len(proposed[each.follower]) == place]
            if not going_on:
                break
            inputs = [_input(follower, proposed[follower]) for follower in going_on]
            began_s = self._clock.now()
            tokens = self._compute(inputs)
            self._learn(self._timings.draws, began_s)
            for follower, token_id in zip(going_on, tokens, strict=True):
                if not place:
                    follower.num_known = len(follower.sequence.token_ids)
                    follower.num_idle_steps, follower.last_used = 0, self._num_plans
                # What is beyond the draft's own vocabulary it could not read at the next place.
                is_own = token_id is not None and token_id < self._vocab_size
                if token_id is not None and is_own and not may_end(follower.sequence, token_id, self._ends):
                    proposed[follower].append(token_id)
        for follower, token_ids in proposed.items():
            follower.ahead = token_ids[:-1]
            follower.sequence.guesses, follower.sequence.guessed_by = tuple(token_ids), follower
            if not token_ids:  # a pass that gave nothing is worth as much as one that was wrong
                follower.judge(1, 0)

    def _learn(self, timing: Timing, began_s: float, num: int = 1) -> None:
        """So many took from `began_s` until now."""
        now_s = self._clock.now()
        timing.learn((now_s - began_s) / num, now_s)

    # -- prompts

    def _catch_up(self, candidates: list[Candidate], room: int, num_running: int, costs: Costs) -> None:
        """Compute some of what the draft lacks, of those for which that pays, one after the other."""
        budget = costs.most_at_once
        inputs: list[DraftInput] = []
        followers = [each.follower for each in candidates if not each.follower.is_lost]
        num = len(followers)
        for follower in followers:
            if self._is_ready(follower) or budget < 1:
                continue
            end = follower.num_known + min(budget, follower.num_to_compute - 1)
            most = min(self._most, -(-room // num))
            pays = _pays_to_read(follower, most, num, num_running, costs) or _is_due(follower, costs)
            if pays and self._can_read(follower, end) and self._take_pages(follower, end):
                inputs.append(_chunk(follower, end))
                budget -= end - follower.num_known
                follower.num_known, follower.last_used = end, self._num_plans
        if inputs:
            began_s = self._clock.now()
            self._compute(inputs)
            self._learn(self._timings.token, began_s, sum(len(each.token_ids) for each in inputs))

    def _can_read(self, follower: Follower, end: int) -> bool:
        """Whether the draft knows the tokens before the `end`th that it has not computed."""
        new = follower.sequence.token_ids[follower.num_known : end]
        if max(new) < self._vocab_size:
            return True
        self._lose(follower)
        return False

    # -- pages

    def _take_pages(self, follower: Follower, num_tokens: int) -> bool:
        """Have pages for so many tokens; where they are short, from those that do not propose now, then from those
        that come behind it."""
        num_missing = pages_for(num_tokens, self.pool.page_size) - len(follower.pages)
        if num_missing < 1:
            return True
        if num_missing > self.pool.num_available:
            others = [other for other in self._followers.values() if other.pages]
            resting = sorted((other for other in others if other.rank < 0), key=lambda other: other.last_used)
            behind = sorted((other for other in others if other.rank > follower.rank), key=lambda other: -other.rank)
            victims = [*resting, *behind]
            if num_missing > self.pool.num_available + sum(len(other.pages) for other in victims):
                return False
            for other in victims:
                if num_missing <= self.pool.num_available:
                    break
                self._let_go(other)
        taken = self.pool.allocate(num_missing)
        follower.pages.extend(taken or ())
        return taken is not None

    def _publish(self, follower: Follower) -> None:
        """Let others find the pages that are full."""
        keys = follower.sequence.keys
        end = min(follower.num_known // self.pool.page_size, len(keys))
        for index in range(follower.num_published, end):
            self.pool.publish(follower.pages[index], keys[index])
        follower.num_published = max(follower.num_published, end)

    def _find(self, follower: Follower) -> None:
        """Take what others have computed of it."""
        page_size, sequence = self.pool.page_size, follower.sequence
        begin, end = follower.num_known // page_size, (len(sequence.token_ids) - 1) // page_size
        if follower.num_known % page_size or len(follower.pages) > begin:
            return
        found = self.pool.acquire(sequence.keys[index] for index in range(begin, min(end, len(sequence.keys))))
        follower.pages.extend(found)
        follower.num_known += len(found) * page_size
        follower.num_published = max(follower.num_published, len(follower.pages))

    def _lose(self, follower: Follower) -> None:
        follower.is_lost = True
        self._let_go(follower)

    def _let_go(self, follower: Follower) -> None:
        self.pool.release(follower.pages)
        follower.pages, follower.ahead = page_table(), []
        follower.num_known = follower.num_published = 0


def _chunk(follower: Follower, end: int) -> DraftInput:
    token_ids = follower.sequence.token_ids[follower.num_known : end]
    return DraftInput(token_ids, follower.num_known, follower.pages, None)


def _input(follower: Follower, proposed: list[int]) -> DraftInput:
    """What the draft computes for the next proposal."""
    sequence = follower.sequence
    # Penalties do not know of what is proposed: that costs a right one now and then, and no copy of all that was seen.
    (row,) = sequence.owner.rows(sequence, len(proposed))
    row = replace(row, guide=None) if row.guide is not None else row
    num_tokens = len(sequence.token_ids)
    if not proposed:
        return DraftInput(sequence.token_ids[follower.num_known :], follower.num_known, follower.pages, row)
    return DraftInput(proposed[-1:], num_tokens + len(proposed) - 1, follower.pages, row)


def _choose(ready: list[Candidate], room: int, num_running: int, costs: Costs) -> bool:
    """Set how many proposals give the most tokens a second; whether that is any."""
    places: list[list[Candidate]] = []
    num_best, best, gained = 0, costs.rate(num_running, 0), 0.0
    while able := [each for each in ready if each.most > len(places)][:room]:
        room -= len(able)
        places.append(able)
        gained += sum(each.follower.acceptance.value ** len(places) for each in able)
        if (rate := costs.rate(num_running + gained, len(places))) > best:
            num_best, best = len(places), rate
    for place in places[:num_best]:
        for each in place:
            each.num += 1
            each.follower.num_trials = 0
    return num_best > 0


def _try(ready: list[Candidate], costs: Costs) -> None:
    """One proposal, to see whether they pay now; for the one that has had none for longest."""
    for each in sorted(ready, key=lambda each: each.follower.last_used):
        if _is_due(each.follower, costs):
            each.follower.num_trials += 1
            each.num = 1
            return


def _is_due(follower: Follower, costs: Costs) -> bool:
    """Whether a proposal may be tried: it costs little of the time since the last one."""
    if follower.num_idle_steps <= min(2**follower.num_trials, _MOST_TO_WAIT):
        return False
    cost_s = costs.pass_s + follower.num_to_compute * costs.token_s
    return cost_s <= _TRIAL_SHARE * follower.num_idle_steps * costs.step_s


def _pays_to_read(follower: Follower, most: int, num: int, num_running: int, costs: Costs) -> bool:
    """Whether its part of what proposals save would have been, since its output began, as much time as its prompt
    takes, and can be as much in what is left.

    `num` have proposals together, `most` each: that may pay where those for one alone would not.
    """
    sequence, value = follower.sequence, follower.acceptance.value
    num_tokens = min(sequence.num_output, sequence.params.max_tokens - sequence.num_output)
    cost_s = follower.num_to_compute * costs.token_s
    if num_tokens * costs.step_s < cost_s * num:  # no step saves more than itself
        return False
    gains = accumulate(num * value**place for place in range(1, most + 1))
    best = max(costs.rate(num_running + gain, place) for place, gain in enumerate(gains, 1))
    saved_s = costs.step_s * max(0.0, 1 - costs.rate(num_running, 0) / best) / num
    return num_tokens * saved_s >= cost_s
