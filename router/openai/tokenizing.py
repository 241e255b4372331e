"""`/tokenize` and `/detokenize`: texts and chats to token ids and back, in vLLM's shapes."""

from __future__ import annotations

from typing import Any

from router.openai.chat_fields import Documents, Messages, Variables
from router.openai.content import TokenIds
from router.openai.fields import Boolean, Field, NotYet, Object, PromptBounds, Schema, Scope, Text
from router.openai.model_card import ModelCard
from router.openai.refusal import refuse
from router.openai.tokenize import check_documents, check_ids
from tandem.core.chat_template import ChatOptions
from tandem.core.config import LimitsConfig
from tandem.core.tokenizer import Tokenizer

_MODEL = Field("model", Text("must name a model"), about="A name of GET /v1/models, if any.")

_UNSET: Schema = {"type": "null"}


class _Tokenize(Object):
    """Has a prompt or messages, not both."""

    def schema(self, limits: LimitsConfig, card: ModelCard) -> Schema:
        ways = [
            {"required": [given], "properties": {given: {"not": _UNSET}, other: _UNSET}}
            for given, other in (("prompt", "messages"), ("messages", "prompt"))
        ]
        return {**super().schema(limits, card), "anyOf": ways}


TOKENIZE = _Tokenize(
    [
        _MODEL,
        Field("prompt", Text(), about="A text; or else there are `messages`."),
        Field("messages", Messages(), about="A chat; or else there is a `prompt`."),
        Field(
            "add_special_tokens", Boolean(),
            about="Whether the tokenizer adds its own (a BOS, say). By default to a `prompt`, not to a chat, whose "
            "template writes them.",
        ),
        Field("return_token_strs", Boolean(), False, "Adds `token_strs`: each token as the vocabulary has it."),
        Field("add_generation_prompt", Boolean(), True, "As of a chat."),
        Field("continue_final_message", Boolean(), False, "As of a chat."),
        Field("documents", Documents(), about="As of a chat."),
        Field("chat_template_kwargs", Variables(), about="As of a chat."),
        *[Field(name, NotYet()) for name in ("chat_template", "tools", "media_io_kwargs", "mm_processor_kwargs")],
    ]
)  # fmt: skip

DETOKENIZE = Object([_MODEL, Field("tokens", TokenIds(), is_required=True)])

_ANY = PromptBounds(max_prompts=1, max_context=None)


def tokenized(
    body: dict[str, Any], limits: LimitsConfig, *, tokenizer: Tokenizer, card: ModelCard, max_context: int | None
) -> tuple[dict[str, Any], list[str]]:
    """The answer to `/tokenize`, and the fields that nobody knows. Raises `InvalidRequestError`."""
    given, ignored = _read(TOKENIZE, body, limits, card)
    if ("prompt" in given) == ("messages" in given):
        refuse("prompt", "or messages: one of them must be there, not both")
    text = _rendered(given, tokenizer) if "messages" in given else given["prompt"]
    ids = tokenizer.encode(text, add_special_tokens=given.get("add_special_tokens", "prompt" in given))
    strings = [tokenizer.piece(token_id) or "" for token_id in ids] if given.get("return_token_strs") else None
    return {"count": len(ids), "max_model_len": max_context, "tokens": ids, "token_strs": strings}, ignored


def _rendered(given: dict[str, Any], tokenizer: Tokenizer) -> str:
    continues = given.get("continue_final_message", False)
    if continues and given.get("add_generation_prompt"):
        refuse("add_generation_prompt", "cannot be true where continue_final_message is: one of them ends the prompt")
    options = ChatOptions(
        add_generation_prompt=given.get("add_generation_prompt", True) and not continues,
        continue_final_message=continues,
        documents=given.get("documents"),
        variables=given.get("chat_template_kwargs", {}),
    )
    check_documents(options, tokenizer)
    return tokenizer.render_chat(given["messages"], options=options)


def detokenized(
    body: dict[str, Any], limits: LimitsConfig, *, tokenizer: Tokenizer, card: ModelCard
) -> tuple[dict[str, Any], list[str]]:
    """The answer to `/detokenize`, and the fields that nobody knows. Raises `InvalidRequestError`."""
    given, ignored = _read(DETOKENIZE, body, limits, card)
    check_ids("tokens", given["tokens"], card.vocab_size)
    return {"prompt": tokenizer.decode(given["tokens"], skip_special_tokens=False)}, ignored


def _read(
    rows: Object, body: dict[str, Any], limits: LimitsConfig, card: ModelCard
) -> tuple[dict[str, Any], list[str]]:
    scope = Scope(limits, _ANY, [])
    given = rows.read(body, "", scope)
    if "model" in given:
        card.check_name(given["model"])
    return given, scope.ignored
