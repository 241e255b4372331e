"""Every field of `/v1/completions` and `/v1/chat/completions`, one row each.

A field is obeyed; or it cannot change the answer and is accepted; or it would change the answer and is not there yet,
so it is refused by name unless it asks for nothing. These are OpenAI's, vLLM's and SGLang's, and a few others. What is
not here nobody knows: it is ignored, and named in the answer. Parsing (`router.openai.schema`) and the OpenAPI document
come from these rows; a field that comes to be obeyed gets a row of its own and the code that obeys it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from router.openai.chat_fields import Documents, Messages, Variables
from router.openai.content import KeptTokens, LogitBias, Prompt, Stops, Texts, TokenSet
from router.openai.fields import (
    Accepted,
    Boolean,
    Elsewhere,
    Field,
    Integer,
    Kind,
    Limit,
    NotYet,
    Number,
    Object,
    OneOf,
    SessionName,
    Text,
)  # fmt: skip
from router.openai.rows import MAX_SEED
from router.openai.structured import RESPONSE_FORMAT, StructuredOutputs
from router.openai.tool_fields import TOOL_FIELDS

_MAX_INT32 = (1 << 31) - 1
_WEEK_S = 7 * 24 * 3600

EFFORT = OneOf("none", "minimal", "low", "medium", "high", "xhigh", "max")

#: As Anthropic, DeepSeek and GLM have it.
THINKING_FIELDS = (
    Field("type", OneOf("enabled", "adaptive", "disabled"), is_required=True),
    Field("budget_tokens", Accepted.ALWAYS),
    Field("display", Accepted.ALWAYS),
)

#: Variables by which chat templates switch reasoning.
REASONING_SWITCHES = frozenset({"reasoning_effort", "enable_thinking", "thinking"})


def _sampling(name: str, kind: Kind, default: Any = None, about: str = "") -> Field:
    return Field(name, kind, default, about, becomes=f"sampling.{name}")


def _all(kind: Kind, names: str) -> list[Field]:
    return [Field(name, kind) for name in names.split()]


_SPECIAL_TOKENS = "Whether the tokenizer adds its own (a BOS, say) to a text. A chat's template writes them."

_OBEYED = [
    Field("model", Text("must name a model; GET /v1/models lists them"), None, "A name of GET /v1/models.",
          becomes="model", is_required=True),
    Field("prompt", Prompt(), None, "One prompt, or a list: each is a request.", becomes="prompts", of="completion",
          is_required=True),
    Field("messages", Messages(), becomes="messages", of="chat", is_required=True),
    Field("max_tokens", Integer(0), of="completion",
          about="With the prompt at most the context. 0: the prompt alone is computed, for `echo` or "
          "`prompt_logprobs`."),
    Field("max_tokens", Integer(1), about="With the prompt at most the context.", of="chat"),
    Field("max_completion_tokens", Integer(1), about="Goes before `max_tokens`.", of="chat"),
    _sampling("min_tokens", Integer(0, _MAX_INT32), 0, "At most `max_tokens`."),
    Field("n", Integer(1, Limit("max_choices")), 1, becomes="num_shown"),
    Field("best_of", Integer(1, Limit("max_choices")), of="completion",
          about="So many choices are generated, and the `n` of them with the highest log-probability per token are the "
          "answer. At least `n`; more than `n` not with `stream`."),
    Field("stop", Stops(), about="At most 16, of at most 1024 characters each.", becomes="stop"),
    _sampling("stop_token_ids", TokenSet(most=1000), about="At most 1000."),
    Field("stream", Boolean(), False, becomes="stream"),
    Field("stream_options", Object([
        Field("include_usage", Boolean(), False),
        Field("include_obfuscation", Accepted.ALWAYS),  # padding against traffic analysis
        Field("continuous_usage_stats", Boolean(), False, "Every event says what its choice has used so far."),
    ]), about="Needs `stream`."),
    _sampling("temperature", Number(0, 100), 1.0),
    _sampling("top_p", Number(above=0, maximum=1), 1.0),
    _sampling("top_k", Integer(-1, _MAX_INT32), 0, "0 and -1: off."),
    _sampling("min_p", Number(0, 1), 0.0),
    _sampling("repetition_penalty", Number(above=0, maximum=100), 1.0),  # beyond, float32 logits overflow
    _sampling("presence_penalty", Number(-2, 2), 0.0),
    _sampling("frequency_penalty", Number(-2, 2), 0.0),
    _sampling("logit_bias", LogitBias()),
    _sampling("seed", Integer(-(1 << 63), MAX_SEED), None,
              "64 bits, with or without sign. It holds for every prompt of the body, so equal prompts get equal "
              "samples; without one, each prompt draws its own. The `n` choices of a prompt always differ."),
    _sampling("ignore_eos", Boolean(), False),
    Field("logprobs", Integer(0, Limit("max_logprobs")), of="completion"),
    Field("logprobs", Boolean(), False, of="chat"),
    Field("top_logprobs", Integer(0, Limit("max_logprobs")), about="Needs `logprobs`.", of="chat"),
    Field("response_format", RESPONSE_FORMAT, about="The form of the output: any text, a JSON object, or JSON that "
          "follows a schema."),
    Field("structured_outputs", StructuredOutputs(), about="The form of the output, by exactly one of `json`, `regex`, "
          "`choice`, `grammar` and `json_object`."),
    Field("echo", Boolean(), False, becomes="echo", of="completion",
          about="The text of an answer begins with its prompt, and `logprobs` with those of the prompt's tokens; the "
          "first has none."),
    Field("echo", Boolean(), False, "The content of a last message of the assistant stands before what continues it.",
          becomes="echo", of="chat"),
    Field("prompt_logprobs", Integer(0, Limit("max_logprobs")), becomes="num_prompt_logprobs",
          about="How likely the prompt's tokens were, each after all before it, and so many likeliest tokens at each "
          "place. Not with `stream`. All of the prompt is computed then, whatever the prefix cache holds."),
    _sampling("allowed_token_ids", TokenSet(), about="Nothing else is chosen. Empty: no such bound."),
    Field("bad_words", Texts(most=1000), becomes="bad_words",
          about="Texts that the output does not hold: the last token of one is not chosen after its others."),
    Field("skip_special_tokens", Boolean(), True, "The text leaves out the names of special tokens.",
          becomes="hides_special_tokens"),
    Field("spaces_between_special_tokens", Boolean(), True, becomes="has_spaces_between",
          about="Where special tokens are shown and the tokenizer puts spaces between them, `false` is refused."),
    Field("include_stop_str_in_output", Boolean(), False, "The text ends with the stop string or token that ended it.",
          becomes="shows_stop"),
    Field("truncate_prompt_tokens", KeptTokens(), becomes="truncate_prompt_tokens",
          about="So many of a prompt's last tokens are kept; -1: as many as leave room for `max_tokens`."),
    Field("cache_salt", Text("must not be empty", longest=1024), about="Cached prefixes are shared with requests of an "
          "equal salt only.", becomes="cache_salt"),
    Field("return_token_ids", Boolean(), False, "Adds `prompt_token_ids` and `token_ids`.", becomes="return_token_ids"),
    Field("priority", Integer(Limit("most_urgent_priority", "; lower is more urgent"), _MAX_INT32), 0,
          "Lower is more urgent.", becomes="priority"),
    Field("timeout", Number(above=0, maximum=_WEEK_S), None, becomes="timeout_s",
          about="Seconds; then 504. Refused at once where the first token would come later."),
    Field("slo", Object([
        Field("ttft_ms", Number(above=0, maximum=1000 * _WEEK_S)),
        Field("tpot_ms", Number(above=0, maximum=1000 * _WEEK_S)),
    ]), becomes="slo", about="By when tokens are wanted: the first one, and each further one on average. It decides "
          "who goes first within a session, and what metrics call late; in a colocated cluster a `tpot_ms` above the "
          "cluster's own lets others' prompts be computed in larger chunks."),
    *TOOL_FIELDS,
    Field("add_generation_prompt", Boolean(), True, of="chat",
          about="The prompt ends where the assistant begins to answer. Not with `continue_final_message`."),
    Field("continue_final_message", Boolean(), False, of="chat",
          about="The answer continues the content of the last message."),
    Field("documents", Documents(), of="chat",
          about="What the model's chat template writes for retrieval. Refused where it reads no documents."),
    Field("chat_template_kwargs", Variables(), of="chat",
          about="Variables of the model's chat template by name, `enable_thinking` say. Those that it does not read "
          "are named in `tandem-ignored-fields`."),
    Field("reasoning_effort", EFFORT, of="chat",
          becomes="reasoning_effort",
          about="For the model's chat template, where it has such a variable. Where it can but switch reasoning on and "
          "off, `none` is off."),
    Field("enable_thinking", Boolean(), of="chat",
          about="Switches reasoning on or off, as `thinking` does, where the model's chat template has a switch."),
    Field("thinking", Object(THINKING_FIELDS), of="chat",
          about="Switches reasoning on or off, where the model's chat template has a switch. Without it, as the "
          "template has it."),
    Field("separate_reasoning", Boolean(), True, becomes="separates_reasoning", of="chat",
          about="What the model thinks before it speaks is in `reasoning` and `reasoning_content`, where its chat "
          "template marks that; else it is in `content`, with its marks."),
    Field("include_reasoning", Boolean(), True, "The answer has the reasoning that is separated.",
          becomes="includes_reasoning", of="chat"),
    Field("add_special_tokens", Boolean(), True, _SPECIAL_TOKENS, becomes="add_special_tokens", of="completion"),
    Field("add_special_tokens", Boolean(), False, _SPECIAL_TOKENS, becomes="add_special_tokens", of="chat"),
]  # fmt: skip

_OF_OPENAI = [
    *_all(SessionName(), "prompt_cache_key user"),
    *_all(Accepted.ALWAYS, """metadata prediction prompt_cache_options prompt_cache_retention
        safety_identifier service_tier store"""),
    Field("reasoning_effort", Accepted.ALWAYS, of="completion"),
    *_all(NotYet(), "audio functions moderation suffix web_search_options"),
    *(Field(name, kind, of="completion") for name, kind in (
        ("tools", NotYet()), ("tool_choice", NotYet("none", "auto")), ("parallel_tool_calls", NotYet(True, False)))),
    Field("best_of", NotYet(1), of="chat"),
    Field("function_call", NotYet("none", "auto")),
    Field("max_completion_tokens", NotYet(), of="completion"),  # of chats alone: else it would be ignored
    Field("modalities", NotYet(["text"])),
    Field("top_logprobs", NotYet(0), of="completion"),  # of chats alone, as well: here `logprobs` is the number
    Field("verbosity", NotYet("medium")),
]  # fmt: skip

_OF_VLLM = [
    # As it spelled `structured_outputs` before.
    *(
        Field(f"guided_{name}", Elsewhere(f"structured_outputs.{name}"))
        for name in ("json", "regex", "choice", "grammar", "whitespace_pattern")
    ),
    Field("guided_decoding_backend", Accepted.ALWAYS),
    # `truncation_side` says something beside `truncate_prompt_tokens` alone; `return_mm_kwargs` and
    # `return_token_offsets` are of endpoints that only render.
    Field("session_id", SessionName()),
    *_all(Accepted.ALWAYS, "return_mm_kwargs return_token_offsets stream_interval truncation_side"),
    # `request_id` would name the answer; `X-Request-Id` does.
    *_all(NotYet(), """chat_template ec_transfer_params kv_transfer_params logits_processors logprob_token_ids
        media_io_kwargs mm_processor_kwargs prompt_embeds repetition_detection request_id structural_tag vllm_xargs"""),
    *_all(NotYet(False), """early_stopping return_prompt_text
        return_tokens_as_token_ids use_beam_search watermarking"""),
    Field("add_generation_prompt", NotYet(True), of="completion"),
    Field("chat_template_kwargs", NotYet(), of="completion"),
    Field("continue_final_message", NotYet(False), of="completion"),
    Field("documents", NotYet(), of="completion"),
    Field("include_reasoning", NotYet(True), of="completion"),
    *(Field(name, NotYet(), of="completion") for name in ("enable_thinking", "thinking")),
    Field("length_penalty", NotYet(1)),
    Field("routed_experts_prompt_start", NotYet(0)),
    Field("thinking_token_budget", NotYet(-1)),
]  # fmt: skip

_OF_SGLANG = [
    Field("json_schema", Elsewhere("response_format or structured_outputs.json")),  # llama.cpp's, too
    Field("regex", Elsewhere("structured_outputs.regex")),
    Field("ebnf", Elsewhere("structured_outputs.grammar")),
    # Where it is computed; `ngram_corpus_id`: what speculation drafts from.
    *_all(Accepted.ALWAYS, "custom_labels data_parallel_rank disagg_prefill_dp_rank ngram_corpus_id routed_dp_rank"),
    Field("reasoning", Accepted.WITHOUT_REASONING),
    # `rid` is as `request_id`.
    *_all(NotYet(), """bootstrap_host bootstrap_port bootstrap_room custom_logit_processor custom_params extra_key
        images_config input_embeds input_ids lora_path max_dynamic_patch min_dynamic_patch rid
        session_params stop_regex task"""),
    *_all(NotYet(False), """no_stop_trim return_cached_tokens_details return_hidden_states return_meta_info
        return_prompt_token_ids return_routed_experts use_audio_in_video"""),
    Field("separate_reasoning", NotYet(True, False), of="completion"),  # a completion has text alone, as with false
    Field("stream_reasoning", NotYet(True, False), of="completion"),
    Field("stream_reasoning", NotYet(True), of="chat"),
    Field("routed_experts_start_len", NotYet(0)),
]  # fmt: skip

_OF_OTHERS = [  # transformers, text-generation-inference, llama.cpp
    Field("grammar", Elsewhere("structured_outputs.grammar")),
    *_all(NotYet(), "max_new_tokens n_predict"),
    Field("do_sample", NotYet(True)),
    Field("repeat_penalty", Elsewhere("repetition_penalty", 1)),
    *_all(NotYet(0), "dry_multiplier dynatemp_range min_length mirostat no_repeat_ngram_size top_a xtc_probability"),
    *_all(NotYet(1), "num_beams tfs_z typical_p"),
]

FIELDS = (*_OBEYED, *_OF_OPENAI, *_OF_VLLM, *_OF_SGLANG, *_OF_OTHERS)

#: Sampling, and how a request is served, in whatever API; what another API lacks of it is vLLM's and SGLang's.
_OF_ALL_APIS = frozenset([
    "model", "stream", "min_tokens", "stop", "stop_token_ids", "temperature", "top_p", "top_k", "min_p",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "ignore_eos", "priority",
    "timeout", "slo", "structured_outputs", "allowed_token_ids", "bad_words", "cache_salt", "skip_special_tokens",
    "spaces_between_special_tokens", "include_stop_str_in_output", "truncate_prompt_tokens", "session_id",
    "prompt_cache_key", "user",
])  # fmt: skip


def as_in_chats(own: Iterable[Field]) -> list[Field]:
    """The rows of another API beside its `own`: what means there what it means in a chat, and what is refused there.

    What else a chat obeys would change the answer: it is refused there by name, and never ignored.
    """
    names = {field.name for field in own}
    chat = [field for field in FIELDS if field.of != "completion" and field.name not in names]
    rows = []
    for field in chat:
        if field.name in _OF_ALL_APIS or isinstance(field.kind, NotYet | Elsewhere):
            rows.append(field)
        elif not isinstance(field.kind, Accepted):
            rows.append(Field(field.name, NotYet() if field.default is None else NotYet(field.default)))
    return rows


COMPLETION = Object(field for field in FIELDS if field.of != "chat")
CHAT = Object(field for field in FIELDS if field.of != "completion")
