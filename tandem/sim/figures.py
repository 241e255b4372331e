"""What the supervisor of a simulation hears of the load, as that of a cluster does from routers and workers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from router.lifecycle.turns import Turns
from tandem.cluster.supervisor.demand import Asked, Held, Sample, Worked, added
from tandem.core.identity import Role, WorkerKey
from tandem.sim.load import Arrival
from tandem.sim.machine import Machine
from tandem.sim.outcome import Outcome

# In the order of the fields of `Asked`.
_NUM_COUNTS = 9
_REQUESTS, _PROMPT_TOKENS, _ENDED, _ENDED_TOKENS, _OUTPUT_TOKENS, _FIRST, _FIRST_LATE, _TIMED, _TIMED_LATE = range(
    _NUM_COUNTS
)


@dataclass(slots=True)
class Figures:
    """Counts since the beginning, and since it was last asked."""

    num_open: int = 0  # requests that have not ended, those that will come among them
    num_kept: int = 0  # requests that ended, and kept both of their targets
    _now: list[float] = field(default_factory=lambda: [0.0] * _NUM_COUNTS, init=False)
    _before: Asked = field(default_factory=Asked, init=False)
    _worked: dict[WorkerKey, Worked] = field(default_factory=dict, init=False)

    def came(self, arrival: Arrival, computed_share: float) -> None:
        """`computed_share`: of prompts lately, what was in no cache."""
        self._now[_REQUESTS] += 1
        self._now[_PROMPT_TOKENS] += arrival.num_input * computed_share

    def gave(self, outcome: Outcome) -> None:
        """A token."""
        self._now[_OUTPUT_TOKENS] += 1
        if outcome.num_tokens == 1:
            self._now[_FIRST] += 1
            self._now[_FIRST_LATE] += outcome.ttft_s > outcome.targets.ttft_s

    def gave_more(self, num_tokens: int) -> None:
        """Tokens, none of them a first one."""
        self._now[_OUTPUT_TOKENS] += num_tokens

    def ended(self, outcome: Outcome) -> None:
        self.num_open -= 1
        self.num_kept += outcome.kept
        self._now[_ENDED] += 1
        self._now[_ENDED_TOKENS] += outcome.num_tokens
        if outcome.tpot_s is not None:
            self._now[_TIMED] += 1
            self._now[_TIMED_LATE] += outcome.tpot_s > outcome.targets.tpot_s

    def failed(self) -> None:
        """A request."""
        self.num_open -= 1

    def sample(self, prefill: Iterable[Machine], decode: Iterable[Machine], turns: Sequence[Turns]) -> Sample:
        """Since the last call. `turns`: who waits, in each router."""
        asked, self._before = added(now := Asked(*self._now), self._before, -1), now
        machines = {Role.PREFILL: list(prefill), Role.DECODE: list(decode)}
        worked = {role: [self._since(machine) for machine in some] for role, some in machines.items()}
        queued = sum(c.num_to_compute for machine in machines[Role.PREFILL] for c in machine.choices)
        pools = [machine.pool for machine in machines[Role.DECODE]]
        kv = sum((each.used + each.reserved) * pool.page_size for pool in pools for each in [pool.counts()])
        num_held = num_waiting = 0  # requests with pages at decode, and those that wait for some
        for machine in machines[Role.DECODE]:
            num_held += len(machine.scheduler.running) + machine.ledger.num_to_come
            num_waiting += len(machine.scheduler.waiting) + len(machine.ledger.waiting)
        num_waiting += sum(each.num_held_for_decode for each in turns)
        held = Held(
            waiting_tokens=queued + sum(each.num_waiting_tokens_to_compute for each in turns),
            kv_tokens=kv,
            waiting_kv_tokens=num_waiting * kv / num_held if num_held else 0.0,
            kv_capacity=sum(pool.num_pages * pool.page_size for pool in pools) / len(pools) if pools else 0,
            max_num_seqs=machines[Role.DECODE][0].scheduler.limits.max_num_seqs if pools else 0,
        )
        return Sample(asked, worked, held)

    def _since(self, machine: Machine) -> Worked:
        work, role = machine.work, machine.role
        rows = work.num_rows if role is Role.DECODE else 0
        now = Worked(work.num_steps, work.busy_s, work.num_tokens - rows, rows)
        before = self._worked.get(machine.key, Worked())
        self._worked[machine.key] = now
        return added(now, before, -1)
