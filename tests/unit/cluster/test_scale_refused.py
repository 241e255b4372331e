"""What `tandem scale` is told by the supervisor's service when a size makes no sense for the checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from tandem.cluster.spec import ClusterSpec
from tandem.cluster.supervisor.service import SupervisorService
from tandem.core.identity import Role
from tandem.rpc.channel import make_channel
from tandem.rpc.v1 import supervisor_pb2, supervisor_pb2_grpc
from tests.support.grpc_server import serving
from tests.support.pooling_models import write_modules
from tests.support.scripted_processes import processes, supervising, until_change


async def test_a_checkpoint_that_gives_vectors_keeps_its_prefill_workers(tmp_path: Path, spec: ClusterSpec) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_modules(tmp_path, "last")
    embedding = replace(spec, model_dir=str(tmp_path))
    add = supervisor_pb2_grpc.add_SupervisorControlServicer_to_server
    async with processes() as world, supervising(world) as supervisor:
        await until_change(supervisor, lambda: supervisor.cluster.settled)
        async with (
            serving(add, SupervisorService(supervisor, embedding)) as port,
            make_channel(f"127.0.0.1:{port}") as channel,
        ):
            stub = supervisor_pb2_grpc.SupervisorControlStub(channel)
            reply = await stub.Scale(supervisor_pb2.ScaleRequest(prefill=0), timeout=10)
        assert reply.error.field == "prefill"
        assert "m gives vectors, which prefill workers alone make" in reply.error.message
        assert supervisor.cluster.wanted[Role.PREFILL] == 1
