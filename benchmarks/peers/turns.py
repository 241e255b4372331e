"""Several servers under the same loads, in turn: what is measured in which order, and the file that keeps it. Pure
but for that file.

    repetition 1:  server 1: loads A B C D   server 2: loads A B C D   …
    repetition 2:  server 2: loads A B C D   …   server 1: loads A B C D

Servers alternate, so that a machine that grows slower in the course of an hour does so for all of them; each repetition
begins with another one, so that none is always the first. Every load of every repetition has prompts of its own, the
same for all servers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from tandem.bench.goodput import GoodputSearch
from tandem.bench.load.records import Slo
from tandem.bench.rate_search import RateSearch
from tandem.bench.repetitions import rotated
from tandem.bench.report import json_file
from tandem.core.errors import ConfigError

FORMAT = "tandem-side-by-side/1"

_SEEDS_PER_REPETITION = 100


@dataclass(frozen=True)
class Load:
    """A closed loop of `concurrency` clients, or a Poisson process of `rate` requests a second; lengths in tokens."""

    name: str
    num_input: int
    num_output: int
    concurrency: int
    num_requests: int = 64
    rate: float | None = None

    def settings(self) -> dict[str, float]:
        """All but the name, and what it does not have."""
        return {name: value for name, value in asdict(self).items() if name != "name" and value is not None}


#: Long prompts; both phases alike; long answers; one client alone; more clients; longer prompts.
LOADS = (
    Load("A", 512, 64, 6),
    Load("B", 128, 128, 8),
    Load("C", 64, 256, 8),
    Load("D", 128, 128, 1, num_requests=16),
    Load("E", 256, 96, 12, num_requests=36),
    Load("F", 1024, 32, 4, num_requests=16),
)


#: What is asked one by one to see whether all give the same tokens.
ANSWERS = Load("answers", 128, 64, 1, num_requests=8)


class SearchedLoad(Protocol):
    """A load whose highest rate is searched.

    Attributes:
        told: TTFT and TPOT in seconds that a server is told to keep, if it can be told; `None`: it is told nothing.
    """

    @property
    def told(self) -> tuple[float, float] | None: ...

    def settings(self) -> dict[str, Any]:
        """What must be equal for two searches to compare, as JSON reads it back."""

    def search(self) -> GoodputSearch:
        """One that has not begun."""


@dataclass(frozen=True)
class GoodputLoad:
    """A trace's lengths at Poisson rates, and the SLO to keep there; times in seconds."""

    trace: str  # its file's name
    num_requests: int = 300
    scale_lengths: float = 0.125
    slo_ttft_s: float = 3.0
    slo_tpot_s: float = 0.05
    share: float = 0.9
    start_rate: float = 2.0  # requests a second; where the search begins

    @property
    def told(self) -> None:
        """Nothing: servers have their defaults, as for the loads beside it."""

    def settings(self) -> dict[str, Any]:
        return asdict(self)

    def search(self) -> GoodputSearch:
        return GoodputSearch(Slo(self.slo_ttft_s, self.slo_tpot_s), self.share, RateSearch(self.start_rate))


@dataclass(frozen=True)
class Plan:
    """What is asked for."""

    contestants: tuple[str, ...]
    loads: tuple[Load, ...]
    num_repetitions: int = 3
    seed: int = 1
    num_warm_up: int = 4
    goodput: SearchedLoad | None = None
    has_answers: bool = True  # also ask some prompts one by one, and keep the texts

    def searched(self, turn: Turn) -> SearchedLoad | None:
        """The load whose rate the turn searches; `None`: it does not."""
        return self.goodput if turn.has_goodput else None


@dataclass(frozen=True)
class Turn:
    """What one server is started for. `repetition` counts from 1."""

    repetition: int
    contestant: str
    loads: tuple[Load, ...] = ()
    has_goodput: bool = False


#: Contestant, load and repetition of a measured run.
RunKey = tuple[str, str, int]


def turns(plan: Plan, done: Collection[RunKey] = (), done_goodput: Collection[str] = ()) -> Iterator[Turn]:
    """What is left to do, in order: all repetitions, then the searches for goodput, one for each contestant."""
    for repetition in range(1, plan.num_repetitions + 1):
        for contestant in rotated(plan.contestants, repetition - 1):
            left = tuple(load for load in plan.loads if (contestant, load.name, repetition) not in done)
            if left:
                yield Turn(repetition, contestant, left)
    if plan.goodput is not None:
        for contestant in plan.contestants:
            if contestant not in done_goodput:
                yield Turn(1, contestant, has_goodput=True)


def seed_of(plan: Plan, load_name: str, repetition: int) -> int:
    """Differs between loads too: two with one length would else find each other's prompts in the prefix cache."""
    names = [load.name for load in (LOADS if load_name in {load.name for load in LOADS} else plan.loads)]
    return plan.seed + _SEEDS_PER_REPETITION * repetition + names.index(load_name)


def chosen_loads(names: Iterable[str], num_requests: int | None = None) -> tuple[Load, ...]:
    """The loads of these names in their own order, with another number of requests where one is given.

    Raises:
        ConfigError: there is no load of such a name.
    """
    wanted = list(names)
    unknown = [name for name in wanted if name not in {load.name for load in LOADS}]
    if unknown:
        raise ConfigError(
            f"no load is called {', '.join(unknown)}; there are {', '.join(load.name for load in LOADS)}", key="--loads"
        )
    loads = [load for load in LOADS if load.name in wanted]
    return tuple(loads if num_requests is None else [replace(load, num_requests=num_requests) for load in loads])


@dataclass
class Measured:
    """The file of a comparison. It is written after each run, so an interrupted comparison keeps what it has."""

    path: Path
    settings: dict[str, Any]  # what must be equal for runs to stand in one file
    runs: list[dict[str, Any]] = field(default_factory=list)
    goodput: list[dict[str, Any]] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)
    num_outdated: int = 0  # runs and searches that `opened` left out
    option: str = "--json"  # of the command, which says where the file lies

    @classmethod
    def opened(
        cls,
        path: Path,
        settings: dict[str, Any],
        *,
        digests: Mapping[str, str] | None = None,
        is_fresh: bool = False,
        option: str = "--json",
    ) -> Measured:
        """What `path` holds already, unless all is to be measured anew. Errors name `option`.

        `digests` are of the code that contestants have now: what one of these did with other code, or with code that
        was not recorded, counts as not measured. It is gone from the file when something new is written.

        Raises:
            ConfigError: it is no such file, or was measured with other settings.
        """
        if is_fresh or not path.exists():
            return cls(path, settings, option=option)
        content = read(path, option)
        held = content["settings"]
        differences = list(_differences(held, settings))
        if differences:
            raise ConfigError(
                f"{path} was measured otherwise ({'; '.join(differences)}): name another place with {option}, or "
                "measure all anew with --fresh",
                key=option,
            )
        lists = [content[name] for name in ("runs", "goodput", "answers")]
        runs, goodput, answers = ([item for item in items if is_current(item, digests or {})] for items in lists)
        num_outdated = len(lists[0]) + len(lists[1]) - len(runs) - len(goodput)
        return cls(path, _merged(held, settings), runs, goodput, answers, num_outdated, option)

    @property
    def done(self) -> set[RunKey]:
        return {(run["contestant"], run["load"], run["repetition"]) for run in self.runs}

    @property
    def done_goodput(self) -> set[str]:
        return {search["contestant"] for search in self.goodput}

    @property
    def done_answers(self) -> set[str]:
        return {item["contestant"] for item in self.answers}

    def add_run(self, run: dict[str, Any]) -> None:
        self.runs.append(run)
        self.write()

    def add_goodput(self, search: dict[str, Any]) -> None:
        self.goodput.append(search)
        self.write()

    def add_answers(self, answers: dict[str, Any]) -> None:
        self.answers.append(answers)
        self.write()

    def write(self) -> None:
        """The old file stays whole until the new one is."""
        new = self.path.with_name(self.path.name + ".new")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            new.write_text(self._encoded())
            os.replace(new, self.path)
        except OSError as error:
            raise ConfigError(f"the results cannot be written: {error}", key=self.option) from error

    def _encoded(self) -> str:
        """JSON with one line for each run, so that a version control system shows which runs are new."""
        head = json.dumps({"format": FORMAT, "settings": self.settings}, indent=1)
        lists = {"runs": self.runs, "goodput": self.goodput, "answers": self.answers}
        return head[:-2] + "".join(f',\n "{name}": {_lines(items)}' for name, items in lists.items()) + "\n}\n"


def read(path: Path, option: str = "--json") -> dict[str, Any]:
    """Raises `ConfigError`, which names `option`, where it is no file of a comparison."""
    return json_file.read_format(path, FORMAT, "a comparison", key=option)


def is_current(item: dict[str, Any], digests: Mapping[str, str]) -> bool:
    """Whether a run is of the code that its contestant has now; others than those of `digests` have no code."""
    contestant = item["contestant"]
    return contestant not in digests or (item.get("code") or {}).get("digest") == digests[contestant]


def _lines(items: Sequence[dict[str, Any]]) -> str:
    return "[" + ",".join(f"\n  {json.dumps(item)}" for item in items) + ("\n ]" if items else "]")


def _differences(held: Any, wanted: Any, path: str = "") -> Iterator[str]:
    """Where both say something and it is not the same."""
    if isinstance(held, dict) and isinstance(wanted, dict):
        for name in held.keys() & wanted.keys():
            yield from _differences(held[name], wanted[name], f"{path}.{name}".lstrip("."))
    elif held != wanted:
        yield f"{path} is {held} there and {wanted} here"


def _merged(held: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """All that either says; they agree where both do."""
    both = {**held, **wanted}
    for name in held.keys() & wanted.keys():
        if isinstance(held[name], dict):
            both[name] = _merged(held[name], wanted[name])
    return both
