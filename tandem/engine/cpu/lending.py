"""Threads that others lend: how many may compute at this moment. Imports no compiler."""

from __future__ import annotations

from typing import Protocol


class Lender(Protocol):
    """Lends threads that others do not need now.

    Attributes:
        wanted_back_at: address of a word that is no longer 0 when what was borrowed last is wanted back.
        offered_at: of a word that is no longer 0 when more may be borrowed than last time.
    """

    wanted_back_at: int
    offered_at: int

    def borrow(self) -> int:
        """How many threads may be used beyond one's own, until they are wanted back.

        The call also says that this worker computes: its own threads are no longer lent to others.
        """


_lender: Lender | None = None


def borrow_from(lender: Lender | None) -> None:
    """From now on kernels of this process may use threads of `lender` beyond their own."""
    global _lender
    _lender = lender


def lender_now() -> Lender | None:
    return _lender


def threads_now(own: int) -> int:
    """How many threads may compute for one that has `own`."""
    lender = _lender
    return own if lender is None else own + lender.borrow()
