"""The sender driver as the runner sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait

from kvtransfer.protocol.messages import AttemptKey, FirstToken
from kvtransfer.transports.base import Transport
from prefill_worker.sender_driver import SenderDriver
from prefill_worker.sending import SealedPages

# The longest time that the runner waits, once a step, until the driver knows which prompts are computed. Where all
# pages are written, their commits go out meanwhile.
COMMIT_FIRST_S = 2e-3


class QueuedDriver:
    """Each call goes to the transfer thread, in order.

    Args:
        on_transfer: queues a call for the transfer thread; `None`: it is stopping, and nothing happens.
    """

    def __init__(
        self, driver: SenderDriver, on_transfer: Callable[[Callable[[Transport], None]], Future[None] | None]
    ) -> None:
        self._driver = driver
        self._on_transfer = on_transfer
        self._untaken: list[Future[None]] = []  # prompts of the step that has just been computed

    def computed_layers(self, layers: range, pages: tuple[int, ...], sealed: Sequence[SealedPages] = ()) -> None:
        self._on_transfer(lambda _: self._driver.computed_layers(layers, pages, sealed))

    def sealed(self, pages: Sequence[SealedPages]) -> None:
        self._on_transfer(lambda _: self._driver.sealed(pages))

    def computed(self, key: AttemptKey, first_tokens: tuple[FirstToken, ...], computed_s: float) -> None:
        taken = self._on_transfer(lambda _: self._driver.computed(key, first_tokens, computed_s))
        if taken is not None:
            self._untaken.append(taken)

    def wait_taken(self) -> None:
        # Other threads get Python's lock while this one waits. Otherwise decode would wait for all that the runner does
        # after a step.
        wait(self._untaken, COMMIT_FIRST_S)
        self._untaken.clear()

    def cancel(self, key: AttemptKey) -> None:
        self._on_transfer(lambda _: self._driver.cancel(key))
