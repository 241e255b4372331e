"""What `python -m benchmarks gpu` runs. Imports no Ray, no gRPC and no HTTP client: where GPUs are they may not be."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from tandem.bench.report import json_file
from tandem.core.errors import ConfigError

if TYPE_CHECKING:
    from benchmarks.gpu.report import Figure, Report

_WRONG_USAGE = 2


def run(options: argparse.Namespace) -> int:
    """`python -m benchmarks gpu`; 2 where there is no such GPU, 1 where a model could not be measured."""
    from benchmarks.gpu import report as measuring  # imports torch
    from benchmarks.gpu.measure import find_device

    try:
        find_device(options.device)
    except ConfigError as error:
        print(f"python -m benchmarks gpu: {error.message}", file=sys.stderr)
        return _WRONG_USAGE

    def note(report: Report, figure: Figure | None) -> None:
        """Each figure as it comes: a run that is cut off has left what it had."""
        if figure is not None:
            print("  ".join(filter(None, measuring.line(figure))), file=sys.stderr, flush=True)
        if options.json is not None:
            json_file.write(options.json, report.as_json())

    report = measuring.measure(options.device, options.models, note)
    print(measuring.heading(report))
    print(measuring.table(report.figures))
    for name, why in report.failed.items():
        print(f"python -m benchmarks gpu: {name} could not be measured: {why}", file=sys.stderr)
    return 1 if report.failed else 0
