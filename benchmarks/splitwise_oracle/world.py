"""A run of Splitwise's simulator: arrivals, machines, transfers between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.splitwise_oracle.machine import ROOM, TOKEN_BYTES, Ends, Machine
from benchmarks.splitwise_oracle.policies import Baseline, MixedPool
from benchmarks.splitwise_oracle.request import Request
from benchmarks.splitwise_oracle.runs import BOTH, Arrival, RoleChange, Run, Times
from benchmarks.splitwise_oracle.times import Splitwise
from tandem.core.errors import ConfigError
from tandem.sim.kernel import Kernel

#: Of a link between two machines; transfers do not share it.
LINK_BYTES_PER_S = 200 * 2**30
#: After which a transfer looks for memory again.
RETRY_S = 1.0
#: Calls of the kernel for each request before a run counts as one that does not end; the busiest have some 50.
MOST_CALLS = 20_000


@dataclass(frozen=True)
class Outcome:
    """Of a run: each request's times, in the order of the trace, `None` where one did not end; changes of roles."""

    times: list[Times | None]
    role_changes: list[RoleChange]


OnEnd = Callable[[Arrival, Times], object]


def simulate(run: Run, profile: Mapping[str, Splitwise], on_end: OnEnd = lambda *_: None) -> Outcome:
    """`on_end`: called as each request ends; what it raises ends the run.

    Raises:
        ConfigError: the profile lacks the hardware of a machine.
    """
    return _World(run, profile, on_end).run()


class _World:
    def __init__(self, run: Run, profile: Mapping[str, Splitwise], on_end: OnEnd) -> None:
        self._kernel, self._on_end = Kernel(start_s=0.0), on_end
        for machine in run.machines:
            if machine.hardware not in profile:
                raise ConfigError(f"the profile has no {machine.hardware}, on which {run.name} runs")
        ends = Ends(self._prompt_ended, self._request_ended)
        self._machines = [Machine(spec.number, profile[spec.hardware], self._kernel, ends) for spec in run.machines]
        homes = [machine.home for machine in run.machines]
        if set(homes) == {BOTH}:
            self._policy: Baseline | MixedPool = Baseline(self._machines)
        elif BOTH not in homes:
            self._policy = MixedPool(self._machines, homes, lambda: self._kernel.now_s)
        else:
            raise ConfigError(f"{run.name}: some machines do both phases and some do one")
        self._requests = [Request(arrival) for arrival in run.arrivals]

    def run(self) -> Outcome:
        for request in self._requests:
            self._kernel.at(request.arrival.time_s, lambda request=request: self._arrived(request))  # type: ignore[misc]
        self._kernel.run(MOST_CALLS * len(self._requests))
        return Outcome([_times(request, request.arrival) for request in self._requests], self._policy.role_changes)

    def _arrived(self, request: Request) -> None:
        for_prompt, for_token = self._policy.choose(request)
        request.prompt_on, request.token_on = for_prompt.number, for_token.number
        for_prompt.num_pending += request.num_prompt
        for_token.num_pending += 1
        for_token.num_reserved += request.memory
        if not request.stays:
            for_prompt.num_reserved += request.prompt_memory
        for_prompt.add_prompt(request)

    def _prompt_ended(self, machine: Machine, request: Request) -> None:
        machine.num_pending -= request.num_prompt
        if not request.stays:
            self._send(request)
            self._policy.emptied(machine)

    def _send(self, request: Request) -> None:
        """Memory at the destination comes first; the source keeps its own until the end."""
        destination = self._machines[request.token_on]
        if destination.num_taken + request.prompt_memory > ROOM:
            self._kernel.after(RETRY_S, lambda: self._send(request))
            return
        destination.num_taken += request.prompt_memory
        took_s = request.num_prompt * TOKEN_BYTES / LINK_BYTES_PER_S
        self._kernel.after(took_s, lambda: self._sent(request))

    def _sent(self, request: Request) -> None:
        source, destination = self._machines[request.prompt_on], self._machines[request.token_on]
        source.num_reserved -= request.prompt_memory
        source.release(request.prompt_memory)
        self._policy.emptied(source)
        destination.add_sequence(request)

    def _request_ended(self, machine: Machine, request: Request) -> None:
        machine.num_pending -= 1
        machine.num_reserved -= request.memory
        self._policy.emptied(machine)
        times = _times(request, request.arrival)
        assert times is not None
        self._on_end(request.arrival, times)


def _times(request: Request, arrival: Arrival) -> Times | None:
    if request.prompt_end_s is None or request.end_s is None:
        return None
    ttft_s, e2e_s = request.prompt_end_s - arrival.time_s, request.end_s - arrival.time_s
    return Times(ttft_s, (e2e_s - ttft_s) / arrival.num_output, e2e_s)
