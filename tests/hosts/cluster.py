"""A cluster on test hosts, brought up from the desk by `tandem up`, and what tests ask of it."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.hosts.host import DESK, HostsError
from tests.hosts.hosts import Hosts
from tests.scenarios.client import Answer, ask
from tests.support.waiting import nothing, wait_until

HEAD = 1
START_S = 900.0
"""All hosts share this machine's cores, and nothing that they import is in memory yet."""

LOG = ".local/state/tandem/serve-8000.log"
"""Of `tandem serve` on the head."""

SETTINGS: dict[str, Any] = {
    "model": {"served_names": ["*"]},
    "cache": {"memory_bytes": 64 << 20},
    "pools": {"prefill": {"threads": 1}, "decode": {"threads": 1}},
}


class HostCluster:
    """One head, prefill hosts and decode hosts, with TLS, an API key and Ray's token."""

    def __init__(self, hosts: Hosts, num_prefill: int, num_decode: int, **settings: Any) -> None:
        self.hosts, self.settings = hosts, {**SETTINGS, **settings}
        self.desk, self.head = hosts.host(DESK), hosts.host(HEAD)
        numbers = range(HEAD + 1, HEAD + 1 + num_prefill + num_decode)
        workers = [hosts.host(number) for number in numbers]
        self.prefill, self.decode = workers[:num_prefill], workers[num_prefill:]
        self.url = f"http://{self.head.address}:8000"

    def start_hosts(self) -> None:
        """All of them, and the desk, where the settings lie in the checkout."""
        for host in (self.desk, self.head, *self.prefill, *self.decode):
            self.hosts.add(host.number)
        self.desk.write("tandem.yaml", yaml.safe_dump(self.settings))

    def up(self) -> None:
        prefill, decode = (",".join(host.name for host in its) for its in (self.prefill, self.decode))
        self.desk.run(f"tandem hosts --head {self.head.name} --prefill {prefill} --decode {decode} > hosts.yaml")
        self.desk.run("tandem up hosts.yaml --host 0.0.0.0", timeout_s=START_S)
        self.wait_ready()

    def wait_ready(self, timeout_s: float = START_S) -> None:
        """Until every worker that is wanted serves."""
        wait_until(self.ready, "a whole cluster", timeout_s, wanted=lambda seen: seen == self.wanted, every_s=0.5,
                   more=self.said)  # fmt: skip

    @functools.cached_property
    def key(self) -> str:
        """The API key that `tandem up` has made."""
        return self.desk.run("cat ~/tandem-api-keys").stdout.strip()

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
        return self.head.run(f"tail -n 40 {LOG}", check=False).stdout

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
            for path in (LOG, "/tmp/ray/session_latest/logs"):
                with contextlib.suppress(HostsError):  # it has none
                    host.fetch(path, target / host.name)

    # -- asking

    @property
    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    def ask(self, prompt: str | list[int], **fields: Any) -> Answer:
        """A streamed completion, asked for on the desk."""
        fields = {"key": self.key, **fields}
        with self.desk.network():
            return ask(self.url, prompt, streamed=True, **fields)

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

    @property
    def is_under_way(self) -> bool:
        return self._thread.is_alive()

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
