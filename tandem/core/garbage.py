"""Python's garbage collector in processes that serve: it stops them while it goes through all containers there are."""

from __future__ import annotations

import gc

#: Young collections of middling ones before all that lives is gone through; Python's own default is 10. What is only
#: found then are cycles that lived long, which serving makes few of.
_RARELY = 1000


def settle() -> None:
    """Call this once a process is ready: what it holds by then stays, and is not gone through again.

    That are the libraries and, in a worker, the model and its pages: hundreds of thousands of objects, and a tenth of a
    second or more in the midst of a step. Called again, as by a worker that has changed its role, it first frees what
    was given up since.
    """
    young, middling, _ = gc.get_threshold()
    gc.set_threshold(young, middling, _RARELY)
    gc.unfreeze()
    gc.collect()
    gc.freeze()
