"""NIXL comes in a build for each CUDA. Whether that of torch's CUDA, which pages on GPUs need, is installed."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_CUDA = re.compile(r"^cuda\b[^=\n]*= *['\"](\d+)\.", re.MULTILINE)
_EXTRAS = {13: "cuda13"}  # of Tandem's: what installs the build for a CUDA; that for 12 comes with it


@dataclass(frozen=True)
class MissingBuild:
    """The build of NIXL that is not there, and by which extra of Tandem's it comes."""

    cuda: int
    package: str
    extra: str


def missing_build(cuda: int | None, is_installed: Callable[[str], bool]) -> MissingBuild | None:
    """What is missing beside a torch for this CUDA (`None`: for none), where an extra of Tandem's brings it.

    `is_installed` tells of a module.
    """
    if cuda is None or cuda not in _EXTRAS or is_installed(f"nixl_cu{cuda}"):
        return None
    return MissingBuild(cuda, f"nixl-cu{cuda}", _EXTRAS[cuda])


def torch_cuda() -> int | None:
    """The major version of the CUDA that the installed torch is built for, without importing torch; `None`: none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    return cuda_of(text)


def cuda_of(version_file: str) -> int | None:
    """The major version that torch's `version.py` names; `None`: it is a build for CPUs, or for other devices."""
    found = _CUDA.search(version_file)
    return int(found[1]) if found else None
