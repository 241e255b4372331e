"""What clients, browsers and people ask beside requests: HEAD, other methods, odd paths, CORS, the page at `/`."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from router.workers.registry import WorkerRegistry
from tandem.core.logging import bound_values
from tests.support.router_site import Site
from tests.support.waiting import wait_until

MakeSite = Callable[..., Site]
READ = ("/", "/health", "/metrics", "/v1/models", "/v1/models/toy", "/v1/cluster", "/openapi.json")
KEY = "sk-first-0123456789"
PAGE = "https://app.example"


@pytest.mark.parametrize("path", READ)
def test_head_is_get_without_its_body(site: Site, path: str) -> None:
    with site.http() as client:
        head, whole = client.head(path), client.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]
    assert head.headers["x-request-id"]


def test_head_tells_of_health_too(make_site: MakeSite) -> None:
    site = make_site(with_workers=False)
    with site.http() as client:
        refused, unknown = client.head("/health"), client.head("/none")
    assert (refused.status_code, refused.content) == (503, b"")
    assert (unknown.status_code, unknown.content) == (404, b"")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/v1/models", "GET, HEAD"),
        ("DELETE", "/v1/models/toy", "GET, HEAD"),
        ("PUT", "/", "GET, HEAD"),
        ("GET", "/v1/completions", "POST"),
        ("OPTIONS", "/v1/chat/completions", "POST"),
    ],
)
def test_another_method_is_answered_with_what_is_allowed(site: Site, method: str, path: str, allowed: str) -> None:
    with site.http() as client:
        answer = client.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
    error = answer.json()["error"]
    assert error["code"] == "method_not_allowed"
    assert error["message"] == f"{method} '{path}' is not possible; allowed here: {allowed}"


# -- models


def test_a_models_card_has_what_vllms_has(site: Site) -> None:
    with site.http() as client:
        cards = client.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["toy", "toy/alias"]
    for card in cards:
        assert card.keys() == {"id", "object", "created", "owned_by", "root", "parent", "max_model_len"}
        assert (card["root"], card["parent"]) == ("tandem-tiny", None)


@pytest.mark.parametrize("path", ["/v1/models/", "/v1/models//", "/v1/models/?x=1"])
def test_models_with_a_slash_are_the_models(site: Site, path: str) -> None:
    with site.http() as client:
        assert client.get(path).json() == client.get("/v1/models").json()


def test_the_document_names_the_roles_that_the_model_knows(site: Site) -> None:
    with site.http() as client:
        schemas = client.get("/openapi.json").json()["components"]["schemas"]
    roles = schemas["ChatRequest"]["properties"]["messages"]["items"]["properties"]["role"]["enum"]
    assert roles == ["system", "developer", "user", "assistant"]


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("toy", 200),
        ("toy/", 200),
        ("toy/alias", 200),
        ("*", 404),
        ("%ff%00", 404),
        ("toy%0A", 404),
        ("%0A", 404),
        ("x" * 5000, 404),
    ],
)
def test_odd_names_of_models(site: Site, name: str, status: int) -> None:
    with site.http() as client:
        answer = client.get(f"/v1/models/{name}")
    assert answer.status_code == status
    if status == 200:
        assert answer.json()["id"] == name.rstrip("/")
    else:
        assert answer.json()["error"]["code"] == "model_not_found"
        assert len(answer.content) < 500


@pytest.mark.long
def test_where_any_name_is_served_each_is_a_name_of_the_same_model(make_site: MakeSite) -> None:
    site = make_site({"model.served_names": ["*"]}, with_workers=False)
    with site.http() as client:
        (listed,) = client.get("/v1/models/").json()["data"]
        named = client.get("/v1/models/gpt-x").json()
    assert (listed["id"], listed["root"]) == ("tandem-tiny", "tandem-tiny")
    assert (named["id"], named["root"]) == ("gpt-x", "tandem-tiny")


# -- the page at `/`


def test_a_person_is_told_what_this_is_and_what_to_try(site: Site) -> None:
    with site.http() as client:
        page = client.get("/")
        described = client.get("/openapi.json").json()["paths"]
    assert page.headers["content-type"].startswith("text/plain")
    assert "the model toy" in page.text
    assert f"curl {site.url}/v1/chat/completions -H" in page.text
    for path in described.keys() - {"/", "/v1/models/{model}"}:
        assert f"  {path} " in page.text


def test_the_curl_of_the_page_works(site: Site) -> None:
    with site.http() as client:
        command = client.get("/").text.split("curl ")[1]
        body = json.loads(command.split("-d '")[1].split("'")[0])
        answer = client.post(command.split()[0], json=body)
    assert answer.status_code == 200, answer.text


def test_a_program_is_told_in_json(make_site: MakeSite) -> None:
    site = make_site({"metrics.enabled": False}, with_workers=False)
    with site.http() as client:
        told = client.get("/", headers={"Accept": "application/json"}).json()
    assert (told["name"], told["model"]) == ("tandem", "toy")
    assert "/v1/completions" in told["endpoints"]
    assert "/metrics" not in told["endpoints"]


@pytest.mark.parametrize("host", [b"", b"a b", b"\xff", b"x:y:z", b"'; true '", b"[::1"])
def test_an_odd_host_breaks_nothing(site: Site, host: bytes) -> None:
    with site.http() as client:
        assert client.get("/", headers={b"Host": host}).status_code in (200, 400)


# -- browsers


@pytest.fixture
def open_to_page(make_site: MakeSite, tmp_path: Path) -> Site:
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    keys.chmod(0o600)
    return make_site({"http.cors_origins": [PAGE], "http.api_keys_file": str(keys)})


def preflight(site: Site, origin: str, method: str = "POST") -> Any:
    asked = {"Access-Control-Request-Method": method, "Access-Control-Request-Headers": "authorization,x-stainless-os"}
    with site.http() as client:
        return client.options("/v1/chat/completions", headers={"Origin": origin, **asked})


def test_a_preflight_needs_no_key(open_to_page: Site) -> None:
    answer = preflight(open_to_page, PAGE)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert "x-stainless-os" in answer.headers["access-control-allow-headers"]
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize(("origin", "method"), [("https://other.example", "POST"), (PAGE, "PUT")])
def test_a_preflight_of_others_is_refused(open_to_page: Site, origin: str, method: str) -> None:
    answer = preflight(open_to_page, origin, method)
    assert answer.status_code == 400
    assert (answer.headers.get("access-control-allow-origin") == PAGE) == (origin == PAGE)


@pytest.mark.parametrize("stream", [False, True])
def test_answers_may_be_read_by_the_page_and_by_no_other(open_to_page: Site, stream: bool) -> None:
    body = {"model": "toy", "prompt": "x", "max_tokens": 3, "stream": stream}
    with open_to_page.http(headers={"Authorization": f"Bearer {KEY}"}) as client:
        mine = client.post("/v1/completions", json=body, headers={"Origin": PAGE})
        other = client.post("/v1/completions", json=body, headers={"Origin": "https://other.example"})
        refused = client.get("/v1/models", headers={"Origin": PAGE, "Authorization": "Bearer wrong"})
    assert mine.headers["access-control-allow-origin"] == PAGE
    assert "x-request-id" in mine.headers["access-control-expose-headers"]
    assert mine.text.endswith("data: [DONE]\n\n") == stream
    assert other.status_code == 200
    assert "access-control-allow-origin" not in other.headers
    # A page must be able to read why it was refused.
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE)


def test_any_origin_where_it_is_told_so_and_none_by_default(make_site: MakeSite, site: Site) -> None:
    anybody = make_site({"http.cors_origins": ["*"]}, with_workers=False)
    with anybody.http() as client:
        assert client.get("/v1/models", headers={"Origin": PAGE}).headers["access-control-allow-origin"] == "*"
    assert preflight(site, PAGE).status_code == 405
    with site.http() as client:
        assert "access-control-allow-origin" not in client.get("/v1/models", headers={"Origin": PAGE}).headers


class _Failures(logging.Handler):
    """The lines that tell of an exception, with what is bound to them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, Any]]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.seen.append((record.getMessage(), bound_values()))


def test_an_unforeseen_error_is_logged_once_under_the_id_that_the_client_gets(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerRegistry, "describe", lambda *_: 1 / 0)
    failures, root = _Failures(), logging.getLogger()
    root.addHandler(failures)
    try:
        with site.http(headers={"x-request-id": "r-9"}) as client:
            error = client.get("/v1/cluster").json()["error"]
            wait_until(lambda: failures.seen, "the failure in the log")
            assert client.get("/health").status_code == 200
    finally:
        root.removeHandler(failures)
    assert (error["code"], error["request_id"]) == ("internal", "r-9")
    assert "the log has it under r-9" in error["message"]
    assert failures.seen == [("unforeseen error in an exchange", {"request_id": "r-9"})]
