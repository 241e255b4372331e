"""The virtual environment of these tests as test hosts get it: at ~/tandem/venv, the path of the cluster files.

Packages are 2 GB, so they are not installed again: hosts see those directories, each with a layer of its own to write.
"""

from __future__ import annotations

import os
import re
import site
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VENV = "/home/tandem/tandem/venv"


@dataclass(frozen=True)
class Environment:
    """Where Python and the packages of the running interpreter are."""

    base: Path
    prefix: Path
    sites: tuple[Path, ...]

    @classmethod
    def running(cls) -> Environment:
        prefix = Path(sys.prefix)
        own = site.getsitepackages([str(prefix)])[0]
        # Packages may also come from directories that a .pth file names.
        others = [entry for entry in sys.path if Path(entry).name == "site-packages" and entry != own]
        return cls(Path(sys.base_prefix), prefix, tuple(Path(each) for each in (own, *others)))

    @property
    def inside(self) -> str:
        """Of packages, below the environment's directory."""
        return os.path.relpath(self.sites[0], self.prefix)

    def write_seed(self, target: Path) -> None:
        """All of a virtual environment but its packages; its scripts name `VENV`. Tandem's own is not among them."""
        scripts = target / "bin"
        scripts.mkdir(parents=True)
        (target / "pyvenv.cfg").write_text((self.prefix / "pyvenv.cfg").read_text())
        interpreter = Path(sys.executable).resolve()
        for name in ("python", "python3", f"python3.{sys.version_info.minor}"):
            (scripts / name).symlink_to(interpreter)
        for script in (self.prefix / "bin").iterdir():
            if script.name != "tandem" and (text := _of_python(script)):
                (scripts / script.name).write_text(f"#!{VENV}/bin/python\n{text}")
                (scripts / script.name).chmod(0o755)


def _of_python(script: Path) -> str:
    """What stands behind the first line of a script that an environment's Python runs; of any other file nothing."""
    with script.open("rb") as file:
        if not re.fullmatch(rb"#!/.*/bin/python[\d.]*\n", file.readline(1000)):
            return ""
        return file.read().decode()
