"""A machine of Splitwise's simulator: it batches prompts with sequences, and throws sequences out for prompts.

The rules are those of the original with their quirks, as far as its runs show them.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks.splitwise_oracle.request import Request
from benchmarks.splitwise_oracle.times import Splitwise
from tandem.core.step_times import Terms
from tandem.sim.kernel import Kernel, Timer

#: Most tokens of a batch with more than one task, and most tasks.
MAX_BATCH_TOKENS = 2048
MAX_BATCH_TASKS = 512
#: Batches after whose number a sequence that was left out goes before prompts, where all that wait were.
MAX_LEFT_OUT = 4
#: Bytes of K and V of a token of BLOOM-176B; its weights; what a machine of eight cards has.
TOKEN_BYTES = 4_014_080
WEIGHT_BYTES = 329e9
MACHINE_BYTES = 8 * 80 * 2**30
#: Tokens of KV for which a machine has room.
ROOM = (MACHINE_BYTES - WEIGHT_BYTES) / TOKEN_BYTES


@dataclass(frozen=True)
class Ends:
    """Whom a machine tells of the end of a request's prompt, and of its last token."""

    of_prompt: Callable[[Machine, Request], None]
    of_request: Callable[[Machine, Request], None]


class Machine:
    """Steps of one batch after the other.

    Attributes:
        num_pending: tokens that the scheduler counts here: of prompts, and one for each sequence.
        num_reserved: tokens of KV that it counts here, of requests that are yet to come too.
        num_taken: tokens of KV that are in memory.
        present: requests whose next task is here, by arrival.
    """

    def __init__(self, number: int, times: Splitwise, kernel: Kernel, ends: Ends) -> None:
        self.number = number
        self.num_pending = 0
        self.num_reserved = 0
        self.num_taken = 0
        self.present: list[Request] = []
        self._times = times
        self._kernel = kernel
        self._ends = ends
        self._prompts: list[Request] = []  # not started, in the order in which they came
        self._batch: list[Request] = []
        self._was_prompt: list[Request] = []  # in the batch before
        self._timer = Timer(kernel, self._end_steps)
        self._start_s = 0.0
        self._step_s = 0.0
        self._num_steps = 0
        self._has_prompt = False
        self._is_pausing = False

    @property
    def is_running(self) -> bool:
        return self._timer.due_s is not None

    @property
    def has_queue(self) -> bool:
        """A task waits: left out of the batch, or after a prompt that is being computed."""
        if len(self.present) > len(self._batch):
            return True
        return any(request.stays and not request.is_prompt_done for request in self._batch)

    def add_prompt(self, request: Request) -> None:
        """Both tasks of a request that stays come at once: that of one token may pause where the prompt may not."""
        insort(self.present, request, key=lambda one: one.order)
        self._prompts.append(request)
        if not self.is_running:
            self._start()
            return
        if request.num_prompt <= MAX_BATCH_TOKENS:
            self._pause()
        if request.stays:
            self._pause_for_token()

    def add_sequence(self, request: Request) -> None:
        insort(self.present, request, key=lambda one: one.order)
        if self.is_running:
            self._pause_for_token()
        else:
            self._start()

    def release(self, num_tokens: int) -> None:
        """A transfer from here has ended; whoever waits may fit now."""
        self.num_taken -= num_tokens
        if self.has_queue:
            if self.is_running:
                self._pause()
            else:
                self._start()

    def _pause_for_token(self) -> None:
        if len(self._batch) < min(MAX_BATCH_TOKENS, MAX_BATCH_TASKS):
            self._pause()

    def _pause(self) -> None:
        """End the run of steps after the one that is under way. A batch with a prompt has one step anyway."""
        if self._has_prompt or self._is_pausing:
            return
        self._is_pausing = True
        num_steps = int((self._kernel.now_s - self._start_s) // self._step_s) + 1
        if num_steps < self._num_steps:
            self._num_steps = num_steps
            self._timer.set(self._start_s + num_steps * self._step_s)

    def _start(self) -> None:
        """Select a batch, and run it: one step where it has a prompt, else until the first of its sequences ends."""
        self._select()
        self._is_pausing = False
        if not self._batch:
            return
        self._start_s = self._kernel.now_s
        num_rows = 0
        for request in self._batch:
            if not request.is_prompt_done:
                request.num_left_out = 0
                continue
            num_rows += 1
            request.is_thrown_out = False
            if request.token_start_s is None:
                request.token_start_s = self._start_s
        self._has_prompt = num_rows < len(self._batch)
        terms = Terms(sum(request.size for request in self._batch), num_rows, 0, 0.0)
        self._step_s = self._times.seconds(terms)
        self._num_steps = 1 if self._has_prompt else min(request.num_left for request in self._batch)
        self._timer.set(self._start_s + self._num_steps * self._step_s)

    def _end_steps(self) -> None:
        """The run of steps is over: of its prompts the sequences stay or go, of its sequences some have ended."""
        ended = self._batch
        prompts = [request for request in ended if not request.is_prompt_done]
        sequences = [request for request in ended if request.is_prompt_done]
        for request in sequences:
            request.num_left -= self._num_steps
        self._batch = [request for request in sequences if request.num_left]
        self._was_prompt = prompts
        for request in prompts:
            request.is_prompt_done = True
            request.prompt_end_s = self._kernel.now_s
        for request in ended:
            if request.num_left == 0:
                request.end_s = self._kernel.now_s
                self.present.remove(request)
                self.num_taken -= request.memory
                self._ends.of_request(self, request)
            elif request.token_start_s is None:
                if not request.stays:
                    self.present.remove(request)
                self._ends.of_prompt(self, request)
        self._start()

    def _select(self) -> None:
        """The next batch: prompts as they came, sequences that were thrown out, those of the batch before, all others.

        Who does not fit ends their group. Only who was not yet in a batch here needs memory. Of the sequences that were
        thrown out, those come first that were left out most often; of all others, prompts too, those that came first.
        """
        batch: list[Request] = []
        num_tokens = 0

        def add(group: Iterable[Request]) -> None:
            nonlocal num_tokens
            for request in group:
                if request in chosen:
                    continue
                if batch and (num_tokens + request.size > MAX_BATCH_TOKENS or len(batch) == MAX_BATCH_TASKS):
                    return
                needed = self._needed(request)
                if needed and self.num_taken + needed > ROOM:
                    return
                self.num_taken += needed
                num_tokens += request.size
                batch.append(request)
                chosen.add(request)

        chosen: set[Request] = set()
        for group in (self._overdue(), self._prompts, self._thrown_out(), self._batch, self.present):
            add(group)
        stayed = {*self._batch, *self._was_prompt}
        for request in self.present:
            if request in chosen:
                continue
            request.num_left_out += 1
            if request in stayed:
                request.rank = request.num_left_out
                request.is_thrown_out = request.token_start_s is not None
        self._prompts = [request for request in self._prompts if request not in chosen]
        self._batch, self._was_prompt = batch, []

    def _thrown_out(self) -> list[Request]:
        """Those of one rank stay in order of arrival."""
        return sorted((request for request in self.present if request.is_thrown_out), key=lambda one: -one.rank)

    def _overdue(self) -> list[Request]:
        """All who wait, where none of them has been left out less often than that; by rank upwards."""
        stayed = {*self._batch, *self._was_prompt}
        waiting = sorted((request for request in self.present if request not in stayed), key=lambda one: one.rank)
        return waiting if waiting and waiting[0].rank >= MAX_LEFT_OUT else []

    @staticmethod
    def _needed(request: Request) -> int:
        """Tokens of KV that its next task takes: a sequence all of its own at its first step."""
        if not request.is_prompt_done:
            return request.prompt_memory
        return request.arrival.num_output - 1 if request.token_start_s is None else 0
