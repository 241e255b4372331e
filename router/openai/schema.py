"""The bodies of `/v1/completions` and `/v1/chat/completions`: what they hold, by the rows of
`router.openai.request_fields`, and what several fields mean together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import orjson

from router.openai.depth import MAX_DEPTH, is_deep_json
from router.openai.fields import Accepted, Object, PromptBounds, Scope
from router.openai.grammar import AskedGrammar
from router.openai.refusal import refuse, shown
from router.openai.request_fields import CHAT, COMPLETION
from router.openai.rows import Rows
from router.openai.tool_fields import tool_use
from router.tools.pieces import NO_TOOLS, ToolUse
from tandem.core.chat_template import ChatOptions
from tandem.core.config import LimitsConfig
from tandem.core.errors import InvalidRequestError
from tandem.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class TextPair:
    """A prompt of two texts, as the tokenizer puts them together."""

    first: str
    second: str


@dataclass(frozen=True)
class ParsedRequest:
    """A valid body, before tokenisation."""

    kind: Literal["completion", "chat", "embedding", "score"]
    model: str
    sampling: SamplingParams  # `max_tokens` holds only where `max_tokens_field` names one, `seed` where `has_seed`
    has_seed: bool  # `False`: each prompt is to draw its own
    max_tokens_field: str | None  # the field that set `max_tokens`; `None`: the default is to be found
    stream: bool
    include_usage: bool
    priority: int
    ignored_fields: tuple[str, ...]
    num_choices: int = 1  # that are generated for each prompt
    return_token_ids: bool = False
    add_special_tokens: bool = False  # to the text of a prompt, by the tokenizer
    reasoning_fields: tuple[str, ...] = ()  # those that are set; the model may have no such thing
    prompts: tuple[str | tuple[int, ...] | TextPair, ...] = ()  # of all but a chat: texts or token ids
    messages: tuple[dict[str, Any], ...] = ()  # of a chat
    prompt_field: str = "prompt"  # which errors name
    tool_use: ToolUse = NO_TOOLS
    stop: tuple[str, ...] = ()
    timeout_s: float | None = None
    grammar: AskedGrammar | None = None  # of the output; `sampling` has its text
    gives_output: bool = True  # `False`: `max_tokens` is 0
    num_shown: int = 1  # the best so many choices of each prompt are in the answer
    num_logprobs: int = -1  # as in `SamplingParams`, of the answer: choosing among choices may need more than it shows
    echo: bool = False
    num_prompt_logprobs: int = -1  # of the field `prompt_logprobs`; -1: not given
    num_scored: int = -1  # likeliest tokens wanted at each place of a prompt, by `echo` too; -1: no log-probabilities
    continuous_usage: bool = False
    hides_special_tokens: bool = True  # in the text of the answer
    has_spaces_between: bool = True  # special tokens, where the tokenizer puts them
    shows_stop: bool = False
    truncate_prompt_tokens: int | None = None  # so many of a prompt's last tokens are kept; -1: as many as fit
    bad_words: tuple[str, ...] = ()
    cache_salt: str = ""
    chat: ChatOptions = ChatOptions()  # noqa: RUF009 - frozen
    reasoning_effort: str | None = None
    thinking: bool | None = None  # whether reasoning is wanted; `None`: as the model's template has it
    thinking_field: str = ""  # the field that says so
    separates_reasoning: bool = True  # from what is said, where the model's template marks it
    includes_reasoning: bool = True  # in the answer, where it is separated
    pools: bool = False  # a vector of each prompt is wanted, and no token
    session: str = ""  # to which the requests belong; empty: none
    slo: Mapping[str, float] = field(default_factory=dict)  # `ttft_ms` and `tpot_ms`, where they are given
    vector_size: int = 0  # numbers of one in the answer


def parse_body(raw: bytes) -> dict[str, Any]:
    """The JSON object of a body. Raises `InvalidRequestError`."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"the body is not JSON: {error}") from error
    if is_deep_json(raw, body):
        raise InvalidRequestError(f"the body is nested too deeply: more than {MAX_DEPTH} objects and lists in another")
    if not isinstance(body, dict):
        raise InvalidRequestError(f"the body must be a JSON object, not {shown(body)}")
    return body


class _Parser:
    """From a body to what it means, for one endpoint."""

    def __init__(self, kind: Literal["completion", "chat"], rows: Object) -> None:
        self._kind = kind
        self._rows = Rows(rows)
        self._reasoning = [field.name for field in rows.fields if field.kind is Accepted.WITHOUT_REASONING]

    def parse(self, body: dict[str, Any], limits: LimitsConfig, bounds: PromptBounds) -> ParsedRequest:
        """Check a body. Raises `InvalidRequestError`, naming the field."""
        if body.get("truncate_prompt_tokens") is not None:  # it is no longer known how many tokens are too many
            bounds = replace(bounds, max_context=None)
        scope = Scope(limits, bounds, [])
        given, values = self._rows.read(body, scope)
        options = _stream_options(values)
        grammar = form_of("response_format", values.get("response_format"), values)
        num_logprobs = self._num_logprobs(values)
        num_choices = _num_choices(values) if self._kind == "completion" else values["n"]
        # The best of several choices are found by their log-probabilities.
        num_computed = max(num_logprobs, 0 if num_choices > values["n"] else -1)
        max_tokens_field = next((name for name in _MAX_TOKENS[self._kind] if name in given), None)
        return ParsedRequest(
            kind=self._kind,
            prompt_field="messages" if self._kind == "chat" else "prompt",
            sampling=self._sampling_params(values, max_tokens_field, grammar, num_computed),
            grammar=grammar,
            has_seed="seed" in given,
            max_tokens_field=max_tokens_field,
            gives_output=max_tokens_field is None or values[max_tokens_field] > 0,
            num_choices=num_choices,
            num_logprobs=num_logprobs,
            num_scored=_num_scored(values, num_logprobs),
            include_usage=bool(options.get("include_usage")),
            continuous_usage=bool(options.get("continuous_usage_stats")),
            chat=_chat_options(values, given) if self._kind == "chat" else ChatOptions(),
            tool_use=tool_use(values) if self._kind == "chat" else NO_TOOLS,
            reasoning_fields=tuple(name for name in self._reasoning if name in given),
            **(thinking_of(values) if self._kind == "chat" else {}),
            ignored_fields=tuple(scope.ignored),
            session=session_of(given),
            **self._rows.others(values),
        )

    def _num_logprobs(self, values: dict[str, Any]) -> int:
        return _chat_logprobs(values) if self._kind == "chat" else int(values.get("logprobs", -1))

    def _sampling_params(
        self, values: dict[str, Any], max_tokens_field: str | None, grammar: AskedGrammar | None, num_logprobs: int
    ) -> SamplingParams:
        sampling = self._rows.sampling(values)
        sampling["num_logprobs"] = num_logprobs
        sampling["grammar"] = grammar.text if grammar is not None else ""
        min_tokens, max_tokens = sampling["min_tokens"], values[max_tokens_field] if max_tokens_field else None
        check_min_tokens(min_tokens, max_tokens, "max_tokens")
        return SamplingParams(max_tokens=max_tokens or max(min_tokens, 1), **sampling)


#: The first that is given holds.
_MAX_TOKENS = {"completion": ("max_tokens",), "chat": ("max_completion_tokens", "max_tokens")}


def check_min_tokens(min_tokens: int, max_tokens: int | None, field: str) -> None:
    """`field`: the one that says `max_tokens`; `None`: it is left to us."""
    if max_tokens is not None and min_tokens > max_tokens:
        refuse("min_tokens", f"must not exceed {field} ({max_tokens}), is {min_tokens}")


def form_of(field: str, by_field: AskedGrammar | None, values: dict[str, Any]) -> AskedGrammar | None:
    """The form of the output, of `field` or of `structured_outputs`; refuses both, and `ignore_eos` beside one."""
    other: AskedGrammar | None = values.get("structured_outputs")
    if by_field is not None and other is not None:
        refuse("structured_outputs", f"cannot hold beside {field}; leave one of them out")
    form = by_field or other
    if form is not None and values.get("ignore_eos"):
        name = form.field.split(".")[0]
        refuse("ignore_eos", f"cannot hold beside {name}: the output ends where its form is complete")
    return form


def session_of(given: Mapping[str, Any]) -> str:
    """The session that a body names, in whatever field clients do."""
    return next((given[field] for field in ("session_id", "prompt_cache_key", "user") if given.get(field)), "")


def _stream_options(values: dict[str, Any]) -> dict[str, Any]:
    if "stream_options" not in values:
        return {}
    if not values["stream"]:
        refuse("stream_options", "needs stream to be true")
    options: dict[str, Any] = values["stream_options"]
    return options


def _num_choices(values: dict[str, Any]) -> int:
    best_of, num_shown = values.get("best_of", values["n"]), values["n"]
    if best_of < num_shown:
        refuse("best_of", f"must be at least n ({num_shown}), is {best_of}")
    if best_of > num_shown and values["stream"]:
        refuse("best_of", "cannot be streamed: which choices are the best is known at their end; leave out stream")
    return int(best_of)


def _num_scored(values: dict[str, Any], num_logprobs: int) -> int:
    num_wanted = int(values.get("prompt_logprobs", -1))
    if num_wanted >= 0 and values["stream"]:
        refuse("prompt_logprobs", "are in no stream; leave out stream, or use echo with logprobs")
    return max(num_wanted, num_logprobs if values["echo"] and "messages" not in values else -1)


def _chat_options(values: dict[str, Any], given: dict[str, Any]) -> ChatOptions:
    continues = values["continue_final_message"]
    if continues and given.get("add_generation_prompt"):
        refuse("add_generation_prompt", "cannot be true where continue_final_message is: one of them ends the prompt")
    return ChatOptions(
        add_generation_prompt=values["add_generation_prompt"] and not continues,
        continue_final_message=continues,
        documents=values.get("documents"),
        variables=values.get("chat_template_kwargs", {}),
    )


def thinking_of(values: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `ParsedRequest`: what the fields `thinking` and `enable_thinking` say."""
    said = {}
    if kind := values.get("thinking", {}).get("type"):
        said["thinking"] = kind != "disabled"
    if isinstance(values.get("enable_thinking"), bool):
        said["enable_thinking"] = values["enable_thinking"]
    if len(set(said.values())) > 1:
        refuse("enable_thinking", "says otherwise than thinking; leave one of them out")
    return next(({"thinking": wanted, "thinking_field": field} for field, wanted in said.items()), {})


def _chat_logprobs(values: dict[str, Any]) -> int:
    if not values["logprobs"] and "top_logprobs" in values:
        refuse("top_logprobs", "needs logprobs to be true")
    return values.get("top_logprobs", 0) if values["logprobs"] else -1


parse_completion = _Parser("completion", COMPLETION).parse
parse_chat = _Parser("chat", CHAT).parse
