"""Workers whose engine computes nothing, and everything else as ever: 1P2D of real processes."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.core.step_times import Terms
from tandem.sim.calibrate import fit, read_steps
from tests.scenarios.client import complete, events
from tests.scenarios.processes import running

TIMES = "prefill: {tokens: 20000}\ndecode: {tokens: 20000}\ntimes: fitted\nfitted: {base_ms: 20, token_us: 20}\n"
SCHEMA = {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 4, "maxItems": 9}


@pytest.mark.timeout(180)
def test_answers_survive_the_death_of_a_worker_and_say_that_they_mean_nothing(tmp_path: Path) -> None:
    (tmp_path / "times.yaml").write_text(TIMES)
    model = {"served_names": ["*"], "engine": "simulated", "time_model": str(tmp_path / "times.yaml")}
    config = {"model": model, "metrics": {"step_log": str(tmp_path / "steps")}}
    with running(tmp_path, 1, 2, config=config) as cluster:
        listed = httpx.get(f"{cluster.url}/v1/models")
        assert listed.headers["x-tandem-simulated"] == "true"
        assert listed.json()["data"][0]["simulated"] is True

        ways: list[dict[str, Any]] = [
            {"temperature": 0},
            {"temperature": 0.8, "seed": 4},
            {"temperature": 1.0, "seed": 4, "structured_outputs": {"json": SCHEMA}, "ignore_eos": False},
        ]
        for fields in ways:
            fields.update({"max_tokens": 60, "ignore_eos": fields.get("ignore_eos", True)})
        expected = [complete(cluster.url, f"Tale {n}", **fields) for n, fields in enumerate(ways)]
        assert [len(answer.token_ids[0]) for answer in expected[:2]] == [60, 60]
        assert expected[2].finish_reasons == ["stop"], expected[2].texts
        assert set(json.loads(expected[2].texts[0])) <= {1, 2, 3}

        # The worker that serves the first of them dies in its midst: a new stream of it gives the same tokens.
        begun, told = threading.Event(), []

        def follow() -> None:
            for event in events(cluster.url, "Tale 0", **ways[0]):
                if event is not None:
                    told.extend(event["choices"][0]["token_ids"] or [])
                    begun.set()

        reader = threading.Thread(target=follow)
        reader.start()
        assert begun.wait(30)
        busy: list[str] = []

        def generates() -> bool:
            statuses = cluster.statuses().items()
            busy[:] = [name for name, status in statuses if name.startswith("decode") and status.num_running]
            return bool(busy)

        cluster.wait_for(generates, "a decode worker that generates")
        cluster.workers[busy[0]].end()
        reader.join(60)
        assert [told] == expected[0].token_ids
        cluster.publish()
        for n, fields in enumerate(ways):
            assert complete(cluster.url, f"Tale {n}", **fields).token_ids == expected[n].token_ids
        cluster.wait_idle()
    # What the workers wrote of their steps gives back the times that these were told to take, and what is beside them.
    found = fit(read_steps([tmp_path / "steps"]))
    one, chunk = Terms(1, 1, 50, 50.0), Terms(64, 0, 64, 2080.0)
    assert 0.02 <= found.times.seconds(one) < 0.03
    assert found.times.seconds(chunk) >= 0.0205
