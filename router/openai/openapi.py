"""The OpenAPI document of the HTTP face, as `GET /openapi.json` serves it.

What it says of requests comes from the rows that read them (`router.openai.request_fields`), so far as JSON Schema can
say it; what needs the context or two fields at once is in the descriptions and answered with 400. Tests send what it
allows and what it forbids (`tests/unit/router/test_http_openapi.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from router.openai.described import Described
from router.openai.described import object_of as _object
from router.openai.described import ref as _ref
from router.openai.fields import Schema, nullable
from router.openai.model_card import ModelCard
from router.openai.request_fields import CHAT, COMPLETION
from router.openai.tokenizing import DETOKENIZE, TOKENIZE
from tandem.core.config import Config
from tandem.core.version import version

_STATUSES = {
    400: "The request is wrong; `param` names the field. `context_length_exceeded`: it does not fit the context.",
    401: "No valid API key.",
    404: "The model or path is not served here, or the request is not remembered.",
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
_POSTING = (404, 413, 415, 429, 499)
_GENERATING = (*_POSTING, 500, 502, 504)


def document(config: Config, card: ModelCard, others: Sequence[Described] = ()) -> Schema:
    """The document for a router with this configuration and model."""
    limits = config.limits
    paths = {
        "/v1/completions": {"post": _chunked("completion", "CompletionRequest", "Completion", "CompletionChunk")},
        "/v1/chat/completions": {"post": _chunked("chat", "ChatRequest", "ChatCompletion", "ChatChunk")},
        **{path: described for other in others for path, described in other.paths.items()},
        "/tokenize": {"post": _posting("tokenize", "TokenizeRequest", "Tokens", "The token ids of a text or a chat.")},
        "/detokenize": {"post": _posting("detokenize", "DetokenizeRequest", "Text", "The text of token ids.")},
        "/": {"get": _welcome()},
        "/v1/models": {"get": reading("models", "The served models.", _ref("Models"))},
        "/v1/models/{model}": {
            "get": {
                **reading("model", "One served model.", _ref("Model"), (404,)),
                "parameters": [{"name": "model", "in": "path", "required": True, "schema": _MODEL_NAME}],
            }
        },
        "/v1/cluster": {"get": reading("cluster", "The workers and what they do.", _ref("Cluster"))},
        "/v1/requests/{id}": {
            "get": {
                **reading("request", "Where the time of a request went, and its attempts.", _ref("Requests"), (404,)),
                "parameters": [{"name": "id", "in": "path", "required": True, "schema": _REQUEST_NAME}],
            }
        },
        "/v1/requests/{id}/explain": {
            "get": {
                **reading("explanation", "Why the workers of a request were chosen.", _ref("Explanations"), (404,)),
                "parameters": [{"name": "id", "in": "path", "required": True, "schema": _REQUEST_NAME}],
            }
        },
        "/v1/events": {"get": _events()},
        "/health": {"get": {**reading("health", "200 where requests can be served.", _ref("Health")), "security": []}},
        "/ping": {method: _ping(method) for method in ("get", "post")},
        "/load": {"get": reading("load", "How many exchanges are under way.", _ref("Load"))},
        "/version": {"get": reading("version", "The version of Tandem.", _ref("Version"))},
        "/openapi.json": {"get": reading("openapi", "This document.", {"type": "object"})},
    }
    if config.metrics.enabled:
        text = {"type": "string"}
        paths["/metrics"] = {"get": reading("metrics", "Prometheus' text format.", text, media="text/plain")}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tandem", "version": version(), "description": "OpenAI's API, served by Tandem's router."},
        "paths": paths,
        "security": [{"bearer": []}, {}],
        "components": {
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
            "headers": _HEADERS,
            "schemas": {
                "CompletionRequest": COMPLETION.schema(limits, card),
                "ChatRequest": CHAT.schema(limits, card),
                "TokenizeRequest": TOKENIZE.schema(limits, card),
                "DetokenizeRequest": DETOKENIZE.schema(limits, card),
                **{name: rows.schema(limits, card) for other in others for name, rows in other.requests.items()},
                **_ANSWERS,
                **{name: schema for other in others for name, schema in other.answers.items()},
            },
        },
    }


#: Without a name the path is that of all models.
_MODEL_NAME: Schema = {"type": "string", "pattern": "[^/]"}
#: An `x-request-id`, or one request's own id.
_REQUEST_NAME: Schema = {"type": "string", "minLength": 1}


# -- operations


def _chunked(operation: str, request: str, whole: str, chunk: str) -> Schema:
    event = f"Server-sent events: `data: ` and a {chunk}, one a delta; the last is `data: [DONE]`, or an Error alone."
    return generating(operation, request, whole, chunk, event)


def generating(operation: str, request: str, whole: str, chunk: str, event: str, error: str = "Error") -> Schema:
    """An operation that generates; `event` says in words what its stream is made of."""
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
            **_errors((*_EVERYWHERE, *_GENERATING), error),
        },
    }


def answering(operation: str, request: str, answer: Schema, what: str) -> Schema:
    """An operation that is served as one that generates, and whose answer is never streamed."""
    headers = {**_REQUEST_ID, "tandem-ignored-fields": _header("IgnoredFields")}
    ok = {"description": what, "headers": headers, "content": {"application/json": {"schema": answer}}}
    return {
        "operationId": operation,
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(request)}}},
        "responses": {"200": ok, **_errors((*_EVERYWHERE, *_GENERATING))},
    }


def counting(operation: str, request: str, what: str, error: str) -> Schema:
    """An operation that reads a prompt and generates nothing."""
    headers = {**_REQUEST_ID, "tandem-ignored-fields": _header("IgnoredFields")}
    ok = {"description": what, "headers": headers, "content": {"application/json": {"schema": _ref("TokenCount")}}}
    return {
        "operationId": operation,
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(request)}}},
        "responses": {"200": ok, **_errors((*_EVERYWHERE, 404, 413, 415, 429, 500), error)},
    }


def _posting(operation: str, request: str, answer: str, what: str) -> Schema:
    said = reading(operation, what, _ref(answer), _POSTING)
    said["responses"]["200"]["headers"] = {**_REQUEST_ID, "tandem-ignored-fields": _header("IgnoredFields")}
    return {**said, "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(request)}}}}


def _ping(method: str) -> Schema:
    return {**reading(f"ping_{method}", "As /health.", _ref("Health")), "security": []}


def reading(
    operation: str, what: str, schema: Schema, statuses: Iterable[int] = (), media: str = "application/json"
) -> Schema:
    """An operation that answers with `what`; `statuses` beside those that every one may have."""
    ok = {"description": what, "headers": _REQUEST_ID, "content": {media: {"schema": schema}}}
    return {"operationId": operation, "responses": {"200": ok, **_errors((*_EVERYWHERE, *statuses))}}


def _welcome() -> Schema:
    said = reading("welcome", "What this is, and what is served; JSON where `Accept` names it.", _ref("Welcome"))
    said["responses"]["200"]["content"]["text/plain"] = {"schema": {"type": "string"}}
    said["responses"]["200"]["content"]["text/html"] = {"schema": {"type": "string"}}  # a browser's: the live page
    return said


def _events() -> Schema:
    what = "Server-sent events for the live page, one a second, without end. Their content may change between versions."
    return reading("events", what, {"type": "string"}, (429,), media="text/event-stream")


def _errors(statuses: Iterable[int], shape: str = "Error") -> Schema:
    return {str(status): _error(status, shape) for status in sorted(statuses)}


def _error(status: int, shape: str) -> Schema:
    headers = {**_REQUEST_ID, "x-should-retry": _header("ShouldRetry")}
    if status in (429, 503):
        headers["retry-after"] = _header("RetryAfter")
    if status == 401:
        headers["www-authenticate"] = _header("Authenticate")
    content = {"application/json": {"schema": _ref(shape)}}
    return {"description": _STATUSES[status], "headers": headers, "content": content}


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


# -- answers


_COUNT: Schema = {"type": "integer", "minimum": 0}
_TEXT: Schema = {"type": "string"}
_IDS: Schema = {"type": "array", "items": _COUNT}
_FINISH_REASON: Schema = {"enum": ["stop", "length", "tool_calls", None]}
_USAGE = _object(
    {"prompt_tokens": _COUNT, "completion_tokens": _COUNT, "total_tokens": _COUNT},
    {"prompt_tokens_details": _object({"cached_tokens": _COUNT})},
)
_REQUEST = {"type": "object", "required": ["id", "state", "age_s", "spans", "attempts", "token_s"]}
_WORKER = {"type": "object", "required": ["id", "incarnation", "state", "pages"]}


def _choice(shape: Schema, extra: Schema) -> Schema:
    logprobs = nullable({"type": "object"})
    return _object({"index": _COUNT, **shape, "logprobs": logprobs, "finish_reason": _FINISH_REASON}, extra)


def _answer(kind: str, choice: Schema, extra: Schema | None = None, *, is_chunk: bool = False) -> Schema:
    base = {"id": _TEXT, "created": _COUNT, "model": _TEXT, "object": {"const": kind}}
    choices: Schema = {"choices": {"type": "array", "items": choice}}
    if is_chunk:
        return _object({**base, **choices}, {"usage": nullable(_USAGE), **(extra or {})})
    return _object({**base, **choices, "usage": _USAGE}, extra)


_PROMPT_LOGPROB = _object(
    {
        "logprob": {"type": "number", "maximum": 0},
        "rank": {"type": "integer", "minimum": 1},
        "decoded_token": _TEXT,
    }
)
_PROMPT_LOGPROBS: Schema = {
    "type": "array",
    "items": nullable({"type": "object", "additionalProperties": _PROMPT_LOGPROB}),
    "description": "Of each token of the prompt, by token id: its own log-probability and the likeliest ones; the "
    "first has none.",
}
_PROMPT_IDS: Schema = {"prompt_token_ids": _IDS}
_OUTPUT_IDS: Schema = {"token_ids": _IDS}
_ABOUT_PROMPT: Schema = {"prompt_logprobs": _PROMPT_LOGPROBS, **_PROMPT_IDS}
_REASONING = {"reasoning": _TEXT, "reasoning_content": _TEXT}
_FUNCTION = _object({"name": _TEXT, "arguments": _TEXT})
_CALL = _object({"id": _TEXT, "type": {"const": "function"}, "function": _FUNCTION})
_CALL_DELTA = _object(
    {"index": _COUNT, "function": _object({"arguments": _TEXT}, {"name": _TEXT})},
    {"id": _TEXT, "type": {"const": "function"}},
)
_SAID = _object(
    {"role": {"const": "assistant"}, "content": nullable(_TEXT), "refusal": {"type": "null"}},
    {"tool_calls": {"type": "array", "items": _CALL, "minItems": 1}, **_REASONING},
)
_DELTA = _object(
    {},
    {"role": {"const": "assistant"}, "content": _TEXT, "tool_calls": {"type": "array", "items": _CALL_DELTA},
     **_REASONING},
)  # fmt: skip

_MODEL = _object(
    {
        "id": _TEXT,
        "object": {"const": "model"},
        "created": _COUNT,
        "owned_by": _TEXT,
        "root": {**_TEXT, "description": "The checkpoint: a hub id, or the name of its directory."},
        "parent": {"type": "null"},
        "max_model_len": nullable(_COUNT),
    },
    {
        "task": {"enum": ["embed", "score"], "description": "Of a model that generates nothing."},
        "simulated": {"const": True, "description": "Steps only take time, and tokens mean nothing."},
    },
)
_CANDIDATE = _object(
    {
        "worker": _TEXT,
        "held_tokens": {**_COUNT, "description": "Of the prompt, in its cache as far as was known."},
        "stored_tokens": {**_COUNT, "description": "Behind these, in a tier below its cache."},
        "tokens_in_front": _COUNT,
        "active_requests": _COUNT,
        "cost_tokens": {"type": "number", "description": "What decided; of a decode worker for its batch and sending."},
    },
    {
        "cost_alone_tokens": {"type": "number", "description": "Instead, if it computes the prompt by itself."},
        "why_not_alone": {**_TEXT, "description": "Why it may not compute the prompt by itself."},
        "prompt_steps": _object(
            {
                "tokens": {**_COUNT, "description": "Of prompts in a step, which leaves others their time."},
                "step_ms": {"type": "number", "description": "Of a step without prompts; 0: it is not known yet."},
                "token_ms": {"type": "number", "description": "That a token of a prompt adds."},
            }
        ),
    },
)
_EXPLAINED = _object(
    {
        "id": _TEXT,
        "router": _TEXT,
        "prompt_tokens": _COUNT,
        "cached_tokens": nullable(_COUNT),
        "attempts": {
            "type": "array",
            "items": _object(
                {
                    "number": _COUNT,
                    "prefill": nullable(_TEXT),
                    "decode": nullable(_TEXT),
                    "why": {"enum": ["load", "kept", "mixed_pool", "colocated", "prefix"]},
                    "candidates": {"type": "array", "items": _CANDIDATE},
                }
            ),
        },
    }
)
_ANSWERS: Schema = {
    "Completion": _answer("text_completion", _choice({"text": _TEXT}, {**_OUTPUT_IDS, **_ABOUT_PROMPT})),
    "CompletionChunk": _answer(
        "text_completion", _choice({"text": _TEXT}, {**_OUTPUT_IDS, **_PROMPT_IDS}), is_chunk=True
    ),
    "ChatCompletion": _answer("chat.completion", _choice({"message": _SAID}, _OUTPUT_IDS), _ABOUT_PROMPT),
    "ChatChunk": _answer("chat.completion.chunk", _choice({"delta": _DELTA}, _OUTPUT_IDS), _PROMPT_IDS, is_chunk=True),
    "Model": _MODEL,
    "Models": _object({"object": {"const": "list"}, "data": {"type": "array", "items": _ref("Model")}}),
    "Explanations": _object(
        {"object": {"const": "list"}, "data": {"type": "array", "items": _EXPLAINED, "minItems": 1}}
    ),
    "Requests": _object({"object": {"const": "list"}, "data": {"type": "array", "items": _REQUEST, "minItems": 1}}),
    "Welcome": _object(
        {"name": {"const": "tandem"}, "version": _TEXT, "model": _TEXT, "endpoints": {"type": "array", "items": _TEXT}}
    ),
    "Health": _object({"status": {"const": "ok"}}),
    "Load": _object({"server_load": _COUNT}),
    "Version": _object({"version": _TEXT}),
    "Tokens": _object(
        {
            "count": _COUNT,
            "max_model_len": nullable(_COUNT),
            "tokens": _IDS,
            "token_strs": nullable({"type": "array", "items": _TEXT}),
        }
    ),
    "Text": _object({"prompt": _TEXT}),
    "Cluster": {
        "type": "object",
        "required": ["model", "membership_version", "colocated", "prefill", "decode"],
        "properties": {
            "model": _TEXT,
            "membership_version": _COUNT,
            "colocated": {"type": "boolean"},
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
                    "param": nullable(_TEXT),
                    "code": _TEXT,
                    "request_id": _TEXT,
                    "retryable": {"type": "boolean"},
                }
            )
        }
    ),
}
