"""`tandem plan kv | roofline | batch | cost | size`."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from tandem.bench.report import json_file
from tandem.core.cards import find_card
from tandem.core.config_tree import read_yaml
from tandem.core.errors import ConfigError
from tandem.core.worker_types import Machine, cost_per_million
from tandem.plan.calculators import (
    Batch,
    Phase,
    Served,
    decode_terms,
    kv_room,
    largest_batch,
    phase,
    prefill_terms,
    rates,
)
from tandem.plan.calculators import (
    roofline as roofline_of,
)
from tandem.plan.files import check_before, write_files
from tandem.plan.plan_file import read_plan
from tandem.plan.report import report, said_of_windows
from tandem.plan.shapes import find_shape
from tandem.plan.size import content
from tandem.plan.size import size as size_of

_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def kv(options: argparse.Namespace) -> int:
    """Bytes of a token and of a sequence; with a card, how many sequences it has room for."""
    model, tokens = _model(options), options.tokens
    table = _table("", "")
    table.add_row("parameters", _count(model.shape.num_parameters))
    table.add_row("weights", _bytes(model.weight_bytes))
    table.add_row("KV of a token", _bytes(model.token_bytes))
    machine = _machine(options) if options.card is not None else None
    on_cpu = machine is not None and machine.card.is_cpu
    table.add_row(f"KV of {tokens:,} tokens", _bytes(model.sequence_bytes(tokens, on_cpu=on_cpu)))
    if machine is not None:
        room, most = _room(model, machine), largest_batch(model, machine, tokens).of_memory
        table.add_row(f"room on {_name(machine)}", f"{room:,} tokens: {most:,} sequences of {tokens:,}")
    elif options.cards > 1:
        raise ConfigError("--cards is how many of a card a worker has; name it with --card", key="--cards")
    _out().print(table)
    _say_of_windows(model, on_cpu=on_cpu)
    return 0


def roofline(options: argparse.Namespace) -> int:
    """Time, intensity and bound of prompts and of decode steps; for some of these there may be no room."""
    model, machine = _model(options), _machine(options)
    times = roofline_of(model, machine)
    _room(model, machine)
    table = _table("step", "ms", "tokens/s", "operations a byte", "bound by")
    for tokens in options.tokens:
        table.add_row(f"prompt of {tokens:,}", *_phase(phase(times, prefill_terms(tokens, times.windows)), tokens))
    for tokens in options.tokens:
        most = largest_batch(model, machine, tokens).of_memory
        for batch in options.batch:
            shown = _phase(phase(times, decode_terms(batch, tokens, times.windows)), batch)
            fits = "" if batch <= most else " (no room)"
            table.add_row(f"{batch:,} x {tokens:,}{fits}", *shown)
    out = _out()
    out.print(table)
    card = machine.card
    out.print(
        f"\n{_name(machine)}: from {card.ridge:,.0f} operations a byte on, computing takes longer than reading; "
        f"{machine.flops_share:.0%} of the operations and {machine.bytes_share:.0%} of the bytes a second are reached."
    )
    return 0


def batch(options: argparse.Namespace) -> int:
    """The largest batch, and what bounds it."""
    model, machine = _model(options), _machine(options)
    _room(model, machine)
    found = largest_batch(model, machine, options.tokens, options.tpot_ms / 1e3 if options.tpot_ms else None)
    table = _table("", "sequences")
    table.add_row("by KV memory", f"{found.of_memory:,}")
    if found.of_tpot is not None:
        table.add_row(f"by {options.tpot_ms:g} ms per token", f"{found.of_tpot:,}")
    table.add_row("largest batch", f"{found.most:,} (bound by {found.bound})")
    _out().print(table)
    _say_of_windows(model, on_cpu=machine.card.is_cpu)
    return 0


def cost(options: argparse.Namespace) -> int:
    """Of a million tokens, in the unit of the price."""
    model, machine = _model(options), _machine(options)
    _room(model, machine)
    price = options.price * machine.num_cards
    found = rates(model, machine, options.input, options.output, options.tpot_ms / 1e3 if options.tpot_ms else None)
    table = _table("a million tokens of", "tokens/s of a worker", "cost")
    table.add_row("prompts", f"{found.prefill:,.0f}", f"{cost_per_million(price, found.prefill):.3f}")
    of_output = f"{cost_per_million(price, found.decode):.3f}" if found.batch.most else "-"
    table.add_row(f"output, batch {found.batch.most:,}", f"{found.decode:,.0f}", of_output)
    out = _out()
    out.print(table)
    if found.batch.most:
        out.print(f"\nWorkers that are always busy; the batch is bound by {found.batch.bound}.")
    else:
        out.print(f"\nNo output: {_why_none(model, machine, options.input + options.output, found.batch)}.")
    return 0


def size(options: argparse.Namespace) -> int:
    """The search, what it found and why, and files for it."""
    plan, types = read_plan(options.file)
    if options.cluster is not None and options.out is None:
        raise ConfigError("--cluster is what --out writes anew; name a directory with --out", key="--cluster")
    json_file.check_before(options.json)
    base = read_yaml(options.cluster, "--cluster") if options.cluster is not None else {}
    if options.out is not None:
        check_before(options.out, base, plan, types)
    err, out = Console(stderr=True), _out()
    columns = SpinnerColumn(), TextColumn("{task.completed} simulations"), TimeElapsedColumn()
    with Progress(*columns, console=err, disable=not err.is_terminal, transient=True) as progress:
        task = progress.add_task("", total=None)
        found = size_of(plan, types, options.processes, lambda num: progress.update(task, completed=num))
    for part in report(plan, types, found):
        out.print(part)
    if options.json is not None:
        json_file.write(options.json, content(plan, types, found))
    if options.out is not None:
        for file in write_files(options.out, base, plan, types, found):
            out.print(f"wrote {file}")
    return 0


def _model(options: argparse.Namespace) -> Served:
    return Served(find_shape(options.model), options.weight_bits, options.kv_dtype)


def _machine(options: argparse.Namespace) -> Machine:
    return Machine(find_card(options.card), options.cards)


def _why_none(model: Served, machine: Machine, num_tokens: int, batch: Batch) -> str:
    if not batch.of_memory:
        return (
            f"{_name(machine)} has no room for the K and V of one request of {num_tokens:,} tokens; take more cards, "
            "or shorter requests"
        )
    times = roofline_of(model, machine)
    alone_s = times.seconds(decode_terms(1, num_tokens, times.windows))
    return f"a step takes {alone_s * 1e3:.3g} ms for one request alone; raise --tpot-ms, or take more cards"


def _say_of_windows(model: Served, *, on_cpu: bool) -> None:
    if model.shape.window:
        _out().print(f"\n{said_of_windows(model, on_cpu=on_cpu)}")


def _room(model: Served, machine: Machine) -> int:
    """Tokens of KV. Raises `ConfigError` where the weights alone do not fit."""
    room = kv_room(model, machine)
    if room < 1:
        raise ConfigError(
            f"{model.shape.name} has {_bytes(model.weight_bytes)} of weights, and {_name(machine)} has "
            f"{_bytes(machine.memory_bytes)} for weights and pages; take more cards, or fewer bits",
            key="--cards",
        )
    return room


def _phase(found: Phase, num_tokens: int) -> tuple[str, str, str, str]:
    return (
        f"{found.seconds * 1e3:,.2f}", f"{num_tokens / found.seconds:,.0f}", f"{found.intensity:,.1f}",
        "computing" if found.is_compute_bound else "reading",
    )  # fmt: skip


def _name(machine: Machine) -> str:
    return machine.card.name if machine.num_cards == 1 else f"{machine.num_cards} x {machine.card.name}"


def _bytes(num: float) -> str:
    for size, unit in _UNITS:
        if num >= size:
            return f"{num / size:,.1f} {unit}"
    return f"{num:,.0f} bytes"


def _count(num: int) -> str:
    return f"{num / 1e9:,.2f} billion" if num >= 1e8 else f"{num / 1e6:,.2f} million"


def _table(*columns: str) -> Table:
    table = Table(*columns, box=None, show_header=any(columns))
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _out() -> Console:
    return Console(soft_wrap=True, highlight=False)
