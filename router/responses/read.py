"""From the body of `/v1/responses` to what it asks for."""

from __future__ import annotations

from typing import Any

from router.openai.endpoint import Call
from router.openai.fields import PromptBounds, Scope
from router.openai.grammar import AskedGrammar
from router.openai.refusal import refuse
from router.openai.rows import Rows
from router.openai.schema import ParsedRequest, check_min_tokens, form_of, session_of
from router.openai.tool_fields import tool_use
from router.responses.answer import Response
from router.responses.fields import FORMAT_FIELDS, LOGPROBS, RESPONSE
from tandem.core.config import LimitsConfig
from tandem.core.sampling import SamplingParams

_ROWS = Rows(RESPONSE)


def read_response(body: dict[str, Any], limits: LimitsConfig, bounds: PromptBounds) -> Call:
    """What the body of `/v1/responses` asks for."""
    scope = Scope(limits, bounds, [])
    given, values = _ROWS.read(body, scope)
    parsed = _parsed(given, values, tuple(scope.ignored))
    repeated = {**given, "text": {"format": _format(body), "verbosity": "medium"}}
    return Call(parsed, lambda parsed, setting: Response(parsed, repeated, setting))


def _format(body: dict[str, Any]) -> dict[str, Any]:
    """`text.format` of a body that has been read, as OpenAI's clients want it back: a schema has a name."""
    asked = (body.get("text") or {}).get("format") or {"type": "text"}
    named = {"name": "schema"} if asked["type"] == "json_schema" else {}
    return named | {name: asked[name] for name in FORMAT_FIELDS if asked.get(name) is not None}


def _parsed(given: dict[str, Any], values: dict[str, Any], ignored: tuple[str, ...]) -> ParsedRequest:
    instructions = values.get("instructions")
    system = ({"role": "system", "content": instructions},) if instructions else ()
    grammar = form_of("text.format", values.get("text", {}).get("format"), values)
    max_tokens_field = "max_output_tokens" if "max_output_tokens" in given else None
    return ParsedRequest(
        kind="chat",
        prompt_field="input",
        messages=(*system, *values["input"]),
        sampling=_sampling(values, grammar),
        grammar=grammar,
        has_seed="seed" in given,
        max_tokens_field=max_tokens_field,
        include_usage=True,
        reasoning_effort=values.get("reasoning", {}).get("effort"),
        ignored_fields=ignored,
        tool_use=tool_use(values),
        session=session_of(given),
        **_ROWS.others(values),
    )


def _sampling(values: dict[str, Any], grammar: AskedGrammar | None) -> SamplingParams:
    sampling = _ROWS.sampling(values) | {"grammar": grammar.text if grammar is not None else ""}
    min_tokens, max_tokens = sampling["min_tokens"], values.get("max_output_tokens")
    check_min_tokens(min_tokens, max_tokens, "max_output_tokens")
    num_logprobs = -1
    if LOGPROBS in values.get("include", ()):
        num_logprobs = values.get("top_logprobs", 0)
    elif "top_logprobs" in values:
        refuse("top_logprobs", f"needs {LOGPROBS!r} in `include`")
    return SamplingParams(max_tokens=max_tokens or max(min_tokens, 1), num_logprobs=num_logprobs, **sampling)
