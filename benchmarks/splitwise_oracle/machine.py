"""A machine of Splitwise's simulator: it batches prompts with sequences, and throws sequences out for prompts.

The rules are those of the original with their quirks, as far as its runs show them.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import takewhile

from benchmarks.splitwise_oracle.request import Request
from benchmarks.splitwise_oracle.times import Splitwise
from tandem.core.step_times import Terms
from tandem.sim.kernel import Kernel, Timer

#: Most tokens of a batch with more than one task, and most tasks.
MAX_BATCH_TOKENS = 2048
MAX_BATCH_TASKS = 512
#: A task that was left out of so many batches is overdue.
MAX_LEFT_OUT = 4
#: Bytes of K and V of a token of BLOOM-176B; its weights; what a machine of eight cards has.
TOKEN_BYTES = 4_014_080
WEIGHT_BYTES = 329e9
MACHINE_BYTES = 8 * 80 * 2**30
#: Tokens of KV for which a machine has room.
ROOM = (MACHINE_BYTES - WEIGHT_BYTES) / TOKEN_BYTES


@dataclass(eq=False, slots=True)
class _Task:
    """The prompt of a request, or the generation of its tokens, which waits."""

    request: Request
    is_prompt: bool

    @property
    def is_next(self) -> bool:
        """Else it waits for the other one."""
        return self.is_prompt != self.request.is_prompt_done

    @property
    def num_left_out(self) -> int:
        return self.request.num_left_out if self.is_next else 0

    @property
    def order(self) -> tuple[int, float]:
        return self.num_left_out, self.request.arrival.time_s


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
        self._thrown_out: list[Request] = []  # sequences, in the order in which they left the batch
        self._pending: list[_Task] = []  # all that wait, see `_await`
        self._batch: list[Request] = []  # in the order in which they came into it
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
        self._await(request, is_prompt=True)
        if request.stays:
            self._await(request, is_prompt=False)
        if not self.is_running:
            self._start()
            return
        if request.num_prompt <= MAX_BATCH_TOKENS:
            self._pause()
        if request.stays:
            self._pause_for_token()

    def add_sequence(self, request: Request) -> None:
        insort(self.present, request, key=lambda one: one.order)
        self._await(request, is_prompt=False)
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
        for request in prompts:
            request.is_prompt_done = True
            request.prompt_end_s = self._kernel.now_s
        for request in ended:
            if request.num_left == 0:
                request.end_s = self._kernel.now_s
                self.present.remove(request)
                self._forget(request)
                self.num_taken -= request.memory
                self._ends.of_request(self, request)
            elif request.token_start_s is None:
                if not request.stays:
                    self.present.remove(request)
                self._ends.of_prompt(self, request)
        self._start()

    def _await(self, request: Request, *, is_prompt: bool) -> None:
        """A task waits. It goes before those that were left out more often when it comes: as these counts grow where
        they stand, and a search by halves looks at some of them alone, the order is none that could be told."""
        insort(self._pending, _Task(request, is_prompt), key=lambda task: task.order)

    def _forget(self, request: Request) -> None:
        """Its next task waits no more."""
        for place, task in enumerate(self._pending):
            if task.request is request and task.is_next:
                del self._pending[place]
                return

    def _select(self) -> None:
        """The next batch: who is overdue, prompts as they came, sequences that were thrown out, those of the batch
        before, all others as they came.

        Who does not fit ends their group, but one that is overdue and lacks memory is passed over. Only who was not yet
        in a batch here needs memory. A prompt that was overdue must fit in among the prompts a second time.
        """
        batch: list[Request] = []
        chosen: set[Request] = set()
        num_tokens = 0

        def add(group: Iterable[Request], *, passes_over: bool = False, counts_again: bool = False) -> None:
            nonlocal num_tokens
            for request in group:
                if request in chosen and not counts_again:
                    continue
                if batch and (num_tokens + request.size > MAX_BATCH_TOKENS or len(batch) == MAX_BATCH_TASKS):
                    return
                if request in chosen:
                    continue
                needed = self._needed(request)
                if needed and self.num_taken + needed > ROOM:
                    if passes_over:
                        continue
                    return
                self.num_taken += needed
                num_tokens += request.size
                batch.append(request)
                chosen.add(request)

        add(self._overdue(), passes_over=True)
        add(self._prompts, counts_again=True)
        for group in (self._thrown_out, self._batch, self.present):
            add(group)
        self._leave_out(chosen)
        self._prompts = [request for request in self._prompts if request not in chosen]
        was_there = {*self._batch}
        stay = [request for request in self._batch if request in chosen]
        self._batch = stay + [request for request in batch if request not in was_there]

    def _overdue(self) -> list[Request]:
        """Who waits, up to the first that was not left out so often."""
        overdue = takewhile(lambda task: task.num_left_out >= MAX_LEFT_OUT, self._pending)
        return [task.request for task in overdue]

    def _leave_out(self, chosen: set[Request]) -> None:
        """Who was thrown out waits again before counts grow; then who was chosen waits no more."""
        thrown_out = [request for request in self._batch if request not in chosen]
        self._thrown_out = [request for request in self._thrown_out if request not in chosen] + thrown_out
        for request in thrown_out:
            self._await(request, is_prompt=False)
        for request in self.present:
            if request not in chosen:
                request.num_left_out += 1
        for request in chosen:
            self._forget(request)

    @staticmethod
    def _needed(request: Request) -> int:
        """Tokens of KV that its next task takes: a sequence all of its own at its first step."""
        if not request.is_prompt_done:
            return request.prompt_memory
        return request.arrival.num_output - 1 if request.token_start_s is None else 0
