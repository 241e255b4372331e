"""What the router tells its supervisor of requests that were refused or failed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from router.lifecycle.request_errors import RequestErrors
from tandem.core.errors import CancelledError, ModelNotFoundError
from tandem.rpc.v1.common_pb2 import RequestErrors as Told
from tandem.rpc.v1.control_pb2 import RouterStatusRequest
from tests.support.router_site import Site, in_background
from tests.support.waiting import wait_until

MakeSite = Callable[..., Site]


def told(site: Site) -> Told:
    return site.pool.control.RouterStatus(RouterStatusRequest(), timeout=15).errors


def counts(errors: Told) -> dict[tuple[str, int], int]:
    return {(kind.code, kind.http_status): kind.count for kind in errors.counts}


def test_errors_are_counted_by_kind_and_the_newest_is_told(make_site: MakeSite) -> None:
    site = make_site()
    assert site.post(prompt="x", max_tokens=1).status_code == 200
    assert counts(told(site)) == {}
    refused = [site.post(prompt="x", max_tokens=-1) for _ in range(2)]
    assert site.post("/v1/nothing").status_code == 404
    with site.http() as client:
        assert client.put("/v1/completions").status_code == 405
        assert client.get("/v1/models/other").status_code == 404
    assert counts(told(site)) == {
        ("invalid_request", 400): 2,
        ("not_found", 404): 1,
        ("method_not_allowed", 405): 1,
        ("model_not_found", 404): 1,
    }
    refused.append(site.post(prompt="x", max_tokens=-1))
    newest, seen = told(site).newest, refused[-1].json()["error"]
    assert (newest.code, newest.message, newest.request_id) == (seen["code"], seen["message"], seen["request_id"])


def test_requests_without_a_worker_are_told_and_probes_are_not(make_site: MakeSite) -> None:
    site = make_site(with_workers=False)
    with site.http() as client:
        assert client.get("/health").status_code == 503
    assert counts(told(site)) == {}
    assert site.post(prompt="x").status_code == 503
    assert counts(told(site)) == {("no_worker", 503): 1}


@pytest.mark.long
def test_a_stream_that_breaks_off_is_told(make_site: MakeSite) -> None:
    site = make_site()
    site.decode.auto = False
    failing = in_background(site, stream=True, timeout=0.5)
    assert '"code":"deadline"' in failing.result().text
    wait_until(lambda: counts(told(site)), "the deadline", wanted=lambda seen: seen == {("deadline", 504): 1})


def test_a_wrong_key_is_told(make_site: MakeSite, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-first-0123456789")
    file.chmod(0o600)
    site = make_site({"http.api_keys_file": str(file)}, with_workers=False)
    assert site.post(prompt="x").status_code == 401
    assert counts(told(site)) == {("invalid_api_key", 401): 1}


def test_a_message_that_quotes_the_client_is_plain_text_of_bounded_length() -> None:
    errors = RequestErrors()
    errors.add(ModelNotFoundError("the model \x1b[31m\ud800 is not served" + "!" * 1000), "r-1")
    message = errors.to_wire().newest.message
    assert message.startswith("the model ?[31m? is not served!!!")
    assert len(message) == 300


def test_a_client_that_went_away_got_no_error() -> None:
    errors = RequestErrors()
    errors.add(CancelledError("cancelled: the client went away"), "r-1")
    assert errors.to_wire() == Told()
