"""A progress bar on standard error, where that is a terminal; one line at the end of each run where it is not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tandem.bench.load.records import RequestRecord
from tandem.bench.session import Watcher

_REFRESH_HZ = 2  # each costs a millisecond of a core that the server may want


@contextlib.contextmanager
def shown(title: str, total: int, *, console: Console, is_wanted: bool = True) -> Iterator[Watcher]:
    """Inside, the watcher that is given moves the bar."""
    num_ended = num_failed = 0
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[failed]}"),
        TimeElapsedColumn(),
    )  # fmt: skip
    is_shown = is_wanted and console.is_terminal
    with Progress(*columns, console=console, refresh_per_second=_REFRESH_HZ, disable=not is_shown) as progress:
        task = progress.add_task(title, total=total, failed="")

        def watch(record: RequestRecord) -> bool:
            nonlocal num_ended, num_failed
            num_ended += 1
            num_failed += not record.is_good
            progress.update(task, advance=1, failed=f"{num_failed} failed" if num_failed else "")
            return True

        yield watch
    if is_wanted and not is_shown:
        counted = f"{num_ended} requests" + (f", {num_failed} failed" if num_failed else "")
        console.print(f"{title}: {counted}", highlight=False, markup=False)
