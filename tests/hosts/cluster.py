"""A cluster on test hosts, brought up from the desk as the README says, and what tests ask of it."""

from __future__ import annotations

import contextlib
import re
import secrets
import shlex
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.hosts.environment import ROOT
from tests.hosts.host import Host, HostsError
from tests.hosts.hosts import Hosts
from tests.scenarios.client import Answer, ask
from tests.support.waiting import nothing, wait_until

HEAD = 1
SERVE = "tandem serve --address auto --config ~/tandem/tandem.yaml"
START_S = 900.0
"""All hosts share this machine's cores, and nothing that they compile or import is there yet."""

SETTINGS: dict[str, Any] = {
    "model": {"served_names": ["*"]},
    "http": {"host": "0.0.0.0"},
    "security": {"certificates": "~/tandem-certs"},
    "cache": {"memory_bytes": 64 << 20},
    "pools": {"prefill": {"threads": 1}, "decode": {"threads": 1}},
}


class HostCluster:
    """One head, prefill hosts and decode hosts, by `ray up`, with TLS, an API key and Ray's token.

    Attributes:
        key: the API key.
    """

    def __init__(self, hosts: Hosts, num_prefill: int, num_decode: int, **settings: Any) -> None:
        self.hosts, self.key = hosts, secrets.token_hex(16)
        self.desk, self.head = hosts.host(0), hosts.host(HEAD)
        numbers = range(HEAD + 1, HEAD + 1 + num_prefill + num_decode)
        workers = [hosts.host(number) for number in numbers]
        self.prefill, self.decode = workers[:num_prefill], workers[num_prefill:]
        self.url = f"http://{self.head.address}:8000"
        self._settings = {**SETTINGS, **settings}
        for role, its in (("prefill", self.prefill), ("decode", self.decode)):
            self._settings["pools"][role] = {**self._settings["pools"][role], "workers": len(its)}

    # -- as the README says

    def start_hosts(self) -> None:
        self.hosts.desk()
        for host in (self.head, *self.prefill, *self.decode):
            self.hosts.add(host.number)

    def prepare(self) -> None:
        """What is done once: wheel, token, certificates, and the files that say what is wanted."""
        self.desk.run("make wheel", timeout_s=300)
        self.desk.run("ray get-auth-token --generate > /dev/null")
        self.desk.run("tandem certs ~/tandem-certs")
        self.write_settings()
        self.desk.write("cluster.yaml", cluster_file(self.head, self.prefill, self.decode))

    def write_settings(self) -> None:
        self.desk.write("tandem.yaml", yaml.safe_dump(self._settings))

    def up(self) -> None:
        self.desk.run("ray up -y cluster.yaml", timeout_s=START_S)

    def serve(self) -> None:
        """Start it on the head, and leave it there; what it says goes to ~/serve.log."""
        line = f"TANDEM_API_KEYS={self.key} {SERVE} > ~/serve.log 2>&1"
        self.desk.run(f"ray exec cluster.yaml --tmux {shlex.quote(line)}", timeout_s=START_S)

    def wait_ready(self, timeout_s: float = START_S) -> None:
        """Until every worker that is wanted serves."""
        wait_until(self.ready, "a whole cluster", timeout_s, wanted=lambda seen: seen == self.wanted, every_s=0.5,
                   more=self.said)  # fmt: skip

    # -- looking

    @property
    def wanted(self) -> dict[str, int]:
        return {"prefill": len(self.prefill), "decode": len(self.decode)}

    def ready(self) -> dict[str, int]:
        """How many workers of each pool the router would give a request to."""
        return {role: sum(worker["state"] == "ready" for worker in self.shown()[role]) for role in self.wanted}

    def shown(self) -> dict[str, Any]:
        """`GET /v1/cluster`; without workers where nobody answers."""
        try:
            with self.desk.network():
                answer = httpx.get(f"{self.url}/v1/cluster", headers=self._headers, timeout=5.0)
            return dict(answer.json()) if answer.status_code == 200 else {"prefill": [], "decode": []}
        except httpx.TransportError:
            return {"prefill": [], "decode": []}

    def incarnations(self) -> set[str]:
        """Of all workers."""
        shown = self.shown()
        return {worker["incarnation"] for role in self.wanted for worker in shown[role]}

    def transferred_bytes(self) -> float:
        """Pages that have gone from prefill to decode workers."""
        with self.desk.network():
            text = httpx.get(f"{self.url}/metrics", headers=self._headers, timeout=5.0).text
        found = re.findall(r"^tandem_kv_transfer_bytes_total\{[^}]*\} (\S+)", text, re.MULTILINE)
        return sum(map(float, found))

    def said(self) -> str:
        """What `tandem serve` has printed last."""
        return self.head.run("tail -n 40 serve.log", check=False).stdout

    def held(self) -> dict[str, dict[str, int]]:
        """What workers hold for requests, those that hold something."""
        found = {}
        for worker in [*self.shown()["prefill"], *self.shown()["decode"]]:
            pages = {state: worker["pages"][state] for state in ("used", "reserved", "quarantined")}
            counts = {"running": worker["num_running"], "queued": worker["num_queued"], **pages}
            if any(counts.values()):
                found[worker["id"]] = counts
        return found

    def wait_idle(self, timeout_s: float = 60.0) -> None:
        """Until no worker holds a request, or a page for one."""
        wait_until(self.held, "idle workers", timeout_s, wanted=nothing, every_s=0.2)

    def save_logs(self, target: Path) -> None:
        """What all hosts have logged, for whoever looks into a failure."""
        for host in self.hosts.running():
            for path in ("serve.log", "/tmp/ray/session_latest/logs"):
                with contextlib.suppress(HostsError):  # it has none
                    host.fetch(path, target / host.name)

    # -- asking

    @property
    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    def ask(self, prompt: str | list[int], **fields: Any) -> Answer:
        """A streamed completion, asked for on the desk."""
        with self.desk.network():
            return ask(self.url, prompt, streamed=True, key=self.key, **fields)

    def asking(self, prompt: str | list[int], **fields: Any) -> Asking:
        return Asking(lambda told: self.ask(prompt, on_token=told, **fields))


class Asking:
    """A request under way on a thread of its own."""

    def __init__(self, call: Callable[[Callable[[], None]], Answer]) -> None:
        self.has_begun = threading.Event()
        self._answer: Answer | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def wait_for_token(self, timeout_s: float = 60.0) -> None:
        assert self.has_begun.wait(timeout_s), f"no token came; {self._error!r} {self._answer}"

    def answer(self, timeout_s: float = 120.0) -> Answer:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "the request hangs"
        if self._error is not None:
            raise self._error
        assert self._answer is not None
        return self._answer

    def _run(self, call: Callable[[Callable[[], None]], Answer]) -> None:
        try:
            self._answer = call(self.has_begun.set)
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self._error = error


def cluster_file(head: Host, prefill: Sequence[Host], decode: Sequence[Host]) -> str:
    """deploy/on-premises.yaml for these hosts."""
    text = (ROOT / "deploy" / "on-premises.yaml").read_text().replace("192.168.1.10", head.address)
    workers = [*prefill, *decode]
    listed = "".join(f"    - {host.address}\n" for host in workers)
    text = re.sub(r"(    - 192\.168\.1\.\d+\n)+", listed, text)
    for role, its in (("prefill", prefill), ("decode", decode)):
        cases = "|".join(f'*" {host.address} "*' for host in its)
        resources = f"""resources='{{"{role}": 1}}'"""
        text = re.sub(rf"""\*" 192[^)]*\) {resources}""", f"{cases}) {resources}", text)
    if "RAY_enable_autoscaler_v2" not in text:  # the second one counts the head among the workers
        text = text.replace("ray start --head", "export RAY_enable_autoscaler_v2=0;\n    ray start --head")
    text = re.sub(r"(m\w+_workers): 4", rf"\1: {len(workers)}", text)
    assert "192.168" not in text, text
    return text
