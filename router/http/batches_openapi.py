"""What the OpenAPI document says of files and batches, where they are switched on."""

from __future__ import annotations

from router.http.batches import PATHS
from router.openai.described import Described, object_of, ref
from router.openai.fields import Schema, nullable
from router.openai.openapi import reading

_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_ID: Schema = {"name": "id", "in": "path", "required": True, "schema": _TEXT}
_LIMIT: Schema = {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1}}
_AFTER: Schema = {"name": "after", "in": "query", "schema": _TEXT}
_FILES, _FILE, _CONTENT, _BATCHES, _BATCH, _CANCEL = PATHS


def _listing(item: str) -> Schema:
    return object_of(
        {"object": {"const": "list"}, "data": {"type": "array", "items": ref(item)}, "first_id": nullable(_TEXT),
         "last_id": nullable(_TEXT), "has_more": {"type": "boolean"}}
    )  # fmt: skip


def _of_one(operation: str, what: str, schema: Schema) -> Schema:
    return {**reading(operation, what, schema, (404,)), "parameters": [_ID]}


_UPLOAD: Schema = {
    **reading("upload", "The file, once it is whole on disk.", ref("File"), (413, 415, 429)),
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": object_of(
                    {"purpose": {"const": "batch"}, "file": {"type": "string", "contentMediaType": "application/jsonl"}}
                )
            }
        },
    },
}
_CREATE: Schema = {
    **reading("create_batch", "The batch, which waits for its turn.", ref("Batch"), (404, 413, 415)),
    "requestBody": {"required": True, "content": {"application/json": {"schema": ref("BatchRequest")}}},
}
_FILE_SHOWN = object_of(
    {"id": _TEXT, "object": {"const": "file"}, "bytes": _COUNT, "created_at": _COUNT, "filename": _TEXT,
     "purpose": {"enum": ["batch", "batch_output"]}, "status": {"const": "processed"}}
)  # fmt: skip
_WHEN = {
    f"{what}_at": nullable(_COUNT)
    for what in ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
}
_BATCH_SHOWN = object_of(
    {"id": _TEXT, "object": {"const": "batch"}, "endpoint": _TEXT, "errors": nullable({"type": "object"}),
     "input_file_id": _TEXT, "completion_window": _TEXT,
     "status": {"enum": ["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling",
                         "cancelled"]},
     "output_file_id": nullable(_TEXT), "error_file_id": nullable(_TEXT), "created_at": _COUNT, "expires_at": _COUNT,
     **_WHEN, "request_counts": object_of({"total": _COUNT, "completed": _COUNT, "failed": _COUNT}),
     "metadata": nullable({"type": "object", "additionalProperties": _TEXT})}
)  # fmt: skip
_BATCH_ASKED: Schema = object_of(
    {
        "input_file_id": _TEXT,
        "endpoint": {**_TEXT, "description": "Where each of its lines goes."},
        "completion_window": {**_TEXT, "description": "A time such as `24h`; what is not answered then has expired."},
    },
    {"metadata": nullable({"type": "object", "additionalProperties": _TEXT, "maxProperties": 16})},
)

BATCHES = Described(
    paths={
        _FILES: {
            "post": _UPLOAD,
            "get": {
                **reading("files", "The files of this API key.", ref("Files"), (404,)),
                "parameters": [_LIMIT, _AFTER],
            },
        },
        _FILE: {
            "get": _of_one("file", "One file.", ref("File")),
            "delete": _of_one("delete_file", "It is deleted.", ref("DeletedFile")),
        },
        _CONTENT: {
            "get": {
                **reading("content", "What is in it.", _TEXT, (404,), media="application/octet-stream"),
                "parameters": [_ID],
            }
        },
        _BATCHES: {
            "post": _CREATE,
            "get": {
                **reading("batches", "The batches of this API key, the newest first.", ref("Batches"), (404,)),
                "parameters": [_LIMIT, _AFTER],
            },
        },
        _BATCH: {"get": _of_one("batch", "One batch.", ref("Batch"))},
        _CANCEL: {"post": _of_one("cancel_batch", "What is answered already is kept.", ref("Batch"))},
    },
    requests={},
    answers={
        "File": _FILE_SHOWN,
        "Files": _listing("File"),
        "DeletedFile": object_of({"id": _TEXT, "object": {"const": "file"}, "deleted": {"const": True}}),
        "Batch": _BATCH_SHOWN,
        "Batches": _listing("Batch"),
        "BatchRequest": _BATCH_ASKED,
    },
)
