"""Token ids of one text in memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

#: uint32. The garbage collector, which stops a process in the midst of a step, walks lists and sets, not arrays: it has
#: no more to do for a long context than for a short one. A slice costs its own length alone.
TokenIds = array


def token_ids(ids: Iterable[int] = ()) -> TokenIds[int]:
    """A copy of `ids` that grows in place.

    Raises:
        OverflowError: an id is below 0, or is none of 32 bits.
    """
    made = array("I", ids)
    # Of a list it has room for a sixteenth more then; else it would be copied once more when its next token comes, in a
    # step.
    made.append(0)
    made.pop()
    return made
