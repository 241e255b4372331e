"""Which bodies are taken, what they mean, and which field a refusal names."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from router.openai.content import Stops
from router.openai.fields import PromptBounds
from router.openai.model_card import ModelCard
from router.openai.schema import ParsedRequest, parse_body, parse_chat, parse_completion
from router.openai.tokenize import requests_from
from router.request.request import Request
from tandem.core import config as configuration
from tandem.core.config import LimitsConfig
from tandem.core.errors import ContextLengthError, InvalidRequestError, ModelNotFoundError
from tandem.core.tokenizer import Tokenizer
from tests.support.router_site import BOS, CHAT_TEMPLATE, Site, write_checkpoint

LIMITS = LimitsConfig()
BOUNDS = PromptBounds(max_prompts=4, max_context=None)


def completion(**fields: Any) -> ParsedRequest:
    return parse_completion({"model": "toy", "prompt": "x", **fields}, LIMITS, BOUNDS)


def chat(**fields: Any) -> ParsedRequest:
    return parse_chat({"model": "toy", "messages": [{"role": "user", "content": "x"}], **fields}, LIMITS, BOUNDS)


BOTH: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"model": 7}, "model"),
    ({"model": ""}, "model"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": [1]}, "frequency_penalty"),
    ({"logit_bias": []}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"logit_bias": {"5": "1"}}, "logit_bias.5"),
    ({"seed": 1.5}, "seed"),
    ({"seed": 1 << 64}, "seed"),
    ({"stop": 7}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["a", 1]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop_token_ids": "a"}, "stop_token_ids"),
    ({"stop_token_ids": [True]}, "stop_token_ids"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 5.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"n": 0}, "n"),
    ({"n": LIMITS.max_choices + 1}, "n"),
    ({"n": "2"}, "n"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": 1}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"timeout": 0}, "timeout"),
    ({"timeout": -1}, "timeout"),
    ({"timeout": "1"}, "timeout"),
    ({"priority": 1.5}, "priority"),
    ({"priority": -1}, "priority"),
    ({"priority": 1 << 31}, "priority"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_object", "schema": {"type": "object"}}}, "response_format.schema"),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": "3"}}, "structured_outputs.json"),
    ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"grammar": "a ::= b\n" * 1001}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"grammar": 'start: a\na[temperature=0.5]: "x"'}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"grammar": ' {"grammars": []}'}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"regex": "a" * (LIMITS.max_grammar_bytes + 1)}}, "structured_outputs.regex"),
    ({"suffix": "end"}, "suffix"),
    ({"echo": 1}, "echo"),
    ({"bad_words": "a"}, "bad_words"),
    ({"bad_words": ["a", " "]}, "bad_words"),
    ({"allowed_token_ids": ["a"]}, "allowed_token_ids"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "x" * 1025}, "cache_salt"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": LIMITS.max_logprobs + 1}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"skip_special_tokens": 0}, "skip_special_tokens"),
    ({"include_stop_str_in_output": "no"}, "include_stop_str_in_output"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"web_search_options": {"a": 1}}, "web_search_options"),
    ({"add_special_tokens": 1}, "add_special_tokens"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": 1}}, "stream_options.continuous_usage_stats"),
]
OF_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", []]}, "prompt"),
    ({"prompt": 7}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [[1], [None]]}, "prompt"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": LIMITS.max_logprobs + 1}, "logprobs"),
    ({"best_of": 0}, "best_of"),
    ({"n": 3, "best_of": 2}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"min_tokens": 1, "max_tokens": 0}, "min_tokens"),
]
OF_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "x"}, {"role": "user"}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
    ({"logprobs": 3}, "logprobs"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"best_of": 2}, "best_of"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": LIMITS.max_logprobs + 1}, "top_logprobs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": "1"}, "max_completion_tokens"),
]


@pytest.mark.parametrize(("fields", "named"), BOTH + OF_COMPLETIONS, ids=str)
def test_a_wrong_completion_names_the_field(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        completion(**fields)
    assert caught.value.field == named
    assert named.split("[")[0].split(".")[0] in caught.value.message


@pytest.mark.parametrize(("fields", "named"), BOTH + OF_CHATS, ids=str)
def test_a_wrong_chat_names_the_field(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat(**fields)
    assert caught.value.field == named


@pytest.mark.parametrize("seed", [10**30, -(10**30), 1e300])
def test_a_seed_of_more_than_64_bits_is_refused_in_words(seed: float) -> None:
    with pytest.raises(InvalidRequestError, match="seed must be a whole number of at most 64 bits"):
        completion(seed=parse_body(f'{{"seed": {seed}}}'.encode())["seed"])


@pytest.mark.parametrize("messages", ["hi", [], {"role": "user", "content": "hi"}])
def test_messages_of_another_kind_are_answered_with_an_example(messages: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r'\[{"role": "user", "content": "Hello"}\]; it is '):
        chat(messages=messages)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"7", b'{"a": NaN}', b"\xff", b'"\\ud800"'])
def test_a_body_that_is_no_json_object(raw: bytes) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_body(raw)
    assert caught.value.field is None


def test_defaults() -> None:
    parsed = completion()
    assert (parsed.sampling.temperature, parsed.sampling.top_p, parsed.sampling.top_k) == (1.0, 1.0, 0)
    assert (parsed.num_choices, parsed.stop, parsed.stream, parsed.timeout_s) == (1, (), False, None)
    assert (parsed.sampling.num_logprobs, parsed.max_tokens_field) == (-1, None)
    assert 0 <= parsed.sampling.seed < 1 << 63
    assert completion(seed=-1).sampling.seed == (1 << 64) - 1
    assert completion(top_k=-1).sampling.top_k == 0


def test_fields_that_ask_for_nothing_are_taken() -> None:
    nothing = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"]}
    assert chat(**nothing, parallel_tool_calls=True, user="u", metadata={}, store=False).ignored_fields == ()
    assert completion(suffix="", echo=False, best_of=1, functions=None, logit_bias=None).ignored_fields == ()


ASKING_FOR_SOMETHING: dict[str, Any] = {
    # vLLM's, now and earlier
    "structural_tag": "{}", "logprob_token_ids": [1], "use_beam_search": True, "length_penalty": 0.5,
    "chat_template": "x", "mm_processor_kwargs": {"a": 1}, "media_io_kwargs": {"a": {}},
    "return_tokens_as_token_ids": True, "kv_transfer_params": {"a": 1}, "ec_transfer_params": {"a": 1},
    "logits_processors": ["a"], "vllm_xargs": {"a": 1}, "thinking_token_budget": 5,
    "prompt_embeds": "x", "repetition_detection": {"a": 1}, "watermarking": True,
    "return_prompt_text": True, "request_id": "x",
    # SGLang's
    "lora_path": "x", "session_params": {"a": 1},
    "no_stop_trim": True, "stop_regex": "a", "custom_logit_processor": "x", "custom_params": {"a": 1},
    "input_ids": [1], "rid": "x", "extra_key": "x", "return_hidden_states": "last", "return_routed_experts": True,
    "return_cached_tokens_details": True, "return_prompt_token_ids": True, "return_meta_info": True, "task": "title",
    "bootstrap_host": "x", "bootstrap_port": 1, "bootstrap_room": 1, "images_config": {"a": 1},
    "use_audio_in_video": True, "max_dynamic_patch": 1,
    # others'
    "typical_p": 0.9, "mirostat": 2, "max_new_tokens": 5,
    "moderation": {"model": "x"}, "verbosity": "low", "function_call": {"name": "x"}, "audio": {"voice": "x"},
}  # fmt: skip


@pytest.mark.parametrize("parse", [completion, chat])
@pytest.mark.parametrize("name", ASKING_FOR_SOMETHING)
def test_what_would_change_the_answer_is_refused_by_name(name: str, parse: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name} is not supported yet") as caught:
        parse(**{name: ASKING_FOR_SOMETHING[name]})
    assert caught.value.field == name
    for nothing in (None, [], {}):
        assert parse(**{name: nothing}).ignored_fields == ()


OF_CHATS_ALONE: dict[str, Any] = {
    "max_completion_tokens": 5, "top_logprobs": 5, "documents": [{"a": "b"}], "chat_template_kwargs": {"a": 1},
    "continue_final_message": True, "add_generation_prompt": False, "include_reasoning": False,
}  # fmt: skip


@pytest.mark.parametrize("name", OF_CHATS_ALONE)
def test_what_only_chats_have_is_no_field_of_a_completion_to_ignore(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name} is not supported") as caught:
        completion(**{name: OF_CHATS_ALONE[name]})
    assert caught.value.field == name


@pytest.mark.parametrize("parse", [completion, chat])
def test_defaults_of_other_servers_are_taken(parse: Any) -> None:
    flags = {"skip_special_tokens": True, "spaces_between_special_tokens": True, "add_generation_prompt": True}
    flags |= {"use_beam_search": False, "continue_final_message": False, "no_stop_trim": False}
    flags |= {"separate_reasoning": True, "stream_reasoning": True, "return_hidden_states": False}
    numbers = {"typical_p": 1, "length_penalty": 1.0, "n": 1, "best_of": 1, "thinking_token_budget": -1}
    harmless = {"session_id": "x", "prompt_cache_retention": "24h", "stream_interval": 4, "custom_labels": {"a": "b"}}
    assert parse(**flags, **numbers, **harmless, tool_choice="auto", reasoning_effort="high").ignored_fields == ()
    for wrong in ({"length_penalty": True}, {"use_beam_search": 0}):
        with pytest.raises(InvalidRequestError):
            parse(**wrong)


def test_unknown_fields_are_named() -> None:
    parsed = completion(stream=True, stream_options={"odd": 1}, zebra=0, apple=None)
    assert parsed.ignored_fields == ("zebra", "stream_options.odd")


def test_prompts_of_all_kinds() -> None:
    assert completion(prompt="ab").prompts == ("ab",)
    assert completion(prompt=[1, 2]).prompts == ((1, 2),)
    assert completion(prompt=["a", "b"]).prompts == ("a", "b")
    assert completion(prompt=[[1], [2, 3]]).prompts == ((1,), (2, 3))


def test_logprobs_of_both_kinds() -> None:
    assert completion(logprobs=0).sampling.num_logprobs == 0
    assert completion(logprobs=5).sampling.num_logprobs == 5
    assert chat(logprobs=True).sampling.num_logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).sampling.num_logprobs == 3
    assert chat(logprobs=False).sampling.num_logprobs == -1


def test_text_parts_become_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    parsed = chat(messages=[{"role": "user", "content": parts, "name": "n"}])
    assert parsed.messages == ({"role": "user", "content": "a\nb", "name": "n"},)


def test_stop_strings_have_a_longest_length_which_the_schema_says(card_and_tokenizer: Any) -> None:
    longest = ["x" * 1023 + "é", "y" * 1024]
    assert made(completion(stop=longest), card_and_tokenizer)[0].stop == tuple(longest)
    for ask, stop in ((completion, "x" * 2000), (completion, [*longest, "x" * 2000]), (chat, "x" * 2000)):
        with pytest.raises(InvalidRequestError, match="may hold texts of 1024 characters, not 2000") as caught:
            ask(stop=stop)
        assert caught.value.field == "stop"
    text, texts = Stops().schema(LimitsConfig(), card_and_tokenizer[0])["anyOf"]
    assert text == texts["items"] == {"type": "string", "minLength": 1, "maxLength": 1024}


def test_lists_that_are_looked_at_for_each_token_are_bounded(card_and_tokenizer: Any) -> None:
    for name, values in (("bad_words", ["a"] * 1001), ("stop_token_ids", list(range(1001)))):
        with pytest.raises(InvalidRequestError, match="may hold 1000") as caught:
            completion(**{name: values})
        assert caught.value.field == name
    with pytest.raises(InvalidRequestError, match="20000 tokens") as caught:
        made(completion(bad_words=["x" * 6000, "y" * 6000]), card_and_tokenizer)
    assert caught.value.field == "bad_words"
    several = [7, 5, 7.0, 5] * 1000
    sampling = completion(allowed_token_ids=several, stop_token_ids=several).sampling
    assert (sampling.allowed_token_ids, sampling.stop_token_ids) == ((7, 5), (7, 5))
    (request,) = made(completion(bad_words=["a"] * 1000), card_and_tokenizer)
    assert request.sampling.bad_words == ((97,),)


def test_what_is_too_much_is_refused_before_it_is_looked_at() -> None:
    bounds = PromptBounds(max_prompts=4, max_context=32)
    bad = ["no token id"]
    for prompt, why in (
        ([1, *bad] * 16, "has 32 tokens"),
        ([[1], [1, *bad] * 16], "has 32 tokens"),
        ([bad] * 5, "5 p"),
    ):
        with pytest.raises(InvalidRequestError, match=why) as caught:
            parse_completion({"model": "toy", "prompt": prompt}, LIMITS, bounds)
        assert caught.value.field == "prompt"
        assert isinstance(caught.value, ContextLengthError) == (why == "has 32 tokens")
    assert parse_completion({"model": "toy", "prompt": [1] * 31}, LIMITS, bounds).prompts == ((1,) * 31,)


# -- what needs the model


@pytest.fixture(scope="module")
def card_and_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelCard, Tokenizer]:
    directory: Path = write_checkpoint(tmp_path_factory.mktemp("m") / "toy", context=32)
    tokenizer = Tokenizer.from_dir(directory)
    config = configuration.load(None, {"model.path": str(directory)})
    return ModelCard.from_dir(directory, config, tokenizer), tokenizer


def made(parsed: ParsedRequest, card_and_tokenizer: tuple[ModelCard, Tokenizer]) -> list[Request]:
    card, tokenizer = card_and_tokenizer
    return requests_from(
        parsed,
        tokenizer=tokenizer,
        card=card,
        max_context=card.max_context,
        client_request_id="r",
        arrived_s=0.0,
    )


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt": [512]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[1], [512]]}, "prompt"),
        ({"prompt": "x" * 32}, "prompt"),
        ({"prompt": "x" * 9000}, "prompt"),
        ({"prompt": "x" * 30, "max_tokens": 3}, "max_tokens"),
        ({"prompt": "x" * 30, "min_tokens": 3}, "min_tokens"),
        ({"stop_token_ids": [512]}, "stop_token_ids"),
        ({"logit_bias": {"512": 1}}, "logit_bias"),
        ({"allowed_token_ids": [512]}, "allowed_token_ids"),
        ({"prompt": "x" * 40, "truncate_prompt_tokens": 32}, "prompt"),
        ({"prompt": [1] * 40, "max_tokens": 3, "truncate_prompt_tokens": 30}, "max_tokens"),
    ],
    ids=str,
)
def test_what_the_model_cannot_take(fields: dict[str, Any], named: str, card_and_tokenizer: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        made(completion(**fields), card_and_tokenizer)
    assert caught.value.field == named


def test_chats_that_are_too_long(card_and_tokenizer: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        made(chat(messages=[{"role": "user", "content": "x" * 40}]), card_and_tokenizer)
    assert caught.value.field == "messages"
    with pytest.raises(InvalidRequestError) as caught:
        made(chat(max_completion_tokens=31), card_and_tokenizer)
    assert caught.value.field == "max_completion_tokens"


@pytest.mark.parametrize(
    ("parsed", "field", "why"),
    [
        (completion(prompt="x" * 32), "prompt", "prompt has 32 tokens"),
        (completion(prompt="x" * 30, max_tokens=3), "max_tokens", "you requested 33 tokens: 30 in prompt and 3 by"),
        (completion(prompt="x" * 30, min_tokens=3), "min_tokens", "ask for at most 2"),
        (chat(messages=[{"role": "user", "content": "x" * 40}]), "messages", "messages has 58 tokens"),
    ],
)
def test_an_overflow_of_the_context_has_the_code_that_clients_look_for(
    parsed: ParsedRequest, field: str, why: str, card_and_tokenizer: Any
) -> None:
    with pytest.raises(ContextLengthError, match=why) as caught:
        made(parsed, card_and_tokenizer)
    assert caught.value.message.startswith("This model's maximum context length is 32 tokens. However, ")
    assert (caught.value.code, caught.value.http_status) == ("context_length_exceeded", 400)
    assert caught.value.field == field


def test_max_tokens(card_and_tokenizer: Any) -> None:
    def max_tokens(parsed: ParsedRequest) -> int:
        return made(parsed, card_and_tokenizer)[0].sampling.max_tokens

    assert max_tokens(completion()) == 16
    assert max_tokens(completion(prompt="x" * 30)) == 2
    assert max_tokens(completion(max_tokens=31)) == 31
    assert max_tokens(completion(min_tokens=20)) == 20
    num_prompt_tokens = len("[user]x[assistant]") + 1
    assert max_tokens(chat()) == 32 - num_prompt_tokens
    assert max_tokens(chat(max_tokens=3, max_completion_tokens=2)) == 2


def test_each_prompt_becomes_a_request_with_an_id_of_its_own(card_and_tokenizer: Any) -> None:
    requests = made(completion(prompt=["a", "b"]), card_and_tokenizer)
    again = made(completion(prompt=["a"]), card_and_tokenizer)
    assert [r.prompt_ids for r in requests] == [(97,), (98,)]
    ids = {r.request_id for r in requests + again}
    assert len(ids) == 3
    assert all(i.startswith("r#") for i in ids)


@pytest.mark.parametrize("source", ["{% if enable_thinking is defined and enable_thinking %}x{% endif %}", ""])
def test_a_switch_that_is_not_obeyed_is_refused_where_the_model_has_one(tmp_path: Path, source: str) -> None:
    """SGLang's `reasoning`; `reasoning_effort` is obeyed."""
    field = "reasoning"
    directory = write_checkpoint(tmp_path / "toy", template=CHAT_TEMPLATE + source)
    tokenizer = Tokenizer.from_dir(directory)
    given = (ModelCard.from_dir(directory, configuration.load(None), tokenizer), tokenizer)
    assert made(completion(**{field: "high"}), given)
    if not source:
        assert made(chat(**{field: "high"}), given)
        return
    with pytest.raises(InvalidRequestError, match="of this model") as caught:
        made(chat(**{field: "high"}), given)
    assert caught.value.field == field


def test_special_tokens_are_added_as_asked(card_and_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    encode = Tokenizer.encode

    def noted(self: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
        asked.append(add_special_tokens)
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    for parsed in (completion(), completion(add_special_tokens=False), chat(), chat(add_special_tokens=True)):
        made(parsed, card_and_tokenizer)
    assert asked == [True, False, False, True]


def test_each_prompt_draws_a_seed_of_its_own(card_and_tokenizer: Any) -> None:
    seeds = {r.sampling.seed for r in made(completion(prompt=["a", "a", "a"]), card_and_tokenizer)}
    assert len(seeds) == 3
    assert all(0 <= seed < 1 << 63 for seed in seeds)


@pytest.mark.parametrize("seed", [0, 7, -1, (1 << 64) - 1, -(1 << 63)])
def test_a_given_seed_holds_for_every_prompt(seed: int, card_and_tokenizer: Any) -> None:
    requests = made(completion(prompt=["a", "a"], seed=seed), card_and_tokenizer)
    assert [r.sampling.seed for r in requests] == [seed % (1 << 64)] * 2


def test_a_chat_has_one_beginning(card_and_tokenizer: Any) -> None:
    (request,) = made(chat(), card_and_tokenizer)
    assert request.prompt_ids.count(BOS) == 1


def test_served_names(card_and_tokenizer: Any) -> None:
    card, _ = card_and_tokenizer
    assert card.names == ("toy",)
    card.check_name("toy")
    with pytest.raises(ModelNotFoundError) as caught:
        card.check_name("other")
    assert (caught.value.field, caught.value.http_status) == ("model", 404)


def test_a_star_serves_any_name(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "toy")
    config = configuration.load(None, {"model.served_names": ["*"]})
    card = ModelCard.from_dir(directory, config, Tokenizer.from_dir(directory))
    card.check_name("anything")
    assert [entry["id"] for entry in card.listing()] == ["tandem-tiny"]  # `model.path` is the embedded model


# -- through HTTP


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        ("/v1/completions", b"{", 400, None, "invalid_request"),
        ("/v1/completions", b'{"model": "toy"}', 400, "prompt", "invalid_request"),
        ("/v1/completions", b'{"model": "nope", "prompt": "x"}', 404, "model", "model_not_found"),
        ("/v1/completions", b'{"model": "toy", "prompt": [99999]}', 400, "prompt", "invalid_request"),
        ("/v1/chat/completions", b'{"model": "toy", "messages": []}', 400, "messages", "invalid_request"),
        ("/v1/chat/completions", b'{"model":"toy","messages":["x"]}', 400, "messages[0]", "invalid_request"),
        (
            "/v1/chat/completions",
            b'{"model":"toy","messages":[{"role":"tool","content":"x"}]}',
            400,
            "messages[0].role",
            "invalid_request",
        ),
        ("/v1/nothing", b"{}", 404, None, "not_found"),
        ("/v1/models", b"{}", 405, None, "method_not_allowed"),
    ],
)
def test_errors_have_openais_shape(
    site: Site, path: str, body: bytes, status: int, param: str | None, code: str
) -> None:
    with site.http() as client:
        answer = client.post(path, content=body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code", "request_id", "retryable"}
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    assert answer.headers["x-request-id"] == error["request_id"]
    assert (error["retryable"], answer.headers["x-should-retry"]) == (False, "false")
    assert site.prefill.count("start") == 0


def test_a_body_that_is_too_large(make_site: Any) -> None:
    site = make_site({"limits.max_body_bytes": 2000})
    answer = site.post(prompt="x" * 3000)
    assert answer.status_code == 413
    assert "2000 bytes" in answer.json()["error"]["message"]
    assert site.post(prompt="x", max_tokens=1).status_code == 200


@pytest.mark.parametrize("encoding", ["gzip", "br", "gzip, identity", "\xff"])
def test_a_compressed_body_is_refused_in_words(site: Site, encoding: str) -> None:
    body = gzip.compress(b'{"model": "toy", "prompt": "x", "max_tokens": 1}')
    with site.http() as client:
        answer = client.post("/v1/completions", content=body, headers={"Content-Encoding": encoding.encode("latin-1")})
        plain = client.post("/v1/completions", json={"model": "toy", "prompt": "x", "max_tokens": 1})
        named = client.post(
            "/v1/completions",
            json={"model": "toy", "prompt": "x", "max_tokens": 1},
            headers={"Content-Encoding": "Identity"},
        )
    assert answer.status_code == 415
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_content_encoding", None)
    assert "without Content-Encoding" in error["message"]
    assert (plain.status_code, named.status_code) == (200, 200)


def test_nobody_asks_for_more_urgency_than_is_allowed() -> None:
    body = {"model": "toy", "prompt": "x", "priority": -3}
    assert parse_completion(body, LimitsConfig(most_urgent_priority=-3), BOUNDS).priority == -3
    assert completion(priority=7).priority == 7
    with pytest.raises(InvalidRequestError) as refused:
        parse_completion(body, LimitsConfig(most_urgent_priority=-2), BOUNDS)
    assert refused.value.message == (
        "priority must be at least -2 (limits.most_urgent_priority), not -3; lower is more urgent"
    )


SPELLED_OTHERWISE: dict[str, tuple[Any, str]] = {
    "guided_json": ({"type": "object"}, "structured_outputs.json"),
    "guided_regex": ("a+", "structured_outputs.regex"),
    "guided_choice": (["a"], "structured_outputs.choice"),
    "guided_grammar": ("root ::= a", "structured_outputs.grammar"),
    "guided_whitespace_pattern": (" ", "structured_outputs.whitespace_pattern"),
    "regex": ("a+", "structured_outputs.regex"),
    "ebnf": ("root ::= a", "structured_outputs.grammar"),
    "json_schema": ("{}", "response_format or structured_outputs.json"),
    "grammar": ("root ::= a", "structured_outputs.grammar"),
    "repeat_penalty": (1.1, "repetition_penalty"),
}


@pytest.mark.parametrize("parse", [completion, chat])
def test_no_penalty_is_none_by_another_name_too(parse: Any) -> None:
    assert parse(repeat_penalty=1.0).ignored_fields == ()


@pytest.mark.parametrize("parse", [completion, chat])
@pytest.mark.parametrize("name", SPELLED_OTHERWISE)
def test_what_is_spelled_otherwise_is_refused_with_the_spelling_that_is_obeyed(name: str, parse: Any) -> None:
    value, spelling = SPELLED_OTHERWISE[name]
    with pytest.raises(InvalidRequestError) as caught:
        parse(**{name: value})
    assert (caught.value.message, caught.value.field) == (f"{name} is not taken here; use {spelling}", name)
    for nothing in (None, [], {}, ""):
        assert parse(**{name: nothing}).ignored_fields == ()
