"""The requests of one HTTP request, one for each of its prompts, served side by side."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from router.lifecycle.context import RouterContext
from router.lifecycle.delta_buffer import DeltaBuffer
from router.lifecycle.serve import serve_request
from router.observe.trace import Trace
from router.request.events import BrokenOff, Event
from router.request.mailbox import Mailbox
from router.request.request import Delta, Request, Usage
from tandem.core.errors import CancelledError, DrainingError, InternalError, TandemError
from tandem.core.identity import Role
from tandem.core.logging import bound

_log = logging.getLogger(__name__)


class PromptGroup:
    """Starts the requests, passes on what happens to the client, and closes the buffer when all have ended."""

    def __init__(
        self,
        requests: Sequence[Request],
        context: RouterContext,
        deltas: DeltaBuffer,
        *,
        kind: str,
        taken_s: tuple[float, float],
        parent: Mapping[str, str],
    ) -> None:
        """Admission let each request in: a request tells it when it no longer waits, the group when it has ended.

        Args:
            kind: what was asked for, for people: "chat" or "completion".
            taken_s: when the router came to it, and when the body had come.
            parent: `traceparent` and `tracestate` of the HTTP request, where it has them.
        """
        self.requests = requests
        self.deltas = deltas
        self.usages: list[Usage] = []
        #: For each prompt the role that computes it, once a worker has said so.
        self.prompts_at = [""] * len(requests)
        self._context = context
        self._entered_s = context.clock.now()
        self._traces = [_trace(request, kind, taken_s, self._entered_s, parent) for request in requests]
        for trace in self._traces:
            context.recorder.begin(trace)
        self._inboxes: list[Mailbox[Event]] = [Mailbox() for _ in requests]
        self._task: asyncio.Task[None] | None = None
        self._is_answered = False
        self._is_ended = False  # whether all were told to end

    def start(self) -> None:
        self._task = asyncio.create_task(self._serve_all(), name="prompt-group")

    def answered(self) -> None:
        """The answer has been written as far as it ever will be. Requests that still go on are recorded as they end."""
        now_s = self._context.clock.now()
        self._is_answered = True
        self._context.recorder.end((t.request_id for t in self._traces if t.outcome), now_s)

    def client_gone(self, why: str) -> None:
        """Every request that still goes on is cancelled."""
        self._end_all(CancelledError, f"cancelled: {why}")

    def break_off(self, why: str) -> None:
        """Every request that still goes on ends with an error that makes the client try again."""
        self._end_all(DrainingError, why)

    def _end_all(self, kind: type[TandemError], message: str) -> None:
        if self._is_ended:  # each that ends by it comes here too
            return
        self._is_ended = True
        for request, inbox in zip(self.requests, self._inboxes, strict=True):
            inbox.put(BrokenOff(kind(message, request_id=request.request_id)))

    async def _serve_all(self) -> None:
        errors: list[TandemError] = []
        results = await asyncio.gather(*(self._serve_one(n, errors) for n in range(len(self.requests))))
        self.usages = [usage for usage in results if usage is not None]
        self.deltas.error = errors[0] if errors else None
        self.deltas.close()

    async def _serve_one(self, number: int, errors: list[TandemError]) -> Usage | None:
        request, deltas, admission = self.requests[number], self.deltas, self._context.admission
        has_token = False

        def emit(delta: Delta) -> None:
            nonlocal has_token
            if not has_token:
                has_token = True
                admission.first_token(self._age_s())
            deltas.put((number, delta))

        def on_prompt(role: Role) -> None:
            self.prompts_at[number] = role

        with bound(wire_id=request.request_id):
            try:
                trace = self._traces[number]
                return await serve_request(request, self._context, self._inboxes[number], emit, on_prompt, trace)
            except TandemError as error:
                errors.append(error)
            except Exception:  # noqa: BLE001 - the last border: logged here, and typed for the client
                _log.exception("unforeseen error in a request")
                errors.append(InternalError("an unforeseen error; the log has it under this request id"))
            finally:
                admission.end(self._age_s(), request.num_choices)
                if self._is_answered:  # nobody waited for its end
                    self._context.recorder.end([request.request_id], self._context.clock.now())
        # There is one answer: it fails as a whole.
        self.client_gone("another prompt of the same request failed")
        return None

    def _age_s(self) -> float:
        """Seconds since admission let it in."""
        return self._context.clock.now() - self._entered_s


def _trace(
    request: Request, kind: str, taken_s: tuple[float, float], ready_s: float, parent: Mapping[str, str]
) -> Trace:
    begun_s, read_s = taken_s
    return Trace(
        request_id=request.request_id,
        client_id=request.request_id.rpartition("#")[0],
        arrived_s=request.arrived_s,
        num_prompt_tokens=len(request.prompt_ids),
        num_choices=request.num_choices,
        kind=kind,
        begun_s=begun_s,
        read_s=read_s,
        ready_s=ready_s,
        parent=parent,
    )
