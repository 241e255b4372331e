"""In a joined Ray, whose processes are no children of `tandem serve`: API keys, and the end of a start."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from serving import Rays, Serve

from tandem.core.ports import free_port

pytestmark = pytest.mark.timeout(240)

KEY = "sk-of-the-joined-ray-0123456789"
VARIABLE = "TANDEM_API_KEYS"
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}


@pytest.fixture(scope="module")
def rays(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Rays, str]]:
    """A Ray that was started without the variable, and its address."""
    rays, address = Rays(tmp_path_factory.mktemp("home")), f"127.0.0.1:{free_port()}"
    rays.env.pop(VARIABLE, None)
    rays.env |= TOKEN
    head = ("--head", "--include-dashboard=false", f"--port={address.partition(':')[2]}")
    try:
        rays.start(*head, '--resources={"prefill": 1, "decode": 1}', mode="token")
        yield rays, address
    finally:
        rays.end()


def test_a_cluster_that_starts_is_stopped_with_all_that_it_has_in_ray(rays: tuple[Rays, str], tmp_path: Path) -> None:
    serve = Serve(tmp_path, "--address", rays[1], env=TOKEN, security={"tls": "off"})
    try:
        serve.wait_for("Starting the workers")
        run = serve.tandem("stop")
        assert run.returncode == 0, run.stderr + serve.output
        assert serve.process.wait(timeout=5) == 0, serve.output
    finally:
        serve.clean_up()
    assert serve.state_files() == []
    ours = [p for p in rays[0].processes() if re.match(r"ray::\w+Actor", _title(p))]
    _, alive = psutil.wait_procs(ours, timeout=10)
    assert not alive


@pytest.fixture(scope="module")
def serve(rays: tuple[Rays, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    directory, security = tmp_path_factory.mktemp("keys"), {"tls": "off"}
    serve = Serve(directory, "--address", rays[1], env={**TOKEN, VARIABLE: KEY}, security=security)
    try:
        yield serve.wait_ready()
    finally:
        serve.interrupt()
        serve.clean_up()


def statuses(serve: Serve) -> list[int]:
    """Without a key, with another one, and with the right one."""
    headers = [{}, {"Authorization": f"Bearer {KEY}x"}, {"Authorization": f"Bearer {KEY}"}]
    return [httpx.get(f"{serve.url}/v1/models", headers=each).status_code for each in headers]


def actor(rays: Rays, name: str) -> psutil.Process:
    return next(process for process in rays.processes() if _title(process).startswith(f"ray::{name}"))


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # it has ended since it was listed
        return ""


def test_keys_reach_the_router(serve: Serve) -> None:
    assert statuses(serve) == [401, 401, 200]


def test_keys_reach_the_next_router_of_the_next_supervisor(serve: Serve, rays: tuple[Rays, str]) -> None:
    before = serve.status()
    for name in ("SupervisorActor", "RouterActor"):
        actor(rays[0], name).kill()
    after = serve.until(
        lambda cluster: cluster.get("settled", False)
        and cluster["pid"] != before["pid"]
        and cluster["router"]["incarnation"] != before["router"]["incarnation"]
    )
    assert after["router"]["state"] == "ready"
    assert statuses(serve) == [401, 401, 200]


ALL_ACTORS = """
import logging, sys, ray
ray.init(address=sys.argv[1], namespace="tandem", log_to_driver=False, logging_level=logging.ERROR)
from ray._private.state import state
sys.stdout.buffer.write(b"".join(state._connect_and_get_accessor().get_actor_table(None, None)))
"""


def test_keys_show_nowhere(serve: Serve, rays: tuple[Rays, str]) -> None:
    """Not in logs, command lines, environments, the state file, nor in what Ray tells of its actors."""
    assert statuses(serve) == [401, 401, 200]
    line = [sys.executable, "-c", ALL_ACTORS, rays[1]]
    actors = subprocess.run(line, env=rays[0].env, capture_output=True, check=True, timeout=60).stdout
    logs = Path(re.search(r"logs in (\S+)", serve.output)[1])  # type: ignore[index]
    shown = {str(path): path.read_bytes() for path in logs.rglob("*") if path.is_file()}
    shown |= {str(path): path.read_bytes() for path in Path(serve.env["XDG_RUNTIME_DIR"], "tandem").iterdir()}
    for process in rays[0].processes():
        shown[f"process {process.pid}"] = f"{process.cmdline()} {process.environ()}".encode()
    shown |= {"actors": actors, "output": serve.output.encode()}
    assert b"RouterActor" in actors
    digest = hashlib.sha256(KEY.encode())
    for secret in (KEY.encode(), digest.digest(), digest.hexdigest().encode()):
        assert not [where for where, text in shown.items() if secret in text]
