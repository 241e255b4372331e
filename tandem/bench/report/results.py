"""The JSON file of a measurement: written by `tandem bench` and, of a simulated one, by `tandem sim run`; read by
`plot`, `compare` and whoever wants."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.bench.load.drive import Load
from tandem.bench.load.records import Objective
from tandem.bench.machine import machine, now, versions
from tandem.bench.report.json_file import read_format
from tandem.bench.report.summary import Summary, summarise
from tandem.bench.session import Session, Shape

FORMAT = "tandem-bench/1"


@dataclasses.dataclass(frozen=True)
class Run:
    """One stretch of load and its figures."""

    shape: Shape
    load: Load
    summary: Summary

    @classmethod
    def of(cls, shape: Shape, load: Load, slo: Objective | None) -> Run:
        return cls(shape, load, summarise(load.records, load.duration_s, slo))

    def as_json(self, *, with_records: bool) -> dict[str, Any]:
        """Plain data; times in seconds."""
        records = [dataclasses.asdict(record) for record in self.load.records] if with_records else None
        return {
            "shape": {"name": self.shape.name, **dataclasses.asdict(self.shape)},
            "is_partial": self.load.is_partial,
            "num_unsent": self.load.num_unsent,
            "figures": dataclasses.asdict(self.summary),
            "generator": {"cpu_s": self.load.cpu_s, "cpu_share": self.load.cpu_share},
            "digests": [record.digest for record in self.load.records],
            **({"records": records} if records is not None else {}),
        }


def document(
    kind: str, session: Session, options: dict[str, Any], runs: Sequence[Run], *, with_records: bool, **more: Any
) -> dict[str, Any]:
    """Everything of one measurement as plain data; `options` are those of the command."""
    served = session.served
    return {
        "format": FORMAT,
        "kind": kind,
        "date": now(),
        "was_interrupted": session.was_interrupted,
        "server": {"url": session.target.url, "model": served.name, "max_model_len": served.max_model_len}
        | {"name": served.server},
        "options": options,
        "cut": None if session.cut is None else dataclasses.asdict(session.cut),
        "machine": machine(),
        "versions": versions(),
        **more,
        "runs": [run.as_json(with_records=with_records) for run in runs],
    }


def read(path: Path) -> dict[str, Any]:
    """Raises `ConfigError` where it is no file of ours."""
    return read_format(path, FORMAT, "`tandem bench` or `tandem sim run`")


def is_simulated(content: dict[str, Any]) -> bool:
    """`tandem sim run` wrote it."""
    return bool(content.get("is_simulated"))


def title(content: dict[str, Any], path: Path) -> str:
    """What to call a file's server in tables and plots: `--label`, else the file's name."""
    return str(content["options"].get("label") or path.stem)
