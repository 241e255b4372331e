"""What a reader makes of errors that it did not foresee: a call is lost, not the answer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

_log = logging.getLogger(__name__)
_Read = TypeVar("_Read")

_told: set[str] = set()  # the kinds of errors that are in the log


def read_or_none(read: Callable[[], _Read]) -> _Read | None:
    """What `read` makes of a model's text; `None`: nothing, so it stays text.

    Models write anything, and schemas of tools come from clients: more may be wrong with either than a parser knows of.
    Of what is no `ValueError` the first of each kind is logged: clients could fill the log with others.
    """
    try:
        return read()
    except ValueError:
        return None
    except Exception as error:  # noqa: BLE001 - logged; the answer goes on as text
        kind = type(error).__name__
        if kind not in _told:
            _told.add(kind)
            _log.exception("a call of a tool could not be read and is told as text; no more of %s is logged", kind)
        return None
