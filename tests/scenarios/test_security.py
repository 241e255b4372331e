"""A cluster of real processes under mutual TLS: it serves as ever, and nobody else gets in.

That `tandem serve` and the command line do so too is shown in tests/cluster/test_joined.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.cluster.certs import make_certificates
from tandem.core.config import SecurityConfig
from tandem.core.model_path import resolve_model
from tandem.rpc import security
from tandem.rpc.permissions import PeerRole
from tandem.rpc.security import Security
from tandem.rpc.v1 import (
    control_pb2,
    control_pb2_grpc,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)
from tests.scenarios.client import complete, stream
from tests.scenarios.processes import ROOT, ProcessCluster, running
from tests.support import fork_server
from tests.support.secured import PLAIN, members_of, outcome

REFERENCE = json.loads((resolve_model("embedded") / "reference.json").read_text())["entries"]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("certs") / "cluster", days=1).directory


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory, certificates: Path) -> Iterator[ProcessCluster]:
    """1P1D under TLS, in which every prompt is handed off; the test's own process is its supervisor."""
    config = SecurityConfig("on", str(certificates))
    before = security.current()
    security.configure(config, PeerRole.SUPERVISOR, "127.0.0.1")
    sections = {
        "model": {"served_names": ["*"]},
        "scheduling": {"mixed_pool": False},
        "security": {"tls": config.tls, "certificates": config.certificates},
    }
    try:
        with running(tmp_path_factory.mktemp("tls"), config=sections) as cluster:
            yield cluster
    finally:
        security._process = before


@pytest.fixture
def members(certificates: Path) -> dict[PeerRole, Security]:
    return members_of(certificates)


def addresses(cluster: ProcessCluster) -> dict[str, str]:
    workers = {name: process.facts["address"] for name, process in cluster.workers.items()}
    return {"router": cluster.router.facts["control"], **workers}


@pytest.mark.parametrize("ask", [complete, stream], ids=["whole", "streamed"])
def test_it_serves_as_ever(secured: ProcessCluster, ask: Any) -> None:
    for case in REFERENCE[:3]:
        answer = ask(secured.url, case["prompt_token_ids"], max_tokens=96)
        assert answer.token_ids == [case["token_ids"]]
        assert answer.texts == [case["text"]]
    assert secured.metric("tandem_handoff_seconds_count") >= 3
    secured.wait_idle()


def test_no_port_takes_a_plain_connection(secured: ProcessCluster) -> None:
    for name, address in addresses(secured).items():
        if name == "router":
            stub, method, request = control_pb2_grpc.RouterControlStub, "SetMembership", control_pb2.Membership()
        else:
            stub, method, request = control_pb2_grpc.WorkerControlStub, "Status", control_pb2.StatusRequest()
        assert outcome(address, PLAIN, stub, method, request) is grpc.StatusCode.UNAVAILABLE, name


def test_a_member_may_do_what_its_role_does_and_no_more(
    secured: ProcessCluster, members: dict[PeerRole, Security]
) -> None:
    where = addresses(secured)
    router, prefill, decode = where["router"], where["prefill-0"], where["decode-0"]
    control, worker = control_pb2_grpc.RouterControlStub, control_pb2_grpc.WorkerControlStub
    decode_service = decode_pb2_grpc.DecodeServiceStub
    attempts = [
        # (who, where, call, request, gets through)
        (PeerRole.PREFILL, router, control, "SetMembership", control_pb2.Membership(version=1 << 60), False),
        (PeerRole.CLIENT, router, control, "DrainRouter", control_pb2.DrainRouterRequest(), False),
        (PeerRole.CLIENT, router, control, "StopRouter", control_pb2.StopRouterRequest(), False),
        (PeerRole.ROUTER, prefill, worker, "Drain", control_pb2.DrainWorkerRequest(), False),
        (PeerRole.CLIENT, prefill, worker, "Stop", control_pb2.StopWorkerRequest(), False),
        (PeerRole.CLIENT, decode, worker, "NoteEnded", control_pb2.NoteEndedRequest(incarnations=["x"]), False),
        (PeerRole.CLIENT, decode, worker, "Status", control_pb2.StatusRequest(), True),
        (PeerRole.ROUTER, decode, decode_service, "ConfirmIdle", decode_pb2.ConfirmIdleRequest(), False),
        (PeerRole.DECODE, decode, decode_service, "ConfirmIdle", decode_pb2.ConfirmIdleRequest(), False),
        (PeerRole.PREFILL, decode, decode_service, "ConfirmIdle", decode_pb2.ConfirmIdleRequest(), True),
        (PeerRole.PREFILL, prefill, prefill_pb2_grpc.PrefillServiceStub, "StopWrites", prefill_pb2.StopWritesRequest(),
         False),
        (PeerRole.DECODE, prefill, prefill_pb2_grpc.PrefillServiceStub, "StopWrites", prefill_pb2.StopWritesRequest(),
         True),
    ]  # fmt: skip
    for role, address, stub, method, request, allowed in attempts:
        code = outcome(address, members[role], stub, method, request)
        wanted = grpc.StatusCode.OK if allowed else grpc.StatusCode.PERMISSION_DENIED
        assert code is wanted, (role, method)
    refusals = secured.workers["decode-0"].log.read_text()
    assert "refused /tandem.v1.DecodeService/ConfirmIdle to router" in refusals
    answer = complete(secured.url, REFERENCE[0]["prompt_token_ids"], max_tokens=96)
    assert answer.token_ids == [REFERENCE[0]["token_ids"]]


@pytest.mark.parametrize(
    "program",
    ["prefill_worker", "decode_worker", "router"],
)
def test_beyond_loopback_nothing_starts_without_certificates(tmp_path: Path, program: str) -> None:
    option = "--control-host" if program == "router" else "--host"
    line, log = ["--model-dir", str(resolve_model("embedded")), option, "0.0.0.0"], tmp_path / "log"
    started = fork_server.start(program, line, log, ROOT, os.environ)
    assert started.wait(60) not in (0, -9)
    said = log.read_text()
    assert "tandem certs" in said
    assert "security.tls: off" in said
    assert "Traceback" not in said
