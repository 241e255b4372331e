"""One attempt at a request: its two workers, what they are told, and what their events mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router import wire
from router.cluster import Pair
from router.events import (
    Admitted,
    AttemptFailed,
    Event,
    Granted,
    HandoffDone,
    PrefillEnded,
    PrefillStarted,
    WorkerLost,
)
from router.request import TokenGiven
from router.worker_key import WorkerKey
from tandem.core.errors import DrainingError, InternalError, OverloadedError, TandemError
from tandem.core.logging import get_logger
from tandem.core.states import RequestState

if TYPE_CHECKING:
    from router.story import Story

log = get_logger(__name__)


class AttemptOver(Exception):
    """The attempt failed at `worker`; both workers have been told to drop it."""

    def __init__(self, error: TandemError, worker: WorkerKey, suspects: tuple[WorkerKey, ...] = ()) -> None:
        super().__init__(error.message)
        self.error = error
        self.worker = worker
        # Whom the next attempt avoids: of a failure between two workers either may be the cause.
        self.suspects = suspects or (worker,)


class Attempt:
    """Everything between choosing a pair and the end of the attempt."""

    def __init__(self, story: Story, pair: Pair) -> None:
        self._story = story
        self._prefill = pair.prefill
        self._decode = pair.decode
        self._number = story.journal.attempt
        self._is_admitted = False
        # Whether prefill has nothing left to give: the pages are decode's, or there was nothing to hand off.
        self._is_prefill_done = False
        # Whether each choice was ended by a worker, which then holds nothing of it any more.
        # An earlier attempt's end is in the journal that this attempt's workers get.
        self._ended_at_worker = [choice.is_finished for choice in story.journal.choices]

    async def run(self) -> None:
        """Begin, and follow the events until every choice has ended.

        Raises:
            AttemptOver: a worker failed, refused or was lost.
            CancelledError: the client or the deadline ended the request.
        """
        why = "the router gave up"
        self._begin()
        try:
            while not self._story.journal.is_finished:
                self._handle(await self._story.next_event())
            why = "every choice has ended"
        except (AttemptOver, TandemError) as error:
            why = str(error)
            raise
        finally:
            self._close(why)

    def _begin(self) -> None:
        """Both workers start at once: prefill computes while decode makes room."""
        story, request = self._story, self._story.request
        decode_info = self._decode.info
        if decode_info is None:  # never: placement takes greeted workers only
            raise InternalError(f"{self._decode.key} was chosen before its hello", request_id=request.request_id)
        for session in (self._prefill, self._decode):
            session.hold(request.request_id, story.inbox, len(request.prompt_ids))
        self._decode.send(wire.reserve(request, story.journal))
        self._prefill.send(wire.start_prefill(request, story.journal, decode_info))
        log.debug("attempt begun", attempt=self._number, prefill=str(self._prefill.key), decode=str(self._decode.key))

    def _handle(self, event: Event) -> None:
        if isinstance(event, WorkerLost):
            self._worker_lost(event)
            return
        if getattr(event, "attempt", self._number) != self._number:
            if isinstance(event, TokenGiven):
                self._story.take_token(event)  # the journal counts it as stale
            return
        match event:
            case TokenGiven():
                self._token(event)
            case Granted():
                self._granted(event)
            case PrefillStarted():
                self._story.reach(RequestState.PREFILLING)
            case Admitted():
                self._is_admitted = True
                self._prefill.note_computed(self._story.request.request_id)
                self._story.reach(RequestState.DECODING)
            case HandoffDone() | PrefillEnded():
                self._prefill_done(event)
            case AttemptFailed():
                self._failed(event)
            case _:  # WorkersChanged, WaitOver: of a wait that is over
                pass

    def _token(self, token: TokenGiven) -> None:
        story = self._story
        if token.finish_reason is not None and token.choice < len(self._ended_at_worker):
            self._ended_at_worker[token.choice] = True
        story.take_token(token)
        if story.life.state in (RequestState.QUEUED, RequestState.PREFILLING) and not story.journal.is_finished:
            has_all = story.journal.has_first_tokens
            story.reach(RequestState.HANDOFF if has_all else RequestState.PREFILLING)
            if has_all:
                self._prefill.note_computed(story.request.request_id)

    def _granted(self, granted: Granted) -> None:
        request_id = self._story.request.request_id
        self._decode.note_granted(request_id)
        self._prefill.send(wire.attach_grant(request_id, granted))

    def _prefill_done(self, event: HandoffDone | PrefillEnded) -> None:
        story = self._story
        story.num_cached_tokens = event.num_cached_tokens
        missing = isinstance(event, PrefillEnded) or not story.journal.has_first_tokens
        if missing:  # its tokens come before this on the same stream, and they would have ended the request
            error = InternalError(f"{self._prefill.key} ended without the first token of each choice")
            raise AttemptOver(error, self._prefill.key)
        self._is_prefill_done = True
        self._prefill.release(story.request.request_id)

    def _failed(self, failed: AttemptFailed) -> None:
        if failed.worker == self._prefill.key and self._is_admitted and self._story.journal.has_first_tokens:
            # Commit is the truth: decode has the pages, whatever prefill makes of the acknowledgement.
            log.warning("prefill failed after decode's admission", worker=str(failed.worker), error=str(failed.error))
            self._is_prefill_done = True
            self._prefill.release(self._story.request.request_id)
            return
        is_between_both = not isinstance(failed.error, (DrainingError, OverloadedError))
        suspects = (self._prefill.key, self._decode.key) if is_between_both else ()
        raise AttemptOver(failed.error, failed.worker, suspects)

    def _worker_lost(self, lost: WorkerLost) -> None:
        if lost.worker == self._decode.key:
            raise AttemptOver(lost.error, lost.worker)
        if lost.worker == self._prefill.key:
            is_needed = not (self._is_admitted or self._is_prefill_done)
            if is_needed or not self._story.journal.has_first_tokens:
                raise AttemptOver(lost.error, lost.worker)

    def _close(self, why: str) -> None:
        """Leave nothing behind: whatever a worker may still hold of this attempt, it is told to drop."""
        request_id = self._story.request.request_id
        ended_by_itself = all(self._ended_at_worker)
        if not ended_by_itself and not self._is_prefill_done:
            self._prefill.cancel(request_id, self._number, why)
        if not ended_by_itself or not self._is_admitted:
            self._decode.cancel(request_id, self._number, why)
        for session in (self._prefill, self._decode):
            session.release(request_id)
