"""Random checkpoints that servers are compared on, made once and kept in the cache."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from tandem.bench.load.workload import plain_vocabulary
from tandem.core.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem"
#: The model of the comparison, unless another is named: a Llama of 82 million parameters.
MODEL_OPTIONS = {
    "arch": "llama", "hidden": 768, "layers": 12, "heads": 12, "kv-heads": 4, "intermediate": 2048, "vocab": 8192,
    "max-positions": 4096,
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A checkpoint, and what prompts are drawn from."""

    directory: Path
    vocabulary: Sequence[int]

    @classmethod
    def of(cls, directory: Path) -> Model:
        """Raises `ConfigError` where it has no tokenizer."""
        return cls(directory, plain_vocabulary(Tokenizer.from_dir(directory)))

    @classmethod
    def random(cls, console: Console, name: str, options: Mapping[str, Any], dtype: str) -> Model:
        """Made at first use, of `options` of `tools/make_random_model.py` but the type."""
        wanted = options if dtype == "float32" else {**options, "dtype": dtype}
        return cls.of(made_model(console, name, wanted))


def made_model(console: Console, name: str, wanted: Mapping[str, Any]) -> Path:
    """A random model in the cache, made there by now; its name changes with what it is made of.

    Args:
        wanted: options of `tools/make_random_model.py`.
    """
    options = hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()
    target = CACHE / "models" / f"random-{name}-{options[:12]}"
    if target.is_dir():
        return target
    console.print(f"making the model {target}", highlight=False, soft_wrap=True)
    # Under another name until it is whole.
    new = target.with_name(f"{target.name}.new-{os.getpid()}")
    new.parent.mkdir(parents=True, exist_ok=True)
    given = [text for name, value in wanted.items() for text in (f"--{name}", str(value))]
    subprocess.run(
        [sys.executable, str(ROOT / "tools/make_random_model.py"), str(new), *given],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    new.rename(target)
    return target
