"""What `python -m benchmarks gpu` runs. Imports no Ray, no gRPC and no HTTP client: where GPUs are they may not be."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from tandem.bench.report import json_file
from tandem.core.errors import ConfigError

_WRONG_USAGE = 2


def run(options: argparse.Namespace) -> int:
    """`python -m benchmarks gpu`; 2 where there is no such GPU."""
    from benchmarks.gpu import report as measuring  # imports torch
    from benchmarks.gpu.measure import find_device

    try:
        find_device(options.device)
    except ConfigError as error:
        print(f"python -m benchmarks gpu: {error.message}", file=sys.stderr)
        return _WRONG_USAGE
    report = measuring.measure(options.device, options.models)
    console = Console()
    console.print(measuring.heading(report), highlight=False)
    console.print(measuring.table(report))
    if options.json is not None:
        json_file.write(options.json, report.as_json())
    return 0
