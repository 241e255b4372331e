"""Of which code, when, on what machine and how quietly servers were measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from benchmarks.peers.figures import Run
from benchmarks.peers.servers import CONTESTANTS, QUANTIZED, TANDEM_COLOCATED
from tandem.bench.other_load import QUIET_CORES

TITLES = {contestant.name: contestant.title for contestant in (*CONTESTANTS, TANDEM_COLOCATED, *QUANTIZED)}
PEERS = {contestant.name for contestant in CONTESTANTS if contestant.is_peer}
#: Runs further apart are not compared: the machine may have become another.
TOGETHER = timedelta(hours=2)


def hardware_words(machine: dict[str, Any]) -> str:
    """In one line."""
    names = machine.get("instructions")
    has = f" with {', '.join(names)}" if names else ""
    return f"{machine['cpu']}{has}, {machine['num_cores']} cores, {machine['memory_gib']} GiB, {machine['system']}"


def codes_of(contestant: str, items: Sequence[Run]) -> list[str]:
    """Each code with which it was measured."""
    return sorted({code_words(item.get("code")) for item in items if item["contestant"] == contestant})


def code_words(code: dict[str, Any] | None) -> str:
    """`None`: nothing is known of it."""
    if code is None:
        return "code that was not recorded"
    where = f"commit {code['commit'][:12]}" if code["commit"] else "no commit"
    return f"{where}{' with changes' if code['is_dirty'] else ''} (sources {code['digest']})"


def reservations(items: Sequence[Run]) -> list[str]:
    """What speaks against the figures: code that was not one, and a machine that was not quiet."""
    ours = [item for item in items if item["contestant"] not in PEERS]
    lines = []
    if len({(item.get("code") or {}).get("digest") for item in ours}) > 1:
        lines.append("- **Warning**: not all figures of Tandem are of the same code.")
    loud = {(item["contestant"], item.get("repetition", 0), item["other_cores"])
            for item in items if item.get("other_cores", 0.0) > QUIET_CORES}  # fmt: skip
    for contestant, repetition, cores in sorted(loud):
        when = f"repetition {repetition}" if repetition else "goodput"
        lines.append(f"- **Warning**: others used {cores:.2f} cores just before {TITLES[contestant]}, {when}.")
    if unknown := sum("other_cores" not in item for item in items):
        lines.append(
            f"- **Warning**: whether the machine was quiet was not measured for {unknown} of {len(items)} runs."
        )
    return ["", *lines] if lines else []


def listed(names: dict[str, Any]) -> str:
    """Names and values, in one line."""
    return ", ".join(f"{name} {value}" for name, value in names.items())


def are_together(first: Run, second: Run) -> bool:
    """Not too long before or after each other."""
    return abs(datetime.fromisoformat(first["date"]) - datetime.fromisoformat(second["date"])) <= TOGETHER


def hours() -> str:
    """How far apart two runs may be to be compared."""
    return f"{TOGETHER / timedelta(hours=1):g} hours"


def together(first: Mapping[int, Run], second: Mapping[int, Run]) -> dict[int, Run]:
    """Those of `first` that have a run of the same repetition in `second`, not too long before or after."""
    return {number: run for number, run in first.items() if number in second and are_together(run, second[number])}
