"""Machine code that this checkout has compiled, for copies of it: each would begin by compiling for half a minute."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def put_into_folder(installed: Path) -> None:
    """Where the packages lie. It is used there only as far as it was made from the same sources."""
    for path in _kernels():
        target = installed / path.relative_to(ROOT)
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(path.read_bytes())


def put_into_wheel(wheel: Path) -> None:
    """As `put_into_folder`, where it is unpacked."""
    with zipfile.ZipFile(wheel, "a") as archive:
        for path in _kernels():
            archive.write(path, str(path.relative_to(ROOT)))


def _kernels() -> Iterator[Path]:
    return (ROOT / "tandem" / "engine").rglob("__pycache__/*.nb[ic]")
