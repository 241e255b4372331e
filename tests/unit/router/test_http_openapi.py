"""The HTTP face against its own OpenAPI document: what it allows and what it forbids, by schemathesis.

Every answer must have a documented status, headers and body; no 5xx but for a request's own `timeout`; what the
document forbids is refused. The seed is fixed: the same cases in each run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import CHECKS

from tests.support.pooling_models import write_modules
from tests.support.router_site import EOS, Site, in_background, opened_site

POSTS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens")
POOLING = ("/v1/embeddings", "/score", "/v1/score")
TOKENIZING = ("/tokenize", "/detokenize")
GETS = (
    "/", "/v1/models", "/v1/models/{model}", "/v1/cluster", "/health", "/ping", "/load", "/version", "/openapi.json",
    "/metrics",
)  # fmt: skip
REQUEST = "/v1/requests/{id}"
EXPLAIN = "/v1/requests/{id}/explain"
ENDLESS = "/v1/events"

#: What JSON Schema cannot say: it depends on the model, or on another field. All else that is allowed must be taken.
FIELDS_THAT_DEPEND = {
    "prompt", "messages",  # the context
    "max_tokens", "max_completion_tokens", "min_tokens", "logit_bias", "stop_token_ids", "allowed_token_ids",
    "stream_options", "top_logprobs", "tool_choice", "thinking", "enable_thinking", "input", "max_output_tokens",
    "system", "prompt_logprobs", "best_of", "documents", "add_generation_prompt", "continue_final_message", "tokens",
    "ignore_eos", "structured_outputs",  # beside a form
    # What no grammar can be made of.
    "response_format.json_schema.schema", "structured_outputs.json", "structured_outputs.regex",
    "structured_outputs.grammar", "structured_outputs.json_object",
    "text_1", "text_2", "dimensions",  # how many the one and the other have; the model's own
}  # fmt: skip

bounded = settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def site(checkpoint: Path) -> Iterator[Site]:
    """Any model name will do, and answers are short: the fourth token ends them."""
    with opened_site(checkpoint, {"model.served_names": ["*"]}) as site:
        site.prefill.script = site.decode.script = lambda prompt, choice, index: [97, 98, 99, EOS][min(index, 3)]
        yield site


@pytest.fixture(scope="module")
def pooling_site(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("models") / "embedder"
    shutil.copytree(checkpoint, directory)
    write_modules(directory, "last")
    with opened_site(directory, {"model.served_names": ["*"]}) as site:
        yield site


@pytest.fixture(scope="module")
def schema(site: Site) -> schemathesis.BaseSchema:
    found = schemathesis.openapi.from_dict(document(site))
    found.config.max_stream_events = MOST_EVENTS
    return found


def document(site: Site) -> dict[str, Any]:
    described: dict[str, Any] = httpx.get(f"{site.url}/openapi.json").json()
    return described


#: Of one stream; schemathesis leaves after a hundred otherwise.
MOST_EVENTS = 1_000_000


def check(site: Site, case: Case) -> Any:
    """Send it; all of schemathesis' checks but the one for which `FIELDS_THAT_DEPEND` is here."""
    response = case.call(base_url=site.url, timeout=10)
    assert not response.stream_cut_short, "schemathesis went away before the end"
    excluded = {"positive_data_acceptance"}
    if response.status_code == 504:  # a `timeout` of nearly nothing passes: documented, and no defect
        excluded.add("not_a_server_error")
    case.validate_response(response, excluded_checks=[c for c in CHECKS.get_all() if c.__name__ in excluded])
    return response


def test_the_document_is_sound_and_names_every_route(site: Site, schema: schemathesis.BaseSchema) -> None:
    schema.validate()
    assert set(document(site)["paths"]) == {*POSTS, *POOLING, *TOKENIZING, *GETS, REQUEST, EXPLAIN, ENDLESS}


def boundary_cases(schema: schemathesis.BaseSchema, path: str, method: str, mode: GenerationMode) -> Iterator[Case]:
    """Schemathesis' own enumeration of a field's bounds and kinds, one field at a time.

    Not a wrong `Content-Type` of a right body: bodies are JSON whatever their head calls them.
    """
    operation = schema[path][method]
    config = operation.schema.config.generation_for(operation=operation)
    for case in schema.iter_coverage_cases(operation, generation_modes=[mode], generation_config=config):
        if "Content-Type" not in (case.headers or {}):
            yield case


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.parametrize("path", [*POSTS, *TOKENIZING])
@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.faults)])
def test_what_the_document_allows_is_taken(site: Site, schema: schemathesis.BaseSchema, path: str, every: int) -> None:
    check_allowed(site, schema, path, every)


@pytest.mark.long
@pytest.mark.parametrize("path", ["/v1/embeddings", pytest.param("/score", marks=pytest.mark.faults), "/v1/score"])
def test_the_same_of_what_a_model_that_pools_answers(pooling_site: Site, path: str) -> None:
    described = schemathesis.openapi.from_dict(document(pooling_site))
    check_allowed(pooling_site, described, path)
    check_forbidden(pooling_site, described, path)


def check_allowed(site: Site, schema: schemathesis.BaseSchema, path: str, every: int = 1) -> None:
    """Of one case of so many."""
    statuses = []

    def allowed(case: Case) -> None:
        response = check(site, case)
        statuses.append(response.status_code)
        if response.status_code == 200:
            check_answer(site, path, case.body, response.text)
            return
        is_refused = response.status_code == 429 and "cannot be met" in response.text
        assert is_refused or response.status_code in (400, 504), response.text
        if response.status_code == 400:
            field = response.json()["error"]["param"]
            assert field.split("[")[0] in FIELDS_THAT_DEPEND, response.text

    for case in islice(boundary_cases(schema, path, "POST", GenerationMode.POSITIVE), 0, None, every):
        allowed(case)
    bounded(given(case=schema[path]["POST"].as_strategy(generation_mode=GenerationMode.POSITIVE))(allowed))()
    assert statuses.count(200) >= 12, "hardly a case was served: the test shows little"


def check_answer(site: Site, path: str, body: Any, text: str) -> None:
    """What schemathesis does not look into: the events of a stream, each against its schema."""
    if path in (*TOKENIZING, *POOLING) or not body.get("stream"):
        return
    frames = text.split("\n\n")
    if "completions" in path:
        assert frames.pop(-2) == "data: [DONE]"
    assert frames.pop() == ""
    answer = DOCUMENT[0]["paths"][path]["post"]["responses"]["200"]
    name = answer["content"]["text/event-stream"]["x-event"]["$ref"].rsplit("/", 1)[1]
    for frame in frames:
        jsonschema.validate(
            json.loads(frame.split("data: ", 1)[1]),
            {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT[0]["components"]},
        )


#: Making up what is forbidden takes seconds, and test_request_fields.py has the same of each body without HTTP. But in
#: `make test-faults` one large body stands for all.
FORBIDDEN = ("/v1/chat/completions", *TOKENIZING)


@pytest.mark.long
@pytest.mark.parametrize(
    "path", [*FORBIDDEN, *(pytest.param(path, marks=pytest.mark.faults) for path in POSTS if path not in FORBIDDEN)]
)
def test_what_the_document_forbids_is_refused(site: Site, schema: schemathesis.BaseSchema, path: str) -> None:
    check_forbidden(site, schema, path)


def check_forbidden(site: Site, schema: schemathesis.BaseSchema, path: str) -> None:
    num_started = site.prefill.count("start")
    statuses = []

    def forbidden(case: Case) -> None:
        if "json" not in (case.headers or {}).get("Content-Type", "json") and path in TOKENIZING:
            return  # a body is read as JSON, whatever its head calls it
        response = check(site, case)
        statuses.append(response.status_code)
        assert response.status_code in (400, 405, 413), response.text

    for case in boundary_cases(schema, path, "POST", GenerationMode.NEGATIVE):
        forbidden(case)
    bounded(given(case=schema[path]["POST"].as_strategy(generation_mode=GenerationMode.NEGATIVE))(forbidden))()
    assert statuses.count(400) > 10
    assert site.prefill.count("start") == num_started


@pytest.mark.parametrize("path", GETS)
def test_what_is_read_has_its_documented_shape(site: Site, schema: schemathesis.BaseSchema, path: str) -> None:
    statuses = []

    @bounded
    @given(case=schema[path]["GET"].as_strategy(generation_mode=GenerationMode.POSITIVE))
    def run(case: Case) -> None:
        statuses.append(check(site, case).status_code)

    run()
    assert 200 in statuses
    assert set(statuses) <= {200, 404}


def test_what_is_told_of_a_request_has_its_documented_shape(site: Site, schema: schemathesis.BaseSchema) -> None:
    served = site.post(prompt="x", max_tokens=2).headers["x-request-id"]
    for path in (REQUEST, EXPLAIN):
        assert check(site, schema[path]["GET"].Case(path_parameters={"id": served})).status_code == 200
    statuses = []

    @bounded
    @given(case=schema[REQUEST]["GET"].as_strategy(generation_mode=GenerationMode.POSITIVE))
    def run(case: Case) -> None:
        statuses.append(check(site, case).status_code)

    run()
    assert set(statuses) == {404}


def refused(site: Site, status: int, **request: Any) -> None:
    """A request's refusal with this status is as documented: its headers and its body."""
    operation = schemathesis.openapi.from_dict(DOCUMENT[0])["/v1/completions"]["POST"]
    response = httpx.post(f"{site.url}/v1/completions", timeout=10, **request)
    assert response.status_code == status
    assert str(status) in DOCUMENT[0]["paths"]["/v1/completions"]["post"]["responses"]
    operation.validate_response(response)
    assert {"x-request-id", "x-should-retry"} <= response.headers.keys()


BODY = {"model": "toy", "prompt": "x"}
DOCUMENT: list[dict[str, Any]] = []


@pytest.fixture(autouse=True)
def _document(site: Site) -> None:
    DOCUMENT[:] = [document(site)]


@pytest.mark.long
def test_refusals_are_as_documented(checkpoint: Path, tmp_path: Path) -> None:
    with opened_site(checkpoint, {"limits.max_body_bytes": 1024}, with_workers=False) as other:
        refused(other, 503, json=BODY)
        refused(other, 413, content=b"x" * 2000)
        refused(other, 404, json={**BODY, "model": "none"})
        refused(other, 415, json=BODY, headers={"content-encoding": "gzip"})
        refused(other, 431, json=BODY, headers={"x-long": "x" * 40_000})
    keys = tmp_path / "keys"
    keys.write_text("sk-0123456789abcdef")
    keys.chmod(0o600)
    with opened_site(checkpoint, {"http.api_keys_file": str(keys)}, with_workers=False) as other:
        refused(other, 401, json=BODY)
    with opened_site(checkpoint, {"scheduling.max_queued_requests": 1}) as other:
        other.prefill.auto = other.decode.auto = False
        under_way = in_background(other, timeout=1.0)
        other.prefill.wait_for("start")
        refused(other, 429, json=BODY)
        assert under_way.result().status_code == 504
