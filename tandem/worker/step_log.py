"""What each step of a worker computed and how long it took, in a file: for `tandem sim calibrate`."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from tandem.core.step_times import Terms
from tandem.core.windows import NO_WINDOWS, Windows
from tandem.worker.batch import Batch

_log = logging.getLogger(__name__)

COLUMNS = ("num_tokens", "num_rows", "num_read", "num_pairs", "seconds", "began_s")
"""Those of `Terms`, the time from one step's planning to the end of its booking, and when that began by the monotonic
clock, which all workers of a host share. Where steps are planned ahead, a row has the planning of the next step, and
the telling of the last one, in place of its own."""

#: Before the columns, where layers have windows: these, as `model` of a scenario has them.
MODEL = "# model: "

SUFFIX = ".steps.csv"
# Two files of so much are kept: a step takes some 50 bytes.
_MOST_BYTES = 16 << 20
_AT_ONCE = 128  # steps between two writes


class StepLog:
    """The newest steps of one worker: `<directory>/<worker>.steps.csv`, and those before in `….1.steps.csv`.

    Used by one thread. A file that cannot be written ends the log, not the worker.

    Args:
        windows: with which the terms are counted; where there are some, the files begin with them, as a scenario has
            them.

    Raises:
        OSError: the directory cannot be made, or not be written to.
    """

    def __init__(
        self, directory: Path, worker_id: str, windows: Windows = NO_WINDOWS, *, most_bytes: int = _MOST_BYTES
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.windows = windows
        self.path = directory / f"{worker_id}{SUFFIX}"
        self._older = directory / f"{worker_id}.1{SUFFIX}"
        self._most_bytes = most_bytes
        self._lines: list[str] = []
        self._older.unlink(missing_ok=True)  # of an earlier life, perhaps with another model
        self._begin()

    def _begin(self) -> None:
        # Without a buffer of its own, which closing would try to write once more.
        self._file = self.path.open("wb", buffering=0)
        head = f"{MODEL}{json.dumps(model_keys(self.windows))}\n" if self.windows.window else ""
        self._num_bytes = self._file.write(f"{head}{','.join(COLUMNS)}\n".encode())

    def note(self, terms: Terms, seconds: float, began_s: float) -> None:
        """One step."""
        self._lines.append(
            f"{terms.num_tokens},{terms.num_rows},{terms.num_read:.12g},{terms.num_pairs:.1f},"
            f"{seconds:.7f},{began_s:.7f}\n"
        )
        if len(self._lines) >= _AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Write what is noted."""
        text, self._lines = "".join(self._lines).encode(), []
        if not text or self._file.closed:
            return
        try:
            if self._num_bytes + len(text) > self._most_bytes:
                self._file.close()
                self.path.replace(self._older)
                self._begin()
            self._num_bytes += self._file.write(text)
        except OSError as error:
            _log.warning("no more steps are written to %s: %s", self.path, error)
            self._file.close()

    def close(self) -> None:
        self.flush()
        self._file.close()


def model_keys(windows: Windows) -> dict[str, int]:
    """What `model` of a scenario says of them."""
    num_layers = windows.num_windowed + windows.num_full
    return {"layers": num_layers, "window": windows.window, "full_layers": windows.num_full}


def terms_of(batch: Batch, windows: Windows = NO_WINDOWS) -> Terms:
    """Of a step that is planned and not yet booked, of a model with these windows."""
    return Terms.of(((item.start, item.num_tokens, item.sequence.is_decode) for item in batch.items), windows)
