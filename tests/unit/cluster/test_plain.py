"""`tandem status --json`: plain data, every field there, and each of them described."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import Descriptor

from tandem.cluster.plain import plain
from tandem.cluster.statefile import ClusterFile
from tandem.rpc.v1 import common_pb2, control_pb2, supervisor_pb2

ROOT = Path(__file__).parents[3]


def test_numbers_are_numbers_roles_are_words_and_zeros_are_there() -> None:
    load = common_pb2.WorkerStatus(transfer_bytes=1 << 60, refused={"digest": 1 << 40})
    member = control_pb2.Member(worker_id="decode-0", role=common_pb2.ROLE_DECODE)
    cluster = supervisor_pb2.Cluster(
        membership_version=1 << 32,
        pools=[supervisor_pb2.Pool(role=common_pb2.ROLE_PREFILL, wanted=1)],
        workers=[supervisor_pb2.ClusterWorker(member=member, load=load)],
    )
    told: dict[str, Any] = json.loads(json.dumps(plain(cluster)))
    assert told["membership_version"] == 1 << 32
    fixed = {"least": 0, "most": 0, "latest": None, "changes": []}
    assert told["pools"] == [{"role": "prefill", "wanted": 1, "ready": 0, **fixed}]
    (worker,) = told["workers"]
    assert (worker["member"]["role"], worker["member"]["pid"], worker["member"]["state"]) == ("decode", 0, "")
    assert worker["load"]["transfer_bytes"] == 1 << 60
    assert worker["load"]["refused"] == {"digest": 1 << 40}
    assert worker["load"]["num_running"] == 0
    assert (worker["last_error"], worker["leaving"], worker["retry_in_s"]) == (None, False, 0.0)
    assert (told["settled"], told["router"]) == (False, None)


def test_every_field_is_described() -> None:
    text = (ROOT / "docs" / "deploy.md").read_text()
    section = text.split("## Watching the cluster from a program")[1].split("\n## ")[0]
    own = {"state", "serve", *(field.name for field in fields(ClusterFile))}
    missing = (own | _names(supervisor_pb2.Cluster.DESCRIPTOR)) - set(re.findall(r"`(\w+)`", section))
    assert not missing


def _names(message: Descriptor) -> set[str]:
    if message.GetOptions().map_entry:
        return set()
    own = {field.name for field in message.fields}
    return own.union(*(_names(field.message_type) for field in message.fields if field.message_type is not None))
