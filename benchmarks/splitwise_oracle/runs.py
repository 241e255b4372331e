"""Reference runs in a folder: what went in (trace, machines) and what came out (of each request, and changes of roles).

Laid out as `summary.csv` (run, trace), `instances.csv.gz` (run, instance, hardware, home), `roles.csv.gz` (run, time,
instance, from, to), `traces/NAME.csv.gz`, `results/RUN.csv.gz`. Other columns are passed over.
"""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tandem.core.errors import ConfigError

_T = TypeVar("_T")
Row = dict[str, str]

#: The home of a machine of the baseline, where each does both phases.
BOTH = "both"
HOMES = (BOTH, "prompt", "token")


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a trace: sizes in tokens, the first generated token among `num_output`."""

    number: int
    time_s: float
    num_prompt: int
    num_output: int


@dataclass(frozen=True, slots=True)
class MachineSpec:
    """A machine: its number in the run, its kind, and the pool where it is at home."""

    number: int
    hardware: str
    home: str


@dataclass(frozen=True, slots=True)
class RoleChange:
    """A machine left one pool for another."""

    time_s: float
    machine: int
    before: str
    after: str

    @property
    def what(self) -> tuple[int, str, str]:
        return self.machine, self.before, self.after


@dataclass(frozen=True, slots=True)
class Times:
    """Of a request, in seconds: to the end of its prompt, on average each token, in all.

    `tbt_s` is what comes after the prompt, through *all* tokens, the first one too.
    """

    ttft_s: float
    tbt_s: float
    e2e_s: float


@dataclass(frozen=True)
class Run:
    """A reference run. `times` are in the order of `arrivals`, `role_changes` in that of their times."""

    name: str
    arrivals: list[Arrival]
    machines: list[MachineSpec]
    times: list[Times]
    role_changes: list[RoleChange]


def read_runs(directory: Path, only: list[str]) -> Iterator[Run]:
    """The runs of `summary.csv` one after the other, or those of them that are named. Raises `ConfigError`."""
    runs = _read(directory / "summary.csv", lambda row: (row["run"], row["trace"]))
    names = [name for name, _ in runs]
    if unknown := [name for name in only if name not in names]:
        raise ConfigError(f"{directory / 'summary.csv'} has no run {unknown[0]}; it has {', '.join(names)}")
    if not runs:
        raise ConfigError(f"{directory / 'summary.csv'} has no run")
    machines = _by_run(directory / "instances.csv.gz", _machine)
    changes = _by_run(directory / "roles.csv.gz", _role_change)
    for name, trace in runs:
        if not only or name in only:
            yield _run(directory, name, trace, machines.get(name, []), changes.get(name, []))


def _run(directory: Path, name: str, trace: str, machines: list[MachineSpec], changes: list[RoleChange]) -> Run:
    arrivals = _read(directory / "traces" / f"{trace}.csv.gz", _arrival)
    results = directory / "results" / f"{name}.csv.gz"
    by_number = dict(_read(results, lambda row: (int(row["request_id"]), _result(row))))
    numbers = [arrival.number for arrival in arrivals]
    if sorted(by_number) != sorted(numbers):
        raise ConfigError(f"{results} and the trace {trace} have not the same requests")
    if not numbers:
        raise ConfigError(f"the trace {trace} has no request")
    if small := next((arrival for arrival in arrivals if arrival.num_output < 2 or arrival.num_prompt < 1), None):
        raise ConfigError(f"request {small.number} of {trace}: one token of prompt and two of output are the least")
    machines.sort(key=lambda machine: machine.number)
    if [machine.number for machine in machines] != list(range(len(machines))) or not machines:
        raise ConfigError(f"instances.csv.gz: the machines of {name} are not numbered from 0")
    changes.sort(key=lambda change: change.time_s)
    return Run(name, arrivals, machines, [by_number[number] for number in numbers], changes)


def _arrival(row: Row) -> Arrival:
    time_s, prompt, output = float(row["arrival_timestamp"]), int(row["prompt_size"]), int(row["token_size"])
    return Arrival(int(row["request_id"]), time_s, prompt, output)


def _result(row: Row) -> Times:
    return Times(float(row["ttft"]), float(row["tbt"]), float(row["e2e"]))


def _machine(row: Row) -> MachineSpec:
    if row["home"] not in HOMES:
        raise ValueError(f"home {row['home']!r} is none of {', '.join(HOMES)}")
    return MachineSpec(int(row["instance"]), row["hardware"], row["home"])


def _role_change(row: Row) -> RoleChange:
    return RoleChange(float(row["time"]), int(row["instance"]), row["from"], row["to"])


def _by_run(path: Path, parse: Callable[[Row], _T]) -> dict[str, list[_T]]:
    found: dict[str, list[_T]] = {}
    for run, parsed in _read(path, lambda row: (row["run"], parse(row))):
        found.setdefault(run, []).append(parsed)
    return found


def _read(path: Path, parse: Callable[[Row], _T]) -> list[_T]:
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
        return [parse(row) for row in csv.DictReader(text.splitlines())]
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ConfigError(f"{path} is no whole gzip file: {error}") from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except KeyError as error:
        raise ConfigError(f"{path} has no column {error}") from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path}: {error}") from error
