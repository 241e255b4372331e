"""`metrics.vllm_names`: the names that boards and load generators for vLLM look for, with figures of real requests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.router_site import Site


def test_what_was_made_for_vllm_finds_its_figures(make_site: Callable[..., Site]) -> None:
    site = make_site({"metrics.vllm_names": True})
    site.until_shown("decode-0", state="ready")
    assert site.post(prompt="xyz", max_tokens=4, n=2).status_code == 200
    told = site.metrics()
    named = {name.split("{")[0] for name in told if name.startswith("vllm:")}
    assert named >= {
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
        "vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total",
        "vllm:num_preemptions_total",
        "vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total", "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_sum", "vllm:time_per_output_token_seconds_count",
        "vllm:e2e_request_latency_seconds_bucket", "vllm:request_queue_time_seconds_count",
        "vllm:request_prefill_time_seconds_sum", "vllm:request_decode_time_seconds_sum",
    }  # fmt: skip
    labels = 'engine="0",model_name="toy"'
    assert told[f"vllm:generation_tokens_total{{{labels}}}"] == told["tandem_output_tokens_total"] == 8
    assert told[f"vllm:prompt_tokens_total{{{labels}}}"] == told["tandem_prompt_tokens_total"] > 2
    assert told['vllm:request_success_total{engine="0",finished_reason="length",model_name="toy"}'] == 2
    assert told[f"vllm:e2e_request_latency_seconds_count{{{labels}}}"] == told["tandem_request_seconds_count"] == 1
    assert told['vllm:e2e_request_latency_seconds_bucket{engine="0",le="+Inf",model_name="toy"}'] == 1
    assert told[f"vllm:e2e_request_latency_seconds_sum{{{labels}}}"] == pytest.approx(
        told["tandem_request_seconds_sum"]
    )
    assert 0 < told[f"vllm:kv_cache_usage_perc{{{labels}}}"] < 1


def test_without_the_key_there_are_none(site: Site) -> None:
    assert not [name for name in site.metrics() if name.startswith("vllm:")]
