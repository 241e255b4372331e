"""`python -m benchmarks parts`: from its options to a table and a file."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import tempfile
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.in_loop import in_loop
from benchmarks.parts import figures as parts
from benchmarks.parts.figures import Figure
from benchmarks.parts.file import PartsFile
from benchmarks.parts.handoff import HandoffSizes, measure_handoffs
from benchmarks.parts.placement import PlacementSizes, measure_placement
from benchmarks.parts.router import RouterSizes, measure_streaming, measure_ttft
from benchmarks.parts.routers import NUM_ROUTERS, measure_sharing
from benchmarks.parts.serve import ServeSizes, measure_serve
from tandem.bench.machine import machine
from tandem.bench.other_load import QUIET_CORES, OtherLoad
from tandem.core.config import EMBEDDED_MODEL
from tandem.core.errors import ConfigError, TandemError
from tandem.core.model_path import resolve_model

_FILE_WIDTH = 120  # of tables that go to no terminal
_TRANSPORTS = {"ucx": "nixl_cu12", "nccl": "torch"}  # by the package that each needs; the first is the default
_QUIET_S = 2.0  # in which others' use of the cores is measured
_RANDOM_CONTEXT = 4096  # tokens of the model that is made where none is given


@dataclass(frozen=True)
class PartSizes:
    """How much is asked of each part."""

    handoff: HandoffSizes = field(default_factory=HandoffSizes)
    router: RouterSizes = field(default_factory=RouterSizes)
    placement: PlacementSizes = field(default_factory=PlacementSizes)
    serve: ServeSizes = field(default_factory=ServeSizes)
    num_streaming_rounds: int = 3


@dataclass(frozen=True)
class _Setting:
    """What the measurements of one command share."""

    directory: Path
    model: Path | None
    transport: str
    sizes: PartSizes
    tell: Callable[[str], None]

    def model_dir(self) -> Path:
        """The model of the handoffs; made where none was given, once."""
        if self.model is not None:
            return self.model
        target = self.directory / "random"
        if not target.exists():
            from benchmarks.kernels.measure import DEFAULT_MODEL  # imports torch
            from tandem.engine.random_model import save

            self.tell("making a random model")
            save(dataclasses.replace(DEFAULT_MODEL, max_positions=_RANDOM_CONTEXT), target)
        return target


# --- what is measured together ----------------------------------------------------------------------------------------


async def _handoffs(setting: _Setting, wanted: frozenset[str]) -> list[Figure]:
    sizes, figures = setting.sizes.handoff, []
    transfers, admissions = await measure_handoffs(
        setting.directory,
        setting.model_dir(),
        setting.transport,
        sizes,
        setting.tell,
        with_transfers=bool(wanted & {"exposed", "bandwidth"}),
        with_admissions="admission" in wanted,
    )
    if transfers is not None:
        figures += [parts.exposed_figure(transfers, sizes.prompt), parts.bandwidth_figure(transfers, sizes.prompt)]
    if admissions is not None:
        figures.append(parts.admission_figure(admissions, sizes.num_running))
    return figures


async def _ttft(setting: _Setting, _: frozenset[str]) -> list[Figure]:
    sizes = setting.sizes.router
    setting.tell(f"{sizes.num_ttft} requests, one at a time")
    measured = await measure_ttft(setting.directory, resolve_model(EMBEDDED_MODEL), sizes)
    return [parts.ttft_figure(measured, sizes.prompt_chars)]


async def _streaming(setting: _Setting, _: frozenset[str]) -> list[Figure]:
    sizes, num_rounds = setting.sizes.router, setting.sizes.num_streaming_rounds
    setting.tell(f"{num_rounds} times {sizes.num_streams} streams")
    rounds = await measure_streaming(setting.directory, resolve_model(EMBEDDED_MODEL), sizes, num_rounds)
    return [parts.streaming_figure(rounds, sizes.num_streams, sizes.num_tokens)]


async def _sharing(setting: _Setting, _: frozenset[str]) -> list[Figure]:
    sizes, num_rounds = setting.sizes.router, setting.sizes.num_streaming_rounds
    measured = {}
    for num in NUM_ROUTERS:
        setting.tell(f"{num_rounds} times {sizes.num_streams} streams at {num} routers")
        model_dir = resolve_model(EMBEDDED_MODEL)
        measured[num] = await measure_sharing(setting.directory, model_dir, sizes, num_rounds, num)
    return [parts.sharing_figure(measured, sizes.num_streams, sizes.num_tokens)]


async def _placement(setting: _Setting, _: frozenset[str]) -> list[Figure]:
    sizes = setting.sizes.placement
    setting.tell(f"{sizes.num_rounds} requests and statuses with each number of workers")
    return [parts.placement_figure(measure_placement(sizes))]


async def _serve(setting: _Setting, wanted: frozenset[str]) -> list[Figure]:
    sizes, figures = setting.sizes.serve, []
    start_s, idle = await measure_serve(
        setting.directory,
        EMBEDDED_MODEL,
        sizes,
        setting.tell,
        with_starts="startup" in wanted,
        with_idle="idle" in wanted,
    )
    if idle is not None:
        figures.append(parts.idle_figure(idle, sizes.idle_s))
    if start_s is not None:
        figures.append(parts.startup_figure(start_s))
    return figures


#: What is measured together, in this order: figures, and how. The second argument names the wanted ones.
_GROUPS: tuple[tuple[frozenset[str], Callable[[_Setting, frozenset[str]], Awaitable[list[Figure]]]], ...] = (
    (frozenset({"placement"}), _placement),
    (frozenset({"streaming"}), _streaming),
    (frozenset({"routers"}), _sharing),
    (frozenset({"ttft"}), _ttft),
    (frozenset({"exposed", "bandwidth", "admission"}), _handoffs),
    (frozenset({"idle", "startup"}), _serve),
)


# --- the command ------------------------------------------------------------------------------------------------------


def run(
    model: Path | None,
    transport: str | None,
    only: Collection[str] | None,
    json: Path | None,
    *,
    sizes: PartSizes | None = None,
) -> None:
    """Measure, print the table, and write it to `json`: also what was found before a failure or a Ctrl-C.

    Args:
        model: a checkpoint for the handoffs; without one a random Llama of 82 M weights is made.
        transport: `ucx` or `nccl`; without one the first that is installed.
        only: names of parts; without them, all.

    Raises:
        ConfigError: the transport is not installed, or the file holds other figures that would be lost.
        TandemError: a process ended, or said what went wrong.
    """
    wanted = frozenset(only or (part.name for part in parts.PARTS))
    chosen = transport or default_transport()
    if importlib.util.find_spec(_TRANSPORTS[chosen]) is None:
        raise ConfigError(f"the transport {chosen} needs {_TRANSPORTS[chosen]}, which is not installed here")
    name = "random, 82 M weights" if model is None else model.resolve().name
    file = PartsFile.open(json, name, chosen, wanted) if json is not None else None
    found = _Found()
    try:
        with tempfile.TemporaryDirectory(prefix="tandem-parts-") as directory:
            setting = _Setting(Path(directory), model, chosen, sizes or PartSizes(), _say_progress)
            in_loop(lambda: _measure(setting, wanted, found))
    finally:
        figures = [found.figures[part.name] for part in parts.PARTS if part.name in found.figures]
        if figures:
            _say(figures, chosen, found.other_cores)
            if file is not None:
                file.write(figures, found.other_cores)


def default_transport() -> str:
    """The best that is installed."""
    return next(name for name, package in _TRANSPORTS.items() if importlib.util.find_spec(package) is not None)


@dataclass
class _Found:
    """What was measured so far: figures by the names of their parts, and how many cores others used just before."""

    figures: dict[str, Figure] = field(default_factory=dict)
    other_cores: float = 0.0


async def _measure(setting: _Setting, wanted: frozenset[str], found: _Found) -> None:
    """Fill `found` with the wanted figures, as they come."""
    load = OtherLoad()
    setting.tell("is the machine quiet?")
    await asyncio.sleep(_QUIET_S)
    found.other_cores = load.cores()
    groups = [(names, measure) for names, measure in _GROUPS if names & wanted]
    for number, (names, measure) in enumerate(groups, 1):
        title = f"{number}/{len(groups)} {', '.join(sorted(names & wanted))}"
        try:
            figures = await measure(dataclasses.replace(setting, tell=_prefixed(title, setting.tell)), wanted)
        except TandemError as error:
            raise TandemError(f"{title}: {error.message}") from error
        found.figures |= {figure.part.name: figure for figure in figures if figure.part.name in wanted}


def _prefixed(title: str, tell: Callable[[str], None]) -> Callable[[str], None]:
    return lambda text: tell(f"{title}: {text}")


# --- to the terminal and the file -------------------------------------------------------------------------------------


def _say_progress(text: str) -> None:
    Console(stderr=True).print(text, highlight=False, markup=False, soft_wrap=True)


def _say(figures: Sequence[Figure], transport: str, other_cores: float) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_WIDTH)
    console.print(f"{machine()['cpu']}; handoffs by {transport}", highlight=False, markup=False)
    console.print()
    console.print(figure_table(figures))
    if other_cores > QUIET_CORES:
        console.print(f"note: others used {other_cores:.2f} cores before: no figure is reliable", markup=False)


def figure_table(figures: Sequence[Figure]) -> Table:
    """A row for each figure, and one for each thing that it was made of."""
    table = Table("", "value", "goal", "p50", "p99", "n", box=None)
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    for figure in figures:
        unit = figure.part.unit
        goal = parts.shown_goal(figure.goal, unit) + ("" if figure.goal.is_reached_by(figure.value) else " missed")
        table.add_row(figure.part.title, parts.shown(figure.value, unit), goal, "", "", "")
        for name, found in figure.samples.items():
            p50, p99 = (parts.shown(value, parts.sample_unit(name)) for value in (found.p50, found.p99))
            table.add_row(f"    {name}", "", "", p50, p99, f"{found.num:,}")
        for name, fact in figure.facts.items():
            table.add_row(f"    {name}", parts.shown_fact(fact), "", "", "", "")
    return table
