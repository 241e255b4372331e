"""`python -m benchmarks studies`: simulate them, and leave what was found."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.code import Code
from benchmarks.studies.catalogue import STUDIES
from benchmarks.studies.page import COMMAND, FORMAT, page
from benchmarks.studies.study import Study
from tandem.bench.machine import now
from tandem.bench.report import json_file


def run(json: Path | None, names: Sequence[str], studies: Sequence[Study] = STUDIES) -> None:
    """Print the page of the studies with these names, and write each to `json`, where the others stay. No name: all.

    Raises `ConfigError` where it cannot be written, or is no such file.
    """
    err = Console(stderr=True)
    held = json_file.read_format(json, FORMAT, COMMAND)["studies"] if json is not None and json.exists() else {}
    content: dict[str, Any] = {"format": FORMAT, "date": now(), "code": Code.of().as_json(), "studies": {}}
    found = content["studies"]
    for study in studies:
        if not names or study.name in names:
            began_s = time.process_time()
            found[study.name] = list(study.measure())
            err.print(f"{study.name}: {time.process_time() - began_s:.0f} s of a core", highlight=False)
            if json is not None:
                json_file.write(json, {**content, "studies": {**held, **found}})
    Console(soft_wrap=True).print(page(content, json or Path("what was found")).strip(), highlight=False, markup=False)
