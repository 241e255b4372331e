"""What workers count is in the router's metrics once, whatever order their reports and lives come in."""

from __future__ import annotations

from router.workers.worker_counts import WorkerCounts
from tandem.core.identity import Role
from tandem.core.metrics import RouterMetrics
from tandem.rpc.v1.common_pb2 import WorkerStatus

COUNTED = {
    "decode_tokens": "tandem_decode_tokens_total",
    "preemptions": "tandem_preemptions_total",
    "mixed_steps": "tandem_mixed_steps_total",
    "mixed_s": "tandem_mixed_step_seconds_total",
    "prompt_tokens_computed": 'tandem_prompt_tokens_computed_total{role="decode"}',
    "prompt_tokens_cached": 'tandem_prompt_tokens_cached_total{role="decode"}',
    "masks": 'tandem_grammar_masks_total{role="decode"}',
    "mask_s": 'tandem_grammar_mask_seconds_total{role="decode"}',
    "late_masks": 'tandem_grammar_late_masks_total{role="decode"}',
    "slow_grammars": 'tandem_grammars_too_slow_total{role="decode"}',
    "guesses": 'tandem_guessed_tokens_total{source="lookup"}',
    "right_guesses": 'tandem_guessed_tokens_right_total{source="lookup"}',
    "drafts": 'tandem_guessed_tokens_total{source="draft"}',
    "right_drafts": 'tandem_guessed_tokens_right_total{source="draft"}',
    "transfer_bytes": 'tandem_kv_transfer_bytes_total{transport="shm"}',
}


def exported(metrics: RouterMetrics) -> dict[str, float]:
    lines = [line for line in metrics.exposition().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_each_count_goes_where_it_belongs_and_grows_by_what_is_new() -> None:
    metrics = RouterMetrics()
    counts = WorkerCounts(metrics, Role.DECODE, "shm")
    found = exported(metrics)
    assert {found[name] for name in COUNTED.values()} == {0.0}, "each is exported from a worker's first report on"
    first = {field: number for number, field in enumerate(COUNTED, start=1)}
    counts.take(WorkerStatus(**first, refused={"digest": 2}))
    then = {field: 3 * number for field, number in first.items()}
    counts.take(WorkerStatus(**then, refused={"digest": 5, "late": 1}))
    found = exported(metrics)
    assert {field: found[name] for field, name in COUNTED.items()} == then
    assert found['tandem_handoffs_refused_total{reason="digest"}'] == 5
    assert found['tandem_handoffs_refused_total{reason="late"}'] == 1


def test_another_life_counts_from_nothing_and_a_report_out_of_order_takes_nothing_back() -> None:
    metrics = RouterMetrics()
    WorkerCounts(metrics, Role.DECODE, "shm").take(WorkerStatus(decode_tokens=10))
    again = WorkerCounts(metrics, Role.DECODE, "shm")
    again.take(WorkerStatus(decode_tokens=7))
    assert again.take(WorkerStatus(decode_tokens=6)).decode_tokens == 7
    assert exported(metrics)["tandem_decode_tokens_total"] == 17
