"""Every field of `/v1/embeddings` and `/score`, as `router.openai.request_fields` has those of what generates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from router.openai.content import Prompt
from router.openai.fields import Accepted, Boolean, Field, Integer, NotYet, Object, OneOf, Schema, Scope
from router.openai.model_card import ModelCard
from router.openai.refusal import refuse, shown
from router.openai.request_fields import FIELDS
from tandem.core.config import LimitsConfig


@dataclass(frozen=True)
class SomeTexts:
    """A text or a list of them, none empty."""

    def read(self, value: Any, path: str, scope: Scope) -> tuple[str, ...]:
        if value is None:
            refuse(path, "is missing")
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            refuse(path, f"must be a text or a list of texts, not {shown(value)}")
        if not texts or not all(texts):
            refuse(path, "must not be empty")
        if len(texts) > scope.bounds.max_prompts:
            refuse(path, f"holds {len(texts)} texts; at most {scope.bounds.max_prompts} are taken at once")
        return tuple(texts)

    def schema(self, _: LimitsConfig, __: ModelCard) -> Schema:
        text = {"type": "string", "minLength": 1}
        return {"anyOf": [text, {"type": "array", "items": text, "minItems": 1}]}


_SHARED = [field for field in FIELDS if field.name in ("model", "priority", "timeout", "cache_salt")] + [
    Field("user", Accepted.ALWAYS),
    Field("add_special_tokens", Boolean(), True, "Whether the tokenizer adds its own (an end of text, say) to a text.",
          becomes="add_special_tokens"),
    Field("stream", NotYet(False)),
    # vLLM's and SGLang's.
    Field("truncate_prompt_tokens", NotYet()),
    Field("truncation_side", Accepted.ALWAYS),  # of that
    Field("use_activation", NotYet(True)),
    *[Field(name, NotYet()) for name in ("mm_processor_kwargs", "request_id", "rid", "lora_path")],
]  # fmt: skip

EMBEDDING = Object(
    [
        *_SHARED,
        Field("input", Prompt(), None, "One text or list of token ids, or a list of either: each becomes a vector.",
              is_required=True),
        Field("encoding_format", OneOf("float", "base64"), "float",
              "`base64`: the numbers as float32, the least significant byte first."),
        Field("dimensions", Integer(1), about="So many leading numbers of each vector; only of a model that was made "
              "for it."),
        Field("normalize", NotYet(True)),
        Field("embed_dtype", NotYet("float32")),
        Field("endianness", NotYet("native", "little")),
        *[Field(name, NotYet()) for name in ("messages", "chat_template", "chat_template_kwargs", "task")],
    ]
)  # fmt: skip

SCORE = Object(
    [
        *_SHARED,
        Field("text_1", SomeTexts(), None, "One text, for all of `text_2`; or as many.", is_required=True),
        Field("text_2", SomeTexts(), None, "Each is scored with its text of `text_1`.", is_required=True),
        *[Field(name, NotYet()) for name in ("queries", "documents", "data_1", "data_2", "instruction")],
    ]
)
