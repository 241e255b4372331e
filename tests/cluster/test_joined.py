"""In a joined Ray, started with a token as the documentation says: who may ask, API keys, certificates, and the end.

Its processes are no children of `tandem serve`. That a cluster of several nodes serves so is shown in test_nodes.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
from serving import RAY, Rays, Serve

from tandem.cluster.certs import make_certificates
from tandem.core.ports import free_port
from tandem.rpc.permissions import PeerRole
from tandem.rpc.v1 import control_pb2, control_pb2_grpc, supervisor_pb2, supervisor_pb2_grpc
from tests.support.secured import PLAIN, members_of, outcome

pytestmark = pytest.mark.timeout(240)

KEY = "sk-of-the-joined-ray-0123456789"
VARIABLE = "TANDEM_API_KEYS"

@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's home, with Ray's token in it."""
    home = tmp_path_factory.mktemp("home")
    made = subprocess.run(
        [RAY, "get-auth-token", "--generate"], env={**os.environ, "HOME": str(home)}, capture_output=True, timeout=60
    )
    assert made.returncode == 0, made.stderr
    assert (home / ".ray" / "auth_token").read_bytes() == made.stdout
    return home


@pytest.fixture(scope="module")
def rays(home: Path) -> Iterator[tuple[Rays, str]]:
    """A Ray that wants the token and was started without the variable of keys, and its address."""
    rays, address = Rays(home), f"127.0.0.1:{free_port()}"
    rays.env.pop(VARIABLE, None)
    head = ("--head", "--include-dashboard=false", f"--port={address.partition(':')[2]}")
    try:
        rays.start(*head, '--resources={"prefill": 1, "decode": 1}', mode="token")
        yield rays, address
    finally:
        rays.end()


def test_a_client_without_the_token_is_refused(rays: tuple[Rays, str], tmp_path: Path) -> None:
    ray, address = rays
    run = ray.tandem("status", "--address", address, HOME=str(tmp_path))
    assert run.returncode == 1
    assert f"Ray at {address} wants a token; set RAY_AUTH_MODE=token" in run.stderr
    assert run.stderr.count("\n") == 1


@pytest.mark.faults
def test_a_client_with_another_token_is_refused(rays: tuple[Rays, str], tmp_path: Path) -> None:
    ray, address = rays
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("0" * 64)
    run = ray.tandem("status", "--address", address, HOME=str(tmp_path))
    assert run.returncode == 1
    assert "wants a token" in run.stderr


def test_a_client_with_the_token_in_its_home_asks_without_being_told_to(rays: tuple[Rays, str]) -> None:
    """It joins nothing, so it need not be a node; that there is no cluster in this Ray is what it was told."""
    ray, address = rays
    run = ray.tandem("status", "--address", address)
    assert run.returncode == 3
    assert f"no Tandem cluster runs in the Ray cluster at {address}" in run.stderr


def joining(directory: Path, rays: tuple[Rays, str], certificates: Path, **env: str) -> Serve:
    """`tandem serve` of the user who has the token in his home, under TLS."""
    of_user = {name: rays[0].env[name] for name in ("HOME", "XDG_CACHE_HOME")}
    security = {"tls": "on", "certificates": str(certificates)}
    return Serve(
        directory, "--address", rays[1], env={**of_user, "RAY_AUTH_MODE": "token", **env}, security=security
    )


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("certs") / "cluster", days=1).directory


def test_a_cluster_that_starts_is_stopped_with_all_that_it_has_in_ray(
    rays: tuple[Rays, str], certificates: Path, tmp_path: Path
) -> None:
    serve = joining(tmp_path, rays, certificates)
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
def serve(
    rays: tuple[Rays, str], certificates: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serve]:
    serve = joining(tmp_path_factory.mktemp("keys"), rays, certificates, **{VARIABLE: KEY})
    try:
        yield serve.wait_ready()
    finally:
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
    env = {**rays[0].env, "RAY_AUTH_MODE": "token"}
    actors = subprocess.run(line, env=env, capture_output=True, check=True, timeout=60).stdout
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


def test_each_process_shows_its_own_certificate_and_strangers_get_in_nowhere(serve: Serve, certificates: Path) -> None:
    """Ray's actors, the supervisor and the command line."""
    members = members_of(certificates)
    body = {"model": "tandem-tiny", "prompt": "Once upon a time", "max_tokens": 8, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {KEY}"}
    assert httpx.post(f"{serve.url}/v1/completions", json=body, headers=headers).json()["choices"][0]["text"]
    told = serve.tandem("status", "--json")
    assert told.returncode == 0, told.stderr
    cluster = json.loads(told.stdout)
    assert cluster["settled"]
    (file,) = serve.state_files()
    control = json.loads(file.read_text())["control_address"]
    stub, request = supervisor_pb2_grpc.SupervisorControlStub, supervisor_pb2.ScaleRequest(decode=2)
    assert outcome(control, PLAIN, stub, "Scale", request) is grpc.StatusCode.UNAVAILABLE
    for role in (PeerRole.ROUTER, PeerRole.DECODE, PeerRole.SUPERVISOR):
        assert outcome(control, members[role], stub, "Scale", request) is grpc.StatusCode.PERMISSION_DENIED
    for worker in cluster["workers"]:
        address = worker["member"]["address"]
        stub, request = control_pb2_grpc.WorkerControlStub, control_pb2.StatusRequest()
        assert outcome(address, PLAIN, stub, "Status", request) is grpc.StatusCode.UNAVAILABLE
        assert outcome(address, members[PeerRole.CLIENT], stub, "Status", request) is grpc.StatusCode.OK


def test_tandem_stop_ends_it_and_waits_for_the_end(serve: Serve, rays: tuple[Rays, str]) -> None:
    """The last test: it ends the cluster."""
    run = serve.tandem("stop")
    assert run.returncode == 0, run.stderr + serve.output
    assert serve.process.wait(timeout=5) == 0
    assert serve.processes() == []
    assert serve.tandem("stop").returncode == 3
