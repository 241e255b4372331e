"""All stories of one HTTP request, one for each of its prompts, told at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from router.lifecycle.delta_buffer import Outlet
from router.lifecycle.in_flight import House, tell
from router.request.events import ClientGone, Event, RouterLeaves
from router.request.mailbox import Mailbox
from router.request.request import Delta, Request, Usage
from tandem.core.errors import InternalError, TandemError
from tandem.core.logging import bound, get_logger

log = get_logger(__name__)


class Telling:
    """Starts the stories, passes on what happens to the client, and closes the outlet when all have ended."""

    def __init__(self, requests: Sequence[Request], house: House, outlet: Outlet) -> None:
        """Each request was let in by admission; its story says when it waits no more, and this when it has ended."""
        self.requests = requests
        self.outlet = outlet
        self.usages: list[Usage] = []
        #: For each prompt the role that computes it, once a worker has said so.
        self.prompts_at = [""] * len(requests)
        self._house = house
        self._entered_s = house.clock.now()
        self._inboxes: list[Mailbox[Event]] = [Mailbox() for _ in requests]
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._tell_all(), name="telling")

    def client_gone(self, why: str) -> None:
        """Every story that still goes on is cancelled."""
        for inbox in self._inboxes:
            inbox.put(ClientGone(why))

    def break_off(self, why: str) -> None:
        """Every story that still goes on ends with an error that makes the client try again."""
        for inbox in self._inboxes:
            inbox.put(RouterLeaves(why))

    async def _tell_all(self) -> None:
        errors: list[TandemError] = []
        results = await asyncio.gather(*(self._tell_one(n, errors) for n in range(len(self.requests))))
        self.usages = [usage for usage in results if usage is not None]
        self.outlet.close(errors[0] if errors else None)

    async def _tell_one(self, number: int, errors: list[TandemError]) -> Usage | None:
        request, outlet, admission = self.requests[number], self.outlet, self._house.admission
        has_token = False

        def emit(delta: Delta) -> None:
            nonlocal has_token
            if not has_token:
                has_token = True
                admission.first_token(self._age_s())
            outlet.put(number, delta)

        def on_prompt(role: str) -> None:
            self.prompts_at[number] = role

        with bound(wire_id=request.request_id):
            try:
                return await tell(request, self._house, self._inboxes[number], emit, on_prompt)
            except TandemError as error:
                errors.append(error)
            except Exception:  # the last border: logged here, typed for the client
                log.exception("unforeseen error")
                errors.append(InternalError("an unforeseen error; the log has it under this request id"))
            finally:
                admission.end(self._age_s(), request.num_choices)
        # The answer is one: it fails as a whole.
        self.client_gone("another prompt of the same request failed")
        return None

    def _age_s(self) -> float:
        """Seconds since admission let it in."""
        return self._house.clock.now() - self._entered_s
