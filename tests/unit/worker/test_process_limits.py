"""What a worker derives from its role, its place and the configuration, before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from decode_worker.worker import DecodeWorker
from prefill_worker.worker import PrefillWorker
from tandem.core.config import from_dict
from tandem.worker.process import WorkerProcess

_CORES = Path("cores")


def worker_of(
    role: type[WorkerProcess], core_shares: Path | None, device: str = "cpu", **scheduling: bool
) -> WorkerProcess:
    return role(
        from_dict({"scheduling": scheduling}),
        worker_id="w",
        incarnation="w.1",
        model_dir=Path("model"),
        kv_bytes=1,
        num_threads=1,
        core_shares=core_shares,
        device=device,
    )


def test_prompts_are_handed_off_in_twos_where_decode_has_a_core_to_give_and_no_prompts_of_its_own() -> None:
    assert worker_of(PrefillWorker, _CORES, mixed_pool=False).num_to_pair == 4


@pytest.mark.parametrize(
    "worker",
    [
        worker_of(PrefillWorker, _CORES, mixed_pool=True),
        worker_of(PrefillWorker, None, mixed_pool=False),
        worker_of(PrefillWorker, _CORES, mixed_pool=False, share_cores=False),
        worker_of(PrefillWorker, _CORES, device="cuda:0", mixed_pool=False),
        worker_of(DecodeWorker, _CORES, mixed_pool=False),
    ],
    ids=["mixed pool", "no shared cores", "sharing is off", "on a GPU", "decode"],
)
def test_elsewhere_they_are_handed_off_one_after_the_other(worker: WorkerProcess) -> None:
    assert worker.num_to_pair == 0
