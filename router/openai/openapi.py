"""The OpenAPI document of the HTTP face, as `GET /openapi.json` serves it.

It says what `router.openai.schema` takes and refuses so far as JSON Schema can; what needs the model (context,
vocabulary) or two fields at once is in the descriptions and answered with 400. Tests send what it allows and what it
forbids (`tests/unit/router/test_http_openapi.py`), so it cannot drift from the code.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from router.openai.known_fields import ACCEPTED, EMPTY, KNOWN_FIELDS, REASONING, STREAM_OPTIONS, Rule
from router.openai.model_card import ModelCard
from router.openai.schema import MAX_SEED, MAX_STOPS, MAX_TIMEOUT_S, MESSAGE_ROLES
from tandem.core.config import Config, LimitsConfig
from tandem.core.version import version

Schema = dict[str, Any]

_MAX_INT32 = (1 << 31) - 1

_STATUSES = {
    400: "The request is wrong; `param` names the field. `context_length_exceeded`: it does not fit the context.",
    401: "No valid API key.",
    404: "The model or path is not served here.",
    405: "The path has no such method.",
    408: "Head or body of the request did not arrive in time.",
    413: "The body is larger than `limits.max_body_bytes`.",
    415: "The body has a `Content-Encoding`; send it as it is.",
    429: "Too many requests wait; `Retry-After` says for how many seconds to stay away.",
    431: "The head of the request is too large.",
    499: "The request was cancelled.",
    500: "A defect, or two workers died of this request.",
    502: "Workers were lost while they served the request, more often than it is tried again.",
    503: "No worker is ready, the router is shutting down, or too many connections are open.",
    504: "The request's own `timeout` passed.",
}
_EVERYWHERE = (400, 401, 408, 431, 503)
_GENERATING = (404, 413, 415, 429, 499, 500, 502, 504)


def document(config: Config, card: ModelCard) -> Schema:
    """The document for a router with this configuration and model."""
    limits = config.limits
    paths = {
        "/v1/completions": {"post": _generating("completion", "CompletionRequest", "Completion", "CompletionChunk")},
        "/v1/chat/completions": {"post": _generating("chat", "ChatRequest", "ChatCompletion", "ChatChunk")},
        "/": {"get": _welcome()},
        "/v1/models": {"get": _reading("models", "The served models.", _ref("Models"))},
        "/v1/models/{model}": {
            "get": {
                **_reading("model", "One served model.", _ref("Model"), (404,)),
                "parameters": [{"name": "model", "in": "path", "required": True, "schema": _MODEL_NAME}],
            }
        },
        "/v1/cluster": {"get": _reading("cluster", "The workers and what they do.", _ref("Cluster"))},
        "/health": {"get": {**_reading("health", "200 where requests can be served.", _ref("Health")), "security": []}},
        "/openapi.json": {"get": _reading("openapi", "This document.", {"type": "object"})},
    }
    if config.metrics.enabled:
        paths["/metrics"] = {"get": _metrics()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tandem", "version": version(), "description": "OpenAI's API, served by Tandem's router."},
        "paths": paths,
        "security": [{"bearer": []}, {}],
        "components": {
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
            "headers": _HEADERS,
            "schemas": {
                "CompletionRequest": _completion_request(limits, card),
                "ChatRequest": _chat_request(limits, card),
                **_ANSWERS,
            },
        },
    }


#: Without a name the path is that of all models.
_MODEL_NAME: Schema = {"type": "string", "pattern": "[^/]"}


# -- operations


def _generating(operation: str, request: str, whole: str, chunk: str) -> Schema:
    event = f"Server-sent events: `data: ` and a {chunk}, one a delta; the last is `data: [DONE]`, or an Error alone."
    return {
        "operationId": operation,
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(request)}}},
        "responses": {
            "200": {
                "description": f"The answer. With `stream`: {event}",
                "headers": {**_REQUEST_ID, "tandem-ignored-fields": _header("IgnoredFields")},
                "content": {
                    "application/json": {"schema": _ref(whole)},
                    "text/event-stream": {"x-event": _ref(chunk)},  # OpenAPI 3.1 has no word for the events' schema
                },
            },
            **_errors((*_EVERYWHERE, *_GENERATING)),
        },
    }


def _reading(operation: str, what: str, schema: Schema, statuses: Iterable[int] = ()) -> Schema:
    content = {"application/json": {"schema": schema}}
    ok = {"description": what, "headers": _REQUEST_ID, "content": content}
    return {"operationId": operation, "responses": {"200": ok, **_errors((*_EVERYWHERE, *statuses))}}


def _welcome() -> Schema:
    said = _reading("welcome", "What this is, and what is served; JSON where `Accept` names it.", _ref("Welcome"))
    said["responses"]["200"]["content"]["text/plain"] = {"schema": {"type": "string"}}
    return said


def _metrics() -> Schema:
    ok = {
        "description": "Prometheus' text format.",
        "headers": _REQUEST_ID,
        "content": {"text/plain": {"schema": {"type": "string"}}},
    }
    return {"operationId": "metrics", "responses": {"200": ok, **_errors(_EVERYWHERE)}}


def _errors(statuses: Iterable[int]) -> Schema:
    return {str(status): _error(status) for status in sorted(statuses)}


def _error(status: int) -> Schema:
    headers = {**_REQUEST_ID, "x-should-retry": _header("ShouldRetry")}
    if status in (429, 503):
        headers["retry-after"] = _header("RetryAfter")
    if status == 401:
        headers["www-authenticate"] = _header("Authenticate")
    content = {"application/json": {"schema": _ref("Error")}}
    return {"description": _STATUSES[status], "headers": headers, "content": content}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _header(name: str) -> Schema:
    return {"$ref": f"#/components/headers/{name}"}


_HEADERS: Schema = {
    "RequestId": {"description": "The id in every log line of the request.", "schema": {"type": "string"}},
    "RetryAfter": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}},
    "ShouldRetry": {"description": "As `retryable`.", "schema": {"enum": ["true", "false"]}},
    "Authenticate": {"description": "How to authenticate.", "schema": {"const": "Bearer"}},
    "IgnoredFields": {"description": "Fields of the request that nobody knows.", "schema": {"type": "string"}},
}
_REQUEST_ID = {"x-request-id": _header("RequestId")}


# -- requests. `null` counts as absent, as in OpenAI's API; fields that are not listed are ignored, and named.


def _maybe(schema: Schema) -> Schema:
    if "type" in schema:
        return {**schema, "type": [schema["type"], "null"]}
    return {"anyOf": [schema, {"type": "null"}]}


def _integer(minimum: int, maximum: int | None = None, description: str = "") -> Schema:
    bounds = {"minimum": minimum} | ({"maximum": maximum} if maximum is not None else {})
    return _maybe({"type": "integer", **bounds} | ({"description": description} if description else {}))


def _number(**bounds: float) -> Schema:
    return _maybe({"type": "number", **bounds})


def _known(rule: Rule) -> Schema:
    """A field that is known and not obeyed."""
    if rule is ACCEPTED:
        return {"description": "Accepted; it does not change the answer."}
    if rule is REASONING:
        return {"description": "Accepted where the model's chat template has no switch for reasoning; else refused."}
    assert isinstance(rule, tuple)
    return {"enum": [*rule, *EMPTY], "description": "Not supported yet: only what asks for nothing is taken."}


_SEED = (
    "64 bits, with or without sign. It holds for every prompt of the body, so equal prompts get equal samples; "
    "without one, each prompt draws its own. The `n` choices of a prompt always differ."
)
_BOOLEAN = _maybe({"type": "boolean"})
_SPECIAL_TOKENS = {
    **_BOOLEAN,
    "description": "Whether the tokenizer adds its own (a BOS, say) to a text. Absent: to the prompt of a completion, "
    "not to a chat, whose template writes them.",
}
_TOKEN_ID: Schema = {"type": "integer", "minimum": 0}


def _common(limits: LimitsConfig, card: ModelCard) -> Schema:
    """The fields that both endpoints share."""
    token_id = {**_TOKEN_ID, "maximum": card.vocab_size - 1}
    text = {"type": "string", "minLength": 1}
    return {
        "model": {"type": "string", "minLength": 1, "description": "A name of GET /v1/models."},
        "max_tokens": _integer(1, None, "With the prompt at most the context."),
        "min_tokens": _integer(0, _MAX_INT32, "At most `max_tokens`."),
        "n": _integer(1, limits.max_choices),
        "stop": _maybe({"anyOf": [text, {"type": "array", "items": text, "maxItems": MAX_STOPS}]}),
        "stop_token_ids": _maybe({"type": "array", "items": token_id}),
        "stream": _BOOLEAN,
        "stream_options": _maybe(
            {
                "type": "object",
                "description": "Needs `stream`.",
                "properties": {
                    "include_usage": _BOOLEAN,
                    **{name: _known(rule) for name, rule in STREAM_OPTIONS.items()},
                },
            }
        ),
        "temperature": _number(minimum=0, maximum=100),
        "top_p": _number(exclusiveMinimum=0, maximum=1),
        "top_k": _integer(-1, _MAX_INT32),
        "min_p": _number(minimum=0, maximum=1),
        "repetition_penalty": _number(exclusiveMinimum=0, maximum=100),
        "presence_penalty": _number(minimum=-2, maximum=2),
        "frequency_penalty": _number(minimum=-2, maximum=2),
        "logit_bias": _maybe(
            {
                "type": "object",
                "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$", "description": "A token id."},
                "additionalProperties": _number(minimum=-100, maximum=100),
            }
        ),
        "seed": _integer(-(1 << 63), MAX_SEED, _SEED),
        "ignore_eos": _BOOLEAN,
        "return_token_ids": _BOOLEAN,
        "priority": _integer(limits.most_urgent_priority, _MAX_INT32, "Lower is more urgent."),
        "timeout": _maybe(
            {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TIMEOUT_S, "description": "Seconds; then 504."}
        ),
        "add_special_tokens": _SPECIAL_TOKENS,
        **{name: _known(rule) for name, rule in KNOWN_FIELDS.items()},
    }


def _completion_request(limits: LimitsConfig, card: ModelCard) -> Schema:
    text = {"type": "string", "minLength": 1}
    ids = {"type": "array", "items": {**_TOKEN_ID, "maximum": card.vocab_size - 1}, "minItems": 1}
    several = {"type": "array", "items": {"anyOf": [text, ids]}, "minItems": 1}
    own = {
        "prompt": {"anyOf": [text, ids, several], "description": "One prompt, or a list: each is a request."},
        "logprobs": _integer(0, limits.max_logprobs),
    }
    return {"type": "object", "required": ["model", "prompt"], "properties": {**_common(limits, card), **own}}


def _chat_request(limits: LimitsConfig, card: ModelCard) -> Schema:
    own = {
        "messages": {"type": "array", "minItems": 1, "items": _message(card)},
        "max_completion_tokens": _integer(1, None, "Goes before `max_tokens`."),
        "logprobs": _BOOLEAN,
        "top_logprobs": _integer(0, limits.max_logprobs, "Needs `logprobs`."),
    }
    return {"type": "object", "required": ["model", "messages"], "properties": {**_common(limits, card), **own}}


_PART: Schema = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "object",
            "required": ["type", "text"],
            "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        },
    ]
}


def _message(card: ModelCard) -> Schema:
    return {
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "role": {"enum": [role for role in MESSAGE_ROLES if role not in card.refused_roles]},
            "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]},
        },
    }


# -- answers


def _object(required: Schema, optional: Schema | None = None) -> Schema:
    properties = {**required, **(optional or {})}
    return {"type": "object", "required": list(required), "properties": properties, "additionalProperties": False}


_COUNT: Schema = {"type": "integer", "minimum": 0}
_TEXT: Schema = {"type": "string"}
_IDS: Schema = {"type": "array", "items": _TOKEN_ID}
_FINISH_REASON: Schema = {"enum": ["stop", "length", None]}
_USAGE = _object(
    {"prompt_tokens": _COUNT, "completion_tokens": _COUNT, "total_tokens": _COUNT},
    {"prompt_tokens_details": _object({"cached_tokens": _COUNT})},
)
_WORKER = {"type": "object", "required": ["id", "incarnation", "state", "pages"]}


def _choice(shape: Schema, extra: Schema) -> Schema:
    logprobs = _maybe({"type": "object"})
    return _object({"index": _COUNT, **shape, "logprobs": logprobs, "finish_reason": _FINISH_REASON}, extra)


def _answer(kind: str, choice: Schema, *, is_chunk: bool = False) -> Schema:
    base = {"id": _TEXT, "created": _COUNT, "model": _TEXT, "object": {"const": kind}}
    choices: Schema = {"choices": {"type": "array", "items": choice}}
    if is_chunk:
        return _object({**base, **choices}, {"usage": _maybe(_USAGE)})
    return _object({**base, **choices, "usage": _USAGE})


_WHOLE_IDS = {"token_ids": _IDS, "prompt_token_ids": _IDS}
_CHUNK_IDS = {"token_ids": _IDS}
_SAID = _object({"role": {"const": "assistant"}, "content": _TEXT, "refusal": {"type": "null"}})
_DELTA = _object({}, {"role": {"const": "assistant"}, "content": _TEXT})

_MODEL = _object(
    {
        "id": _TEXT,
        "object": {"const": "model"},
        "created": _COUNT,
        "owned_by": _TEXT,
        "root": {**_TEXT, "description": "The checkpoint: a hub id, or the name of its directory."},
        "parent": {"type": "null"},
        "max_model_len": _maybe(_COUNT),
    }
)
_ANSWERS: Schema = {
    "Completion": _answer("text_completion", _choice({"text": _TEXT}, _WHOLE_IDS)),
    "CompletionChunk": _answer("text_completion", _choice({"text": _TEXT}, _CHUNK_IDS), is_chunk=True),
    "ChatCompletion": _answer("chat.completion", _choice({"message": _SAID}, _WHOLE_IDS)),
    "ChatChunk": _answer("chat.completion.chunk", _choice({"delta": _DELTA}, _CHUNK_IDS), is_chunk=True),
    "Model": _MODEL,
    "Models": _object({"object": {"const": "list"}, "data": {"type": "array", "items": _ref("Model")}}),
    "Welcome": _object(
        {"name": {"const": "tandem"}, "version": _TEXT, "model": _TEXT, "endpoints": {"type": "array", "items": _TEXT}}
    ),
    "Health": _object({"status": {"const": "ok"}}),
    "Cluster": {
        "type": "object",
        "required": ["model", "membership_version", "prefill", "decode"],
        "properties": {
            "model": _TEXT,
            "membership_version": _COUNT,
            "prefill": {"type": "array", "items": _WORKER},
            "decode": {"type": "array", "items": _WORKER},
        },
    },
    "Error": _object(
        {
            "error": _object(
                {
                    "message": _TEXT,
                    "type": _TEXT,
                    "param": _maybe(_TEXT),
                    "code": _TEXT,
                    "request_id": _TEXT,
                    "retryable": {"type": "boolean"},
                }
            )
        }
    ),
}
