"""Ray's control store is killed: requests need no Ray, and `tandem serve` says what that means and ends in order."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest
from serving import Load, Serve, Stream

pytestmark = [pytest.mark.timeout(240), pytest.mark.faults]

SERVES_ON_S = 65.0


def test_requests_go_on_for_a_minute_and_the_end_is_in_order(tmp_path: Path) -> None:
    serve = Serve(tmp_path)
    try:
        serve.wait_ready()
        stream = Stream(serve, max_tokens=450)
        stream.wait_for_token()
        with Load(serve, num_clients=1) as load:
            (store,) = [p for p in serve.processes() if p.name() == "gcs_server"]
            store.kill()
            killed = time.monotonic()
            said = serve.wait_for("its control store at", timeout_s=20)
            assert "nothing that ends now is started again; in 120 s Tandem stops in order" in said
            stream.join()
            assert (stream.error, stream.finish) == (None, "length")
            while (left_s := killed + SERVES_ON_S - time.monotonic()) > 0:
                num_before = len(load.responses)
                time.sleep(min(10.0, left_s))
                assert len(load.responses) > num_before, "requests have stopped being answered"
        assert load.failures == []
        # What ends now stays away, so the whole stops, as it said; the proof of the end does not need Ray either.
        psutil.Process(serve.members()["prefill-0"]["pid"]).kill()
        serve.wait_for("something has ended that cannot be started again without Ray", timeout_s=20)
        assert serve.process.wait(timeout=60) == 1
        assert "Ray's control store ended" in serve.lines[-1]
        assert "Traceback" not in serve.output
        assert serve.processes() == []
    finally:
        serve.clean_up()
