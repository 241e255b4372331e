"""Workers whose engine computes nothing, and everything else as ever: 1P2D of real processes."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.scenarios.client import complete, events
from tests.scenarios.processes import running

TIMES = "prefill: {tokens: 20000}\ndecode: {tokens: 20000}\ntimes: fitted\nfitted: {base_ms: 8, token_us: 20}\n"
SCHEMA = {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 4, "maxItems": 9}


@pytest.mark.timeout(180)
def test_answers_survive_the_death_of_a_worker_and_say_that_they_mean_nothing(tmp_path: Path) -> None:
    (tmp_path / "times.yaml").write_text(TIMES)
    model = {"served_names": ["*"], "engine": "simulated", "time_model": str(tmp_path / "times.yaml")}
    with running(tmp_path, 1, 2, config={"model": model}) as cluster:
        listed = httpx.get(f"{cluster.url}/v1/models")
        assert listed.headers["x-tandem-simulated"] == "true"
        assert listed.json()["data"][0]["simulated"] is True

        ways: list[dict[str, Any]] = [
            {"temperature": 0},
            {"temperature": 0.8, "seed": 4},
            {"temperature": 1.0, "seed": 4, "structured_outputs": {"json": SCHEMA}, "ignore_eos": False},
        ]
        for fields in ways:
            fields.update({"max_tokens": 120, "ignore_eos": fields.get("ignore_eos", True)})
        expected = [complete(cluster.url, f"Tale {n}", **fields) for n, fields in enumerate(ways)]
        assert [len(answer.token_ids[0]) for answer in expected[:2]] == [120, 120]
        assert expected[2].finish_reasons == ["stop"], expected[2].texts
        assert set(json.loads(expected[2].texts[0])) <= {1, 2, 3}

        # The worker that serves the first of them dies in its midst: a new stream of it gives the same tokens.
        begun, found = threading.Event(), []

        def follow() -> None:
            for event in events(cluster.url, "Tale 0", **ways[0]):
                if event is not None:
                    found.extend(event["choices"][0]["token_ids"] or [])
                    begun.set()

        reader = threading.Thread(target=follow)
        reader.start()
        assert begun.wait(30)
        busy = [name for name, status in cluster.statuses().items() if name.startswith("decode") and status.num_running]
        cluster.workers[busy[0]].end()
        reader.join(60)
        assert [found] == expected[0].token_ids
        cluster.publish()
        for n, fields in enumerate(ways):
            assert complete(cluster.url, f"Tale {n}", **fields).token_ids == expected[n].token_ids
        cluster.wait_idle()
