"""What the files of goodput say: how long requests take alone, and by whose measure. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.peers.servers import CONTESTANTS, TANDEM_COLOCATED

Content = dict[str, Any]  # of a point's file

_DIGITS = 4
#: By whose measure all are judged, the first that there is: vLLM's, which no change of Tandem moves.
_REFERENCES = (
    *(contestant.name for contestant in CONTESTANTS if contestant.is_peer),
    *(contestant.name for contestant in CONTESTANTS if not contestant.is_peer),
    TANDEM_COLOCATED.name,
)


def reference(contestants: Iterable[str]) -> str | None:
    """Of these, the one whose requests alone say what all servers are to keep; `None` of none."""
    found = set(contestants)
    return next((name for name in _REFERENCES if name in found), None)


def alone_ttft_s(content: Content, contestant: str) -> tuple[tuple[int, float], ...]:
    """Median TTFT of a request alone by its prompt's length, as a file of requests alone has it; lengths rise.

    A load in which a request failed does not count.
    """
    loads = content["settings"]["loads"]
    return tuple(
        sorted(
            (int(loads[run["load"]]["num_input"]), round(float(run["figures"]["ttft_s"]["p50"]), _DIGITS))
            for run in content["runs"]
            if run["contestant"] == contestant and not run["figures"]["num_failed"]
        )
    )
