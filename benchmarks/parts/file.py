"""The file of `benchmarks parts`: figures of one machine, one code and one model, of one run or of several."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.code import Code
from benchmarks.parts.figures import FORMAT, PARTS, Figure
from tandem.bench.machine import machine, now, versions
from tandem.bench.report import json_file
from tandem.core.errors import ConfigError

#: What must be equal for figures to stand in one file; of the code the digest.
_SHARED = ("machine", "versions", "model", "transport")


@dataclass(frozen=True)
class PartsFile:
    """Where figures go, beside those that are there already of parts that were not measured now.

    Attributes:
        settings: what the figures of this run share, as plain data.
        earlier: what the file holds, if it is of the same settings.
    """

    path: Path
    settings: dict[str, Any]
    earlier: dict[str, Any] | None

    @classmethod
    def open(cls, path: Path, model: str, transport: str, wanted: Collection[str]) -> PartsFile:
        """Before anything is measured.

        Raises:
            ConfigError: the file is none of ours, or holds figures of other settings that `wanted` would not replace.
        """
        settings = {
            "format": FORMAT,
            "machine": machine(),
            "versions": versions(),
            "code": Code.of().as_json(),
            "model": model,
            "transport": transport,
        }
        earlier = None
        if path.exists():
            earlier = json_file.read_format(path, FORMAT, "`python -m benchmarks parts`", key="--json")
        if earlier is None or not (differing := _differing(earlier, settings)):
            return cls(path, settings, earlier)
        if kept := [figure["name"] for figure in earlier["figures"] if figure["name"] not in wanted]:
            how = f"{path} holds {', '.join(kept)} of another {' and '.join(differing)}"
            raise ConfigError(f"{how}: measure all parts, or name another file", key="--json")
        return cls(path, settings, None)

    def write(self, figures: Sequence[Figure], other_cores: float) -> None:
        """Seconds, bytes, cores and shares. `other_cores`: what others used just before; of several runs the most."""
        found = {figure.part.name: figure.as_json() for figure in figures}
        if self.earlier is not None:
            found = {figure["name"]: figure for figure in self.earlier["figures"]} | found
            other_cores = max(other_cores, self.earlier["other_cores"])
        in_order = [found[part.name] for part in PARTS if part.name in found]
        json_file.write(self.path, {**self.settings, "date": now(), "other_cores": other_cores, "figures": in_order})


def _differing(earlier: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    names = [name for name in _SHARED if earlier[name] != settings[name]]
    return names + (["code"] if earlier["code"]["digest"] != settings["code"]["digest"] else [])
