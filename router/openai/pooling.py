"""`/v1/embeddings` as OpenAI has it, and `/score` as vLLM has it: vectors of prompts, and how well texts go together.

A model with one label scores each pair as one prompt. A model that embeds gives a vector of each text, and the score of
a pair is the cosine between theirs.
"""

from __future__ import annotations

import base64
import math
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import orjson

from router.openai.endpoint import Call, Encoder, Setting
from router.openai.fields import PromptBounds, Scope
from router.openai.model_card import ModelCard
from router.openai.pooling_fields import EMBEDDING, SCORE
from router.openai.refusal import refuse
from router.openai.rows import Rows
from router.openai.schema import ParsedRequest, TextPair
from router.request.request import Delta, Usage
from tandem.core.config import LimitsConfig
from tandem.core.errors import InternalError, InvalidRequestError, TandemError
from tandem.core.pooling import Pooling, PoolingTask, normalized
from tandem.core.sampling import SamplingParams

_EMBEDDING, _SCORE = Rows(EMBEDDING), Rows(SCORE)


def check_generates(card: ModelCard) -> None:
    """Raises `InvalidRequestError` where the model pools."""
    if card.pooling is not None:
        does, path = _what_for(card.pooling)
        raise InvalidRequestError(f"the model {card.own_name} {does} and generates nothing; ask {path}", field="model")


def _what_for(pooling: Pooling) -> tuple[str, str]:
    if pooling.task is PoolingTask.EMBED:
        return "embeds", "/v1/embeddings, or /score"
    return "scores pairs of texts", "/score"


class ReadEmbedding:
    """Reads bodies of `/v1/embeddings` for one model."""

    def __init__(self, card: ModelCard) -> None:
        self._card = card

    def __call__(self, body: dict[str, Any], limits: LimitsConfig, bounds: PromptBounds) -> Call:
        values, ignored = _read(_EMBEDDING, body, limits, bounds)
        pooling = _pooling_of(self._card, values["model"])
        if pooling.task is not PoolingTask.EMBED:
            does, path = _what_for(pooling)
            raise InvalidRequestError(
                f"the model {self._card.own_name} {does}, and embeds none; ask {path}", field="model"
            )
        num_dimensions = values.get("dimensions")
        if num_dimensions is not None:
            _check_dimensions(num_dimensions, self._card, pooling)
        parsed = _parsed(
            "embedding", _EMBEDDING, values, ignored, prompts=values["input"], prompt_field="input",
            vector_size=num_dimensions or self._card.vector_size,
        )  # fmt: skip

        def encoder(parsed: ParsedRequest, setting: Setting) -> Encoder:
            return _Embeddings(
                parsed, setting, pooling, num_dimensions, in_base64=values["encoding_format"] == "base64"
            )

        return Call(parsed, encoder)


class ReadScore:
    """Reads bodies of `/score` for one model."""

    def __init__(self, card: ModelCard) -> None:
        self._card = card

    def __call__(self, body: dict[str, Any], limits: LimitsConfig, bounds: PromptBounds) -> Call:
        values, ignored = _read(_SCORE, body, limits, bounds)
        pooling = _pooling_of(self._card, values["model"])
        first, second = values["text_1"], values["text_2"]
        if len(first) not in (1, len(second)):
            refuse("text_1", f"must be one text, or as many as text_2 has ({len(second)}), not {len(first)}")
        embeds = pooling.task is PoolingTask.EMBED
        if embeds and len(first) + len(second) > bounds.max_prompts:
            refuse(
                "text_2", f"and text_1 hold {len(first) + len(second)} texts; at most {bounds.max_prompts} are taken"
            )
        if not embeds and len(first) == 1 and (size := len(first[0]) * len(second)) > limits.max_body_bytes:
            refuse(
                "text_1", f"stands before each of {len(second)} texts, {size} characters in all; at most "
                f"{limits.max_body_bytes} (limits.max_body_bytes) are taken; shorten it, or ask about fewer texts"
            )
        pairs = tuple(map(TextPair, first * len(second) if len(first) == 1 else first, second))
        parsed = _parsed(
            "score", _SCORE, values, ignored, prompts=(*first, *second) if embeds else pairs, prompt_field="text_2",
            vector_size=1,
        )  # fmt: skip

        def encoder(parsed: ParsedRequest, setting: Setting) -> Encoder:
            return _Scores(parsed, setting, pooling, len(first))

        return Call(parsed, encoder)


def _read(
    rows: Rows, body: dict[str, Any], limits: LimitsConfig, bounds: PromptBounds
) -> tuple[dict[str, Any], list[str]]:
    # A prompt may fill the context: the check that leaves room for a token of output is not for it.
    scope = Scope(limits, replace(bounds, max_context=None), [])
    _, values = rows.read(body, scope)
    return values, scope.ignored


def _pooling_of(card: ModelCard, name: str) -> Pooling:
    card.check_name(name)
    if card.pooling is None:
        raise InvalidRequestError(
            f"the model {card.own_name} generates, and has no pooling: its checkpoint has neither a modules.json with "
            "a Pooling module nor a head with one label; ask /v1/completions or /v1/chat/completions",
            field="model",
        )
    return card.pooling


def _check_dimensions(number: int, card: ModelCard, pooling: Pooling) -> None:
    if not pooling.is_matryoshka:
        refuse(
            "dimensions",
            f"cannot be chosen: the model {card.own_name} is not trained for it (matryoshka); leave it out",
        )
    if pooling.dimensions and number not in pooling.dimensions:
        refuse("dimensions", f"must be one of {', '.join(map(str, pooling.dimensions))}, not {number}")
    if number > card.vector_size:
        refuse("dimensions", f"must be at most {card.vector_size}, not {number}")


def _parsed(kind: Any, rows: Rows, values: dict[str, Any], ignored: list[str], **others: Any) -> ParsedRequest:
    return ParsedRequest(
        kind=kind,
        pools=True,
        sampling=SamplingParams(max_tokens=1),
        has_seed=True,
        max_tokens_field=None,
        stream=False,
        include_usage=False,
        ignored_fields=tuple(ignored),
        **rows.others(values),
        **others,
    )


class _Vectors:
    """Gathers the vectors of all prompts. No answer of them is streamed: `stream` is refused."""

    def __init__(self, parsed: ParsedRequest, setting: Setting, pooling: Pooling) -> None:
        self._parsed, self._setting, self._pooling = parsed, setting, pooling
        self._vectors: list[Sequence[float]] = [()] * len(setting.requests)

    def gather(self, prompt: int, delta: Delta, /) -> None:
        self._vectors[prompt] = delta.vector

    def opening(self) -> bytes:
        raise InternalError("vectors are not streamed")

    def frames(self, _: int, __: Delta, /) -> bytes:
        raise InternalError("vectors are not streamed")

    def closing(self, _: Sequence[Usage], /) -> bytes:
        raise InternalError("vectors are not streamed")

    def failure(self, _: TandemError, /) -> bytes:
        raise InternalError("vectors are not streamed")

    def _answer(self, prefix: str, data: list[dict[str, Any]], usages: Sequence[Usage]) -> bytes:
        num_tokens = sum(usage.num_prompt_tokens for usage in usages)
        return orjson.dumps(
            {
                "id": f"{prefix}-{self._setting.request_id}",
                "object": "list",
                "created": self._setting.created,
                "model": self._parsed.model,
                "data": data,
                "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
            }
        )


class _Embeddings(_Vectors):
    def __init__(
        self, parsed: ParsedRequest, setting: Setting, pooling: Pooling, num_dimensions: int | None, *, in_base64: bool
    ) -> None:
        super().__init__(parsed, setting, pooling)
        self._num_dimensions, self._in_base64 = num_dimensions, in_base64

    def body(self, usages: Sequence[Usage], /) -> bytes:
        data = [
            {"object": "embedding", "index": index, "embedding": self._encoded(vector)}
            for index, vector in enumerate(self._vectors)
        ]
        return self._answer("embd", data, usages)

    def _encoded(self, vector: Sequence[float]) -> list[float] | str:
        values = self._pooling.finished(vector, self._num_dimensions)
        if not self._in_base64:
            return values
        packed = array("f", values)
        if sys.byteorder == "big":
            packed.byteswap()
        return base64.b64encode(packed.tobytes()).decode()


class _Scores(_Vectors):
    def __init__(self, parsed: ParsedRequest, setting: Setting, pooling: Pooling, num_first: int) -> None:
        super().__init__(parsed, setting, pooling)
        self._num_first = num_first

    def body(self, usages: Sequence[Usage], /) -> bytes:
        data = [{"object": "score", "index": index, "score": score} for index, score in enumerate(self._scores())]
        return self._answer("score", data, usages)

    def _scores(self) -> list[float]:
        if self._pooling.task is PoolingTask.SCORE:
            return [self._pooling.finished(vector)[0] for vector in self._vectors]
        first, second = ([normalized(vector) for vector in part] for part in self._parts())
        return [_product(a, b) for a, b in zip(first * len(second) if len(first) == 1 else first, second, strict=True)]

    def _parts(self) -> tuple[Sequence[Sequence[float]], Sequence[Sequence[float]]]:
        return self._vectors[: self._num_first], self._vectors[self._num_first :]


def _product(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


#: Path to what reads its bodies for a model.
POOLING: dict[str, Callable[[ModelCard], Callable[[dict[str, Any], LimitsConfig, PromptBounds], Call]]] = {
    "/v1/embeddings": ReadEmbedding,
    "/score": ReadScore,
    "/v1/score": ReadScore,
}
