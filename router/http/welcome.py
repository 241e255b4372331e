"""What `GET /` says: to a person in words, to a program in JSON."""

from __future__ import annotations

from typing import Any

from router.openai.model_card import ModelCard
from tandem.core.version import version

#: What is served, beside `GET /`; of `/metrics` only where it is.
ENDPOINTS = {
    "/v1/completions": "POST: a prompt, or several, to text",
    "/v1/chat/completions": "POST: a conversation to its next message",
    "/v1/responses": "POST: OpenAI's Responses API, without a store",
    "/v1/messages": "POST: Anthropic's Messages API",
    "/v1/messages/count_tokens": "POST: the tokens that such a message would have",
    "/v1/embeddings": "POST: texts to vectors, of a model that embeds",
    "/score": "POST: how well two texts go together, of a model that embeds or scores",
    "/v1/score": "the same",
    "/tokenize": "POST: a text or a conversation to token ids",
    "/detokenize": "POST: token ids to a text",
    "/v1/files": "POST: a file with one request a line; GET: what there is",
    "/v1/batches": "POST: run the requests of a file behind all others; GET: how far they are",
    "/v1/models": "the model, by the names that requests may use",
    "/v1/cluster": "the workers and what they do",
    "/v1/requests/{id}": "where the time of a request went, by the x-request-id of its answer",
    "/v1/requests/{id}/explain": "why its workers were chosen, and what others would have cost",
    "/v1/events": "what happens, once a second, as server-sent events; in a browser / shows it",
    "/health": "200 where requests can be served",
    "/ping": "the same",
    "/load": "how many exchanges are under way",
    "/version": "of Tandem",
    "/metrics": "Prometheus",
    "/openapi.json": "every field of it all",
}


def endpoints(*, has_metrics: bool, has_batches: bool) -> dict[str, str]:
    is_off = set() if has_metrics else {"/metrics"}
    if not has_batches:
        is_off |= {"/v1/files", "/v1/batches"}
    return {path: what for path, what in ENDPOINTS.items() if path not in is_off}


def facts(card: ModelCard, served: dict[str, str]) -> dict[str, Any]:
    """For a program."""
    return {"name": "tandem", "version": version(), "model": card.own_name, "endpoints": list(served)}


def welcome_page(card: ModelCard, served: dict[str, str], url: str, *, needs_key: bool) -> str:
    """For a person; `url` is where they found it."""
    width = max(map(len, served))
    listed = "\n".join(f"  {path:{width}}  {what}" for path, what in served.items())
    key = " -H 'Authorization: Bearer KEY'" if needs_key else ""
    return f"""This is Tandem {version()}, which speaks the OpenAI API. It serves the model {card.own_name}.

{listed}

Try it:

  curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' \\
    -d '{{"model": "{card.own_name}", "messages": [{{"role": "user", "content": "Hello!"}}], "max_tokens": 32}}'

OpenAI's own clients take {url}/v1 as their base URL.
"""
