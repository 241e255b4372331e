"""A batch outlives its router: with real processes, the router is killed in the middle and started again."""

from __future__ import annotations

import json
from pathlib import Path

import openai

from tests.scenarios.processes import running
from tests.support.waiting import wait_until

NUM = 60


def test_a_batch_goes_on_where_a_killed_router_left_it(tmp_path: Path) -> None:
    config = {"batches": {"directory": str(tmp_path / "batches")}}
    asked = [
        {"custom_id": f"r{n}", "method": "POST", "url": "/v1/completions",
         "body": {"model": "tandem-tiny", "prompt": f"Number {n} went to", "max_tokens": 24, "temperature": 0}}
        for n in range(NUM)
    ]  # fmt: skip
    with running(tmp_path, config=config) as cluster:
        client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=8)
        content = b"".join(json.dumps(line).encode() + b"\n" for line in asked)
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="1h")
        wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed, "some results", 60)
        cluster.router.end()
        cluster.start_router().wait_ready()
        cluster.publish()
        cluster.wait_healthy()
        before = client.batches.retrieve(batch.id)
        assert before.request_counts.completed > 0
        batch = wait_until(
            lambda: client.batches.retrieve(batch.id), "the end", 120, wanted=lambda b: b.status == "completed"
        )
        done = [json.loads(line) for line in client.files.content(batch.output_file_id or "").text.splitlines()]
        assert [line["custom_id"] for line in done] == [line["custom_id"] for line in asked]
        alone = client.completions.create(
            model="tandem-tiny", prompt=f"Number {NUM - 1} went to", max_tokens=24, temperature=0
        )
        assert done[-1]["response"]["body"]["choices"][0]["text"] == alone.choices[0].text
        cluster.wait_idle(30)
