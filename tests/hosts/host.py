"""One test host: what runs on it, and whether it is up."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tests.hosts.environment import ROOT, VENV, Environment
from tests.hosts.needs import SYSTEM_PATH

if TYPE_CHECKING:
    from tests.hosts.hosts import Hosts

NET, NET_TWO, NET6 = "10.77.0", "10.78.0", "fd77"
DESK = 0
"""The number of the desk."""
MOST = 40
USER = "tandem"

_FIRST = 10  # last part of the desk's address
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


class HostsError(AssertionError):
    """What was asked of test hosts could not be done."""


class Host:
    """A host by its number; it need not be up."""

    def __init__(self, hosts: Hosts, number: int) -> None:
        self.hosts, self.number = hosts, number
        self.name = f"node{number}" if number != DESK else "desk"
        self.last = _FIRST + number
        self.address = f"{NET}.{self.last}"
        self.address_two = f"{NET_TWO}.{self.last}"
        self.address6 = f"{NET6}::{self.last}"

    def pid(self) -> int:
        """Of its first process, in the rack.

        Raises:
            HostsError: it was never up.
        """
        return int(self.hosts.read(f"{self.name}/pid"))

    def is_up(self) -> bool:
        try:
            return self.hosts.lives(self.pid())
        except HostsError:
            return False

    # -- commands

    def line(self, command: str, user: str = USER) -> list[str]:
        """What runs a shell command here, as the user, with nothing of our environment: at home, or in the checkout."""
        home = f"/home/{USER}" if user == USER else "/root"
        scripts, start = (Environment.running().prefix / "bin", ROOT) if self.number == DESK else (f"{VENV}/bin", home)
        variables = {
            "PATH": f"{scripts}:{SYSTEM_PATH}", "HOME": home, "USER": user, "LOGNAME": user, "SHELL": "/bin/bash",
            "LANG": "C.UTF-8", "TERM": "xterm",
        }  # fmt: skip
        return [
            *self.hosts.enter(),
            "nsenter", f"--target={self.pid()}", "--pid", "--mount", "--net", "--uts", "--ipc", "--root", "--wd",
            "setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups",
            "env", "-i", *(f"{name}={value}" for name, value in variables.items()),
            "bash", "-c", f"cd {shlex.quote(str(start))} && {command}",
        ]  # fmt: skip

    def run(
        self, command: str, *, user: str = USER, timeout_s: float = 120.0, check: bool = True, given: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run a shell command and wait for its end.

        Raises:
            HostsError: it failed, and `check` was asked for; says what it printed.
        """
        run = subprocess.run(
            self.line(command, user), input=given, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if check and run.returncode != 0:
            raise HostsError(f"{self.name}: {command}: exit code {run.returncode}\n{run.stdout}{run.stderr}")
        return run

    def start(self, command: str, log: Path, *, user: str = USER) -> subprocess.Popen[bytes]:
        """Run a shell command without waiting; what it prints goes to `log`, out here."""
        with log.open("ab") as sink:
            return subprocess.Popen(
                self.line(command, user), stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True
            )

    def write(self, path: str, text: str) -> None:
        """A file of the user; `path` is relative to his home."""
        self.run(f"mkdir -p $(dirname {shlex.quote(path)}) && cat > {shlex.quote(path)}", given=text)

    def fetch(self, path: str, target: Path) -> None:
        """Copy a file or directory out here, into the directory `target`.

        Raises:
            HostsError: it is not there.
        """
        target.mkdir(parents=True, exist_ok=True)
        parent, name = os.path.split(path.rstrip("/"))
        line = self.line(f"tar -C {shlex.quote(parent or f'/home/{USER}')} -chf - {shlex.quote(name)}", "root")
        sent = subprocess.run(line, capture_output=True, check=False)
        if sent.returncode > 1:  # 1: a file grew meanwhile
            raise HostsError(f"{self.name}: {path}: {sent.stderr.decode()}")
        subprocess.run(["tar", "-C", str(target), "--no-same-owner", "-xf", "-"], input=sent.stdout, check=True)

    # -- its end, and its network

    def kill(self) -> None:
        """Power loss: no FIN, no RST, and no process is left."""
        self.hosts.kill(self)

    def shape(self, rate: str) -> None:
        """So fast does it send from now on, at most: `100mbit`; `off`: as fast as it can."""
        change = "del" if rate == "off" else "replace"
        how = "" if rate == "off" else f" tbf rate {rate} burst 256kb latency 500ms"
        self.run(f"tc qdisc {change} dev eth0 root{how}", user="root", check=rate != "off")

    @contextlib.contextmanager
    def network(self) -> Iterator[None]:
        """Sockets that this thread makes in the block are in the host's network; they stay there afterwards."""
        ours = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        theirs = os.open(f"/proc/{self.hosts.pid_out_here(self.pid())}/ns/net", os.O_RDONLY)
        try:
            _enter(theirs)
            yield
        finally:
            _enter(ours)
            os.close(ours)
            os.close(theirs)


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
