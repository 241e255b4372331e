"""A rack of test hosts: started, found again by another process, and ended."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from tandem.engine.cpu.compiling import kept_code
from tests.hosts.environment import ROOT, Environment
from tests.hosts.faults import Faults
from tests.hosts.host import DESK, MOST, NET, NET6, NET_TWO, Host, HostsError
from tests.hosts.needs import SYSTEM_PATH
from tests.support.waiting import wait_until

INSIDE = Path(__file__).with_name("inside.sh")
_START_S = 30.0


class Hosts:
    """One rack.

    Attributes:
        faults: of the network, as the switch has them.
    """

    def __init__(self, directory: Path, pid: int, options: dict[str, Any], faults: Faults) -> None:
        self.directory, self.faults = directory, faults
        self._pid, self._options = pid, options
        self._out_here: dict[int, int] = {}  # of processes in the rack: their ids here

    @classmethod
    def start(
        cls, directory: Path, *, loopback_name: bool = False, second: bool = False, outlives_us: bool = False
    ) -> Hosts:
        """A rack without hosts. Unless it `outlives_us`, it ends with the thread that started it, however that ends.

        Args:
            directory: a new or empty one, for what is needed to find the rack; hosts' disks are in memory.
            loopback_name: the own name of each host is 127.0.1.1, as on Debian.
            second: hosts have a second network.
        """
        (directory / "rack").mkdir(parents=True)
        Environment.running().write_seed(directory / "seed")
        hosts = cls(directory, 0, {"loopback_name": loopback_name, "second": second}, Faults())
        line = ["unshare", "--pid", "--fork", "--mount", "--net"]
        if not outlives_us:
            line = ["setpriv", "--pdeathsig", "KILL", *line, "--kill-child=KILL"]
        log = directory / "rack.log"
        with log.open("wb") as sink:
            parent = subprocess.Popen(
                [*line, str(INSIDE), "rack"], env=hosts._variables(), stdin=subprocess.DEVNULL, stdout=sink,
                stderr=sink, start_new_session=True,
            )  # fmt: skip
        wait_until(psutil.Process(parent.pid).children, "the rack", _START_S, more=log.read_text)
        hosts._pid = psutil.Process(parent.pid).children()[0].pid
        wait_until(hosts._is_ready, "the switch", _START_S, every_s=0.05, more=log.read_text)
        hosts._save()
        return hosts

    @classmethod
    def find(cls, directory: Path) -> Hosts:
        """A rack that was started by another process.

        Raises:
            HostsError: there is none.
        """
        try:
            state = json.loads((directory / "rack.json").read_text())
        except FileNotFoundError as error:
            raise HostsError(f"no test hosts are up in {directory}") from error
        return cls(directory, state["pid"], state["options"], Faults.from_json(state["faults"]))

    def stop(self) -> None:
        """End all hosts at once; nothing of them is left but the directory."""
        with contextlib.suppress(psutil.NoSuchProcess):
            rack = psutil.Process(self._pid)
            parent = rack.parent()
            rack.kill()
            # It ends after all that is in it; its parent, which waited for it, after that.
            psutil.wait_procs([rack, *([parent] if parent and parent.name() == "unshare" else [])], timeout=_START_S)
        (self.directory / "rack.json").unlink(missing_ok=True)

    # -- hosts

    def desk(self) -> Host:
        """Start the desk: where the cluster is administrated, with the checkout and its environment."""
        return self.add(DESK)

    def add(self, number: int) -> Host:
        """Start a host, also one that was killed: it finds its disk again, and has another boot id."""
        host = self.host(number)
        self.faults.cut.discard(number)
        self.set_faults()
        variables = {
            "NUMBER": str(host.last), "PORT": str(number), "CHECKOUT": str(ROOT) if number == DESK else "",
            "KERNELS": str(kept_code() or ""),
        }  # fmt: skip
        self._run(str(INSIDE), "add", host.name, **variables)
        return host

    def host(self, number: int) -> Host:
        if not 0 <= number <= MOST:
            raise HostsError(f"hosts have numbers from 1 to {MOST}")
        return Host(self, number)

    def running(self) -> list[Host]:
        """All that are up, in their order."""
        return [host for number in range(MOST + 1) if (host := self.host(number)).is_up()]

    def kill(self, host: Host) -> None:
        """Power loss: nothing gets out of it any more, and all its processes end at once."""
        self.faults.cut.add(host.number)
        self.set_faults()
        pid = host.pid()
        self._run("kill", "-KILL", str(pid))
        wait_until(lambda: not self.lives(pid), f"the end of {host.name}", _START_S)

    # -- the network

    def set_faults(self) -> None:
        """Make the switch do what `faults` says, from now on."""
        self._run("nft", "-f", "-", given=self.faults.rules())
        self._save()

    def cut(self, *hosts: Host) -> None:
        """Nothing gets to or from them any more; nobody is told."""
        self.faults.cut |= {host.number for host in hosts}
        self.set_faults()

    def part(self, some: Sequence[Host], others: Sequence[Host]) -> None:
        """Nothing gets from some to the others, or back."""
        for one in some:
            for other in others:
                self.faults.part(one.number, other.number)
        self.set_faults()

    def heal(self) -> None:
        """Undo all cuts and partitions."""
        self.faults.cut = {host.number for host in map(self.host, self.faults.cut) if not host.is_up()}
        self.faults.parted.clear()
        self.set_faults()

    def lose(self, host: Host, percent: float) -> None:
        """So much of what the host sends is lost, from now on."""
        self.faults.lost[host.number] = percent
        self.set_faults()

    def delay(self, host: Host, delay_s: float) -> None:
        """Whatever goes to or from the host on the first network takes so much longer from now on; 0: as before."""
        self._run(str(INSIDE), "delay", str(host.number), f"{delay_s:g}")

    def reset(self, one: Host, other: Host) -> None:
        """Every TCP connection between the two ends now, with a reset for both."""
        one.run(f"ss -K dst {other.address}", user="root")
        other.run(f"ss -K dst {one.address}", user="root")

    # -- in the rack

    def enter(self) -> list[str]:
        """What goes before a command to run it in the rack: where hosts have the process ids that they are known by."""
        return ["nsenter", f"--target={self._pid}", "--pid", "--mount", "--net", "--"]

    def read(self, name: str) -> str:
        """A file of the rack."""
        return self._run("cat", str(self.directory / "rack" / name))

    def pid_out_here(self, pid: int) -> int:
        """Of a process that has this id in the rack.

        Raises:
            HostsError: it has ended.
        """
        if pid in self._out_here:
            return self._out_here[pid]
        for process in psutil.Process(self._pid).children(recursive=True):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                status = Path(f"/proc/{process.pid}/status").read_text()
                ids = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[1:]
                if len(ids) > 1 and ids[1] == str(pid):
                    self._out_here[pid] = process.pid
                    return process.pid
        raise HostsError(f"no process {pid} is in the rack")

    def _run(self, *line: str, given: str = "", **variables: str) -> str:
        run = subprocess.run(
            [*self.enter(), *line], env=self._variables() | variables, input=given, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        if run.returncode != 0:
            raise HostsError(f"{' '.join(line)}: {run.stdout}{run.stderr}".strip())
        return run.stdout

    def lives(self, pid: int) -> bool:
        try:
            self._run("kill", "-0", str(pid))
        except HostsError:
            return False
        return True

    def _is_ready(self) -> bool:
        try:
            return self.read("ready") == ""
        except HostsError:
            return False

    def _variables(self) -> dict[str, str]:
        """Of `inside.sh`, for all hosts."""
        environment = Environment.running()
        every = map(self.host, range(MOST + 1))
        return {
            "PATH": SYSTEM_PATH,
            "LANG": "C.UTF-8",
            "RACK": str(self.directory / "rack"),
            "NET": NET,
            "NET6": NET6,
            "NET_TWO": NET_TWO if self._options["second"] else "",
            "LOOPBACK_NAME": "yes" if self._options["loopback_name"] else "",
            "NAMES": "\n".join(f"{host.address} {host.name}" for host in every),
            "PYTHON_BASE": str(environment.base),
            "PREFIX": str(environment.prefix),
            "SITES": ":".join(map(str, environment.sites)),
            "SITE": environment.inside,
            "PYTHON": sys.executable,
            "SEED": str(self.directory / "seed"),
        }

    def _save(self) -> None:
        state = {"pid": self._pid, "options": self._options, "faults": self.faults.as_json(), "saved": time.time()}
        new = self.directory / "rack.json.new"
        new.write_text(json.dumps(state))
        os.replace(new, self.directory / "rack.json")
