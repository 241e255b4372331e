"""`tandem bench parts`: from its options to a table and a file."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import signal
import tempfile
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from tandem.bench import parts, results
from tandem.bench.machine import OtherLoad, machine, now, versions
from tandem.bench.parts import Figure
from tandem.bench.parts_handoff import HandoffSizes, measure_handoffs
from tandem.bench.parts_router import RouterSizes, measure_streaming, measure_ttft
from tandem.bench.parts_serve import ServeSizes, measure_serve
from tandem.bench.side_by_side_code import Code
from tandem.core.config import EMBEDDED_MODEL
from tandem.core.errors import ConfigError
from tandem.core.model_path import resolve_model

_FILE_WIDTH = 120  # of tables that go to no terminal
_TRANSPORTS = {"ucx": "nixl_cu12", "nccl": "torch"}  # by the package that each needs; the first is the default
_QUIET_S = 2.0  # in which others' use of the cores is measured
_MOST_OTHER_LOAD = 0.1  # of a core
_RANDOM_CONTEXT = 4096  # tokens of the model that is made where none is given


@dataclass(frozen=True)
class PartSizes:
    """How much is asked of each part."""

    handoff: HandoffSizes = field(default_factory=HandoffSizes)
    router: RouterSizes = field(default_factory=RouterSizes)
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
            from tandem.bench.kernels import DEFAULT_MODEL  # imports torch
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


async def _serve(setting: _Setting, _: frozenset[str]) -> list[Figure]:
    sizes = setting.sizes.serve
    measured = await measure_serve(setting.directory, EMBEDDED_MODEL, sizes, setting.tell)
    return [parts.idle_figure(measured, sizes.idle_s), parts.startup_figure(measured)]


#: What is measured together, in this order: figures, and how. The second argument names the wanted ones.
_GROUPS: tuple[tuple[frozenset[str], Callable[[_Setting, frozenset[str]], Awaitable[list[Figure]]]], ...] = (
    (frozenset({"streaming"}), _streaming),
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
    """Measure, print the table, and write it to `json`.

    Args:
        model: a checkpoint for the handoffs; without one a random Llama of 82 M weights is made.
        transport: `ucx` or `nccl`; without one the first that is installed.
        only: names of parts; without them, all.

    Raises:
        ConfigError: the transport is not installed.
        TandemError: a process ended, or said what went wrong.
    """
    wanted = frozenset(only or (part.name for part in parts.PARTS))
    chosen = transport or default_transport()
    if importlib.util.find_spec(_TRANSPORTS[chosen]) is None:
        raise ConfigError(f"the transport {chosen} needs {_TRANSPORTS[chosen]}, which is not installed here")
    with tempfile.TemporaryDirectory(prefix="tandem-parts-") as directory:
        figures, other_load = _in_loop(
            _measure(_Setting(Path(directory), model, chosen, sizes or PartSizes(), _say_progress), wanted)
        )
    _say(figures, chosen, other_load)
    if json is not None:
        name = "random, 82 M weights" if model is None else model.resolve().name
        results.write(json, document(figures, name, chosen, other_load))


def default_transport() -> str:
    """The best that is installed."""
    return next(name for name, package in _TRANSPORTS.items() if importlib.util.find_spec(package) is not None)


async def _measure(setting: _Setting, wanted: frozenset[str]) -> tuple[list[Figure], float]:
    """The wanted figures, in the order of `parts.PARTS`, and how many cores others used just before."""
    # What ends us must end what we started: as Ctrl-C does.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, signal.raise_signal, signal.SIGINT)
    load = OtherLoad()
    setting.tell("is the machine quiet?")
    await asyncio.sleep(_QUIET_S)
    other_load = load.cores()
    groups = [(names, measure) for names, measure in _GROUPS if names & wanted]
    found: dict[str, Figure] = {}
    for number, (names, measure) in enumerate(groups, 1):
        title = f"{number}/{len(groups)} {', '.join(sorted(names & wanted))}"
        for figure in await measure(dataclasses.replace(setting, tell=_prefixed(title, setting.tell)), wanted):
            found[figure.part.name] = figure
    return [found[part.name] for part in parts.PARTS if part.name in wanted], other_load


def _prefixed(title: str, tell: Callable[[str], None]) -> Callable[[str], None]:
    return lambda text: tell(f"{title}: {text}")


def _in_loop(work: Any) -> Any:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


# --- to the terminal and the file -------------------------------------------------------------------------------------


def _say_progress(text: str) -> None:
    Console(stderr=True).print(text, highlight=False, markup=False, soft_wrap=True)


def _say(figures: Sequence[Figure], transport: str, other_load: float) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_WIDTH)
    console.print(f"{machine()['cpu']}; handoffs by {transport}", highlight=False, markup=False)
    console.print()
    console.print(figure_table(figures))
    if other_load > _MOST_OTHER_LOAD:
        console.print(f"note: others used {other_load:.1f} cores before: no figure is reliable", markup=False)


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


def document(figures: Sequence[Figure], model: str, transport: str, other_load: float) -> dict[str, Any]:
    """Everything as plain data: seconds, bytes, cores and shares."""
    return {
        "format": parts.FORMAT,
        "date": now(),
        "machine": machine(),
        "versions": versions(),
        "code": Code.of().as_json(),
        "model": model,
        "transport": transport,
        "other_cores": other_load,
        "figures": [figure.as_json() for figure in figures],
    }
