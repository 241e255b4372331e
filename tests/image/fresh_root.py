"""A file system of its own, made of Debian's packages, and processes in it as an engine would run a container's.

Every mount belongs to a namespace of the process that made it, so nothing is left when that ends, however it ends.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

PROGRAMS = ("debootstrap", "unshare", "nsenter", "chroot", "ip")
PATH = "/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin"

# $1: the root; then pairs of what is shared with it, up to `--`; then the command. In a mount namespace of its own.
_ENTER = """
set -e
root=$1; shift
while [ "$1" != -- ]; do
    target=$root$2
    if [ -d "$1" ]; then mkdir -p "$target"; else mkdir -p "${target%/*}"; touch "$target"; fi
    mount --bind "$1" "$target"
    shift 2
done
shift
exec chroot "$@"
"""

ADDRESS = "10.77.0.1"
"""Of a container with a network of its own."""

# $1: the root; $2: the size of its shared memory; $3: its address, where it has a network of its own, to which nobody
# else belongs. First process of a PID namespace: it reaps, and ends with its input.
_FIRST = """
set -e
root=$1
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o "size=$2,mode=1777" tmpfs "$root/dev/shm"
if [ -n "$3" ]; then
    ip link set lo up
    ip link add eth0 type veth peer name outside
    ip address add "$3/24" dev eth0
    ip link set eth0 up
    ip link set outside up
    ip route add default dev eth0
    hostname container
    printf '127.0.0.1 localhost\n%s container\n' "$3" > "$root/etc/hosts"
fi
echo ready
read -r _ || true
"""


def missing() -> str:
    """Why no root can be made here; empty where one can."""
    if os.geteuid() != 0:
        return "a fresh root takes the rights of root"
    lacking = [program for program in PROGRAMS if shutil.which(program) is None]
    if lacking:
        return f"a fresh root takes {', '.join(lacking)}: apt-get install debootstrap util-linux iproute2"
    return ""


def make_python_base(root: Path, image: str) -> None:
    """What `python:X.Y-slim-SUITE` is: Debian's SUITE with `python` and `pip` of that version in /usr/local.

    Raises:
        ValueError: it is another image, or the suite has another Python.
    """
    named = re.fullmatch(r"python:(\d+\.\d+)-slim-(\w+)", image)
    if named is None:
        raise ValueError(f"only python:X.Y-slim-SUITE can be made without an engine, not {image}")
    version, suite = named.groups()
    packages = "python3,python3-venv,ca-certificates"
    subprocess.run(["debootstrap", "--variant=minbase", f"--include={packages}", suite, str(root)], check=True)
    shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
    with Container(root) as container:
        container.run(["python3", "-m", "venv", "/usr/local"])
        found = container.run(["python", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]).strip()
    if found != version:
        raise ValueError(f"Debian's {suite} has Python {found}, and {image} another one")


@dataclass(frozen=True)
class PipSettings:
    """This host's own settings of pip, as variables, and the files that they name."""

    variables: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    @classmethod
    def here(cls) -> Self:
        listed = subprocess.run(
            [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
        ).stdout
        settings = [line.partition("=") for line in listed.splitlines() if not line.startswith(":env:.config-file")]
        # Variables of the environment go before files, here as in pip.
        ordered = sorted(settings, key=lambda setting: setting[0].startswith(":env:"))
        values = {key.rpartition(".")[2]: str(ast.literal_eval(value)) for key, _, value in ordered}
        # An index in a folder `simple` links to files beside that folder.
        words = [word.removeprefix("file://") for value in values.values() for word in value.split()]
        paths = [word.removesuffix("/simple") for word in words if word.startswith("/")]
        files = {path: path for path in paths if Path(path).exists()}
        proxies = {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
        return cls({f"PIP_{key.upper().replace('-', '_')}": value for key, value in values.items()} | proxies, files)


class Container:
    """Namespaces of processes, mounts and, if wanted, the network, around a root; `with` ends all that runs in them."""

    def __init__(self, root: Path, *, own_network: bool = False, shared_memory: str = "64m") -> None:
        self.root = root
        namespaces = ["--mount", "--pid", "--fork", "--kill-child", *(["--net", "--uts"] if own_network else [])]
        given = [str(root), shared_memory, ADDRESS if own_network else ""]
        self._first = subprocess.Popen(
            ["unshare", *namespaces, "bash", "-c", _FIRST, "first", *given],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._first.stdout is not None
        if self._first.stdout.readline() != "ready\n":
            raise RuntimeError(f"no namespaces for {root}")
        (self._pid,) = Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children").read_text().split()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._first.kill()  # its child is the first process of the namespace: all others go with it
        self._first.wait()

    def popen(
        self,
        command: Sequence[str],
        *,
        user: str = "root",
        workdir: str = "/",
        environment: Mapping[str, str] | None = None,
        shared: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[str]:
        """Start a command in the root. `shared`: files and folders of the host, and where they are there."""
        home = next(line.split(":")[5] for line in self._lines("etc/passwd") if line.startswith(f"{user}:"))
        variables = {"PATH": PATH, "LANG": "C.UTF-8", "HOME": home, **(environment or {})}
        pairs = [part for pair in (shared or {}).items() for part in pair]
        inside = [f"--userspec={user}:{user}", str(self.root), "/usr/bin/env", "-i", "-C", workdir,
                  *(f"{name}={value}" for name, value in variables.items()), *command]  # fmt: skip
        return subprocess.Popen(
            ["nsenter", "--target", self._pid, "--mount", "--pid", "--net", "--uts", "unshare", "--mount",
             "bash", "-c", _ENTER, "enter", str(self.root), *pairs, "--", *inside],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def run(self, command: Sequence[str], *, timeout_s: float = 60, **how: object) -> str:
        """Run a command to its end; what it said. Raises `RuntimeError` with that when it fails."""
        process = self.popen(command, **how)  # type: ignore[arg-type]
        try:
            said, _ = process.communicate(timeout=timeout_s)
        finally:
            process.kill()
        if process.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{said}")
        return said

    def _lines(self, name: str) -> list[str]:
        return (self.root / name).read_text().splitlines()


def stop(process: subprocess.Popen[str], *, timeout_s: float) -> str:
    """End what `popen` has started as an engine ends a container, by SIGTERM; what it still says."""
    for command in psutil.Process(process.pid).children():  # of nsenter, which waits for it
        command.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=timeout_s)
    return said
