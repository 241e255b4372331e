"""What the OpenAPI document says of `/v1/embeddings` and `/score`."""

from __future__ import annotations

from router.openai.described import Described, object_of, ref
from router.openai.fields import Schema
from router.openai.openapi import answering
from router.openai.pooling_fields import EMBEDDING, SCORE

_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_NUMBERS: Schema = {"type": "array", "items": {"type": "number"}}


def _list_of(item: Schema) -> Schema:
    return object_of(
        {
            "id": _TEXT,
            "object": {"const": "list"},
            "created": _COUNT,
            "model": _TEXT,
            "data": {"type": "array", "items": item},
            "usage": object_of({"prompt_tokens": _COUNT, "total_tokens": _COUNT}),
        }
    )


def _scoring(operation: str) -> Schema:
    return {"post": answering(operation, "ScoreRequest", ref("Scores"), "A score for each pair of texts.")}


POOLING_PATHS = Described(
    {
        "/v1/embeddings": {
            "post": answering("embedding", "EmbeddingRequest", ref("Embeddings"), "A vector for each input.")
        },
        "/score": _scoring("score"),
        "/v1/score": _scoring("score_v1"),
    },
    {"EmbeddingRequest": EMBEDDING, "ScoreRequest": SCORE},
    {
        "Embeddings": _list_of(
            object_of({"object": {"const": "embedding"}, "index": _COUNT, "embedding": {"anyOf": [_NUMBERS, _TEXT]}})
        ),
        "Scores": _list_of(object_of({"object": {"const": "score"}, "index": _COUNT, "score": {"type": "number"}})),
    },
)
