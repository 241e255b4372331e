"""The request fields that Tandem knows and does not obey: of OpenAI's, vLLM's and SGLang's schemas, and a few others.

One row a field. What it may hold without being refused is one of

    ACCEPTED        anything: it cannot change the answer
    REASONING       anything, on a model whose chat template has no switch for reasoning
    (value, ...)    what asks for nothing: one of these values, or one of `EMPTY`

All else would change the answer and is not there yet. A field that comes to be obeyed leaves this table for
`router.openai.schema`. `router.openai.openapi` documents the same rows.
"""

from __future__ import annotations

from enum import Enum
from typing import Any


class Harmless(Enum):
    """Why a field is accepted whatever it holds."""

    ALWAYS = "it cannot change the answer"
    WITHOUT_REASONING = "the model has no switch for reasoning"


ACCEPTED, REASONING = Harmless.ALWAYS, Harmless.WITHOUT_REASONING
Rule = Harmless | tuple[Any, ...]

#: Ask for nothing in any field.
EMPTY: tuple[Any, ...] = (None, [], {}, "")

#: Variables by which chat templates switch reasoning.
REASONING_SWITCHES = frozenset({"reasoning_effort", "enable_thinking", "thinking"})

KNOWN_FIELDS: dict[str, Rule] = {
    # -- OpenAI
    "metadata": ACCEPTED,
    "prediction": ACCEPTED,
    "prompt_cache_key": ACCEPTED,
    "prompt_cache_options": ACCEPTED,
    "prompt_cache_retention": ACCEPTED,
    "safety_identifier": ACCEPTED,
    "service_tier": ACCEPTED,
    "store": ACCEPTED,
    "user": ACCEPTED,
    "reasoning_effort": REASONING,
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": (),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "suffix": (),
    "tool_choice": ("none", "auto"),
    "tools": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    # -- vLLM
    "return_mm_kwargs": ACCEPTED,  # of its endpoints that only render
    "return_token_offsets": ACCEPTED,  # the same
    "session_id": ACCEPTED,
    "stream_interval": ACCEPTED,
    "truncation_side": ACCEPTED,  # says something beside `truncate_prompt_tokens` alone
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "bad_words": (),
    "cache_salt": (),
    "chat_template": (),
    "chat_template_kwargs": (),
    "continue_final_message": (False,),
    "documents": (),
    "early_stopping": (False,),
    "ec_transfer_params": (),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": (),
    "logprob_token_ids": (),
    "media_io_kwargs": (),
    "mm_processor_kwargs": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "request_id": (),  # would name the answer; `X-Request-Id` does
    "return_prompt_text": (False,),
    "return_tokens_as_token_ids": (False,),
    "routed_experts_prompt_start": (0,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structural_tag": (),
    "structured_outputs": (),
    "thinking_token_budget": (-1,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": (),
    "watermarking": (False,),
    # -- SGLang
    "custom_labels": ACCEPTED,
    "data_parallel_rank": ACCEPTED,  # where it is computed
    "disagg_prefill_dp_rank": ACCEPTED,
    "ngram_corpus_id": ACCEPTED,  # what speculation drafts from
    "routed_dp_rank": ACCEPTED,
    "reasoning": REASONING,
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "custom_logit_processor": (),
    "custom_params": (),
    "ebnf": (),
    "extra_key": (),
    "images_config": (),
    "input_embeds": (),
    "input_ids": (),
    "json_schema": (),
    "lora_path": (),
    "max_dynamic_patch": (),
    "min_dynamic_patch": (),
    "no_stop_trim": (False,),
    "regex": (),
    "return_cached_tokens_details": (False,),
    "return_hidden_states": (False,),
    "return_meta_info": (False,),
    "return_prompt_token_ids": (False,),
    "return_routed_experts": (False,),
    "rid": (),  # as `request_id`
    "routed_experts_start_len": (0,),
    "separate_reasoning": (True, False),  # all text is content, as with false
    "session_params": (),
    "stop_regex": (),
    "stream_reasoning": (True, False),
    "task": (),
    "use_audio_in_video": (False,),
    # -- transformers, text-generation-inference, llama.cpp
    "do_sample": (True,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "grammar": (),
    "max_new_tokens": (),
    "min_length": (0,),
    "mirostat": (0,),
    "n_predict": (),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "typical_p": (1,),
    "xtc_probability": (0,),
}

STREAM_OPTIONS: dict[str, Rule] = {
    "include_obfuscation": ACCEPTED,  # padding against traffic analysis
    "continuous_usage_stats": (False,),  # vLLM's and SGLang's: usage in every frame
}

#: The fields of the class `REASONING`.
REASONING_FIELDS = tuple(name for name, rule in KNOWN_FIELDS.items() if rule is REASONING)


def is_harmless(rule: Rule, value: Any) -> bool:
    """Whether a field with this rule may hold `value`, so far as that can be said without the model."""
    if isinstance(rule, Harmless):
        return True
    # In Python True is 1; in JSON it is not.
    return any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in (*EMPTY, *rule))
