"""Tokenisation and chat templates: the ids that `transformers` gives for the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import code_tokenizers
import pytest
import tokenizers
from tokenizers import decoders, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tandem.core.chat_template import ChatOptions, ChatTemplate
from tandem.core.errors import InvalidRequestError, ModelLoadError
from tandem.core.tokenizer import Tokenizer

TINY = Path(__file__).parents[3] / "tandem" / "models" / "tiny"
STORIES = Path(__file__).parents[4] / "shared" / "data" / "stories260K"
MESSAGES = [{"role": "system", "content": "Be <b>short</b>."}, {"role": "user", "content": "Héllo\nthere 😀"}]
TEXTS = ["Hello there", " two  spaces", "Héllo 😀\n\tx", "a"]


def save(directory: Path, config: dict[str, Any]) -> Path:
    code_tokenizers.byte_fallback().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def test_the_post_processor_decides_on_special_tokens() -> None:
    tokenizer = Tokenizer(code_tokenizers.byte_fallback())
    assert tokenizer.encode("the")[0] == 1
    assert tokenizer.encode("the", add_special_tokens=False)[0] != 1
    assert tokenizer.decode(tokenizer.encode("the 😀")) == "the 😀"


def test_a_chat_gets_one_beginning_not_two(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = Tokenizer.from_dir(
        save(tmp_path, {"bos_token": {"content": "<s>", "special": True}, "chat_template": template})
    )
    ids = tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": "the"}]), add_special_tokens=False)
    assert ids.count(1) == 1
    assert ids[0] == 1


def test_a_template_beside_a_processor_is_read_where_there_is_no_other(tmp_path: Path) -> None:
    save(tmp_path, {})
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "of the processor"}))
    assert Tokenizer.from_dir(tmp_path).render_chat(MESSAGES) == "of the processor"
    save(tmp_path, {"chat_template": "own"})
    assert Tokenizer.from_dir(tmp_path).render_chat(MESSAGES) == "own"
    save(tmp_path, {})
    (tmp_path / "chat_template.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"chat_template\.json cannot be read"):
        Tokenizer.from_dir(tmp_path)


def test_a_template_file_comes_before_the_configuration(tmp_path: Path) -> None:
    save(tmp_path, {"chat_template": [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]})
    assert Tokenizer.from_dir(tmp_path).render_chat(MESSAGES) == "d"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_dir(tmp_path).render_chat(MESSAGES) == "file"


def test_without_a_template_a_chat_is_refused() -> None:
    tokenizer = Tokenizer(code_tokenizers.byte_level())
    with pytest.raises(InvalidRequestError) as caught:
        tokenizer.render_chat(MESSAGES)
    assert caught.value.field == "messages"


@pytest.mark.parametrize("source", ["{{ raise_exception('no system role') }}", "{{ ''.__class__.__mro__ }}"])
def test_a_template_that_refuses_or_escapes_is_the_clients_error(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="refuses"):
        ChatTemplate(source).render(MESSAGES, special_tokens={})


def test_what_a_template_cannot_follow_to_its_end_is_the_clients_error() -> None:
    nested: Any = []
    for _ in range(2000):
        nested = [nested]
    with pytest.raises(InvalidRequestError, match="refuses"):
        ChatTemplate("{{ messages[0].x | tojson }}").render([{**MESSAGES[0], "x": nested}], special_tokens={})


def test_templates_have_the_usual_helpers() -> None:
    source = "{% generation %}{{ messages[0] | tojson }}{% endgeneration %}{% for x in [1,2] %}{{ x }}{% break %}"
    source += "{% endfor %}{{ strftime_now('%Y')[:2] }}{{ '+' if add_generation_prompt }}"
    text = ChatTemplate(source).render(MESSAGES[:1], special_tokens={})
    assert text == '{"role": "system", "content": "Be <b>short</b>."}120+'


def test_tools_and_documents_are_none_as_in_transformers() -> None:
    source = "{% if tools is not none or documents is not none %}{{ tools | length }}{% endif %}plain"
    assert ChatTemplate(source).render(MESSAGES, special_tokens={}) == "plain"


def said(role: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "a"}, {"role": role, "content": "b"}]


PLAIN = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
DEAF = "{% for m in messages if m.role == 'user' or m.role == 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
STRICT = "{# no developer, no tool #}{{ raise_exception('x') if messages[1].role not in ['user', 'system'] }}"
OPEN = "{% set roles = ['developer', 'tool', 'function'] %}"


@pytest.mark.parametrize("source", [PLAIN, DEAF, STRICT + PLAIN], ids=["passes on", "leaves out", "refuses"])
def test_a_developer_speaks_as_system_where_the_template_knows_none(source: str) -> None:
    text = ChatTemplate(source).render(said("developer"), special_tokens={})
    assert text == "[user]a[system]b"


@pytest.mark.parametrize("source", [PLAIN, DEAF, STRICT + PLAIN], ids=["passes on", "leaves out", "refuses"])
@pytest.mark.parametrize("role", ["tool", "function"])
def test_a_tool_that_the_template_does_not_know_is_refused(source: str, role: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"no messages of the role '{role}'") as caught:
        ChatTemplate(source).render(said(role), special_tokens={})
    assert caught.value.field == "messages[1].role"


@pytest.mark.parametrize("role", ["developer", "tool", "function"])
def test_roles_that_the_template_knows_are_its_own(role: str) -> None:
    text = ChatTemplate(OPEN + PLAIN).render(said(role), special_tokens={})
    assert text == f"[user]a[{role}]b"


def test_the_shipped_template_takes_a_developer_and_refuses_a_tool() -> None:
    tiny = Tokenizer.from_dir(TINY)
    assert tiny.render_chat(said("developer")) == tiny.render_chat(said("system"))
    with pytest.raises(InvalidRequestError, match="no messages of the role 'tool'"):
        tiny.render_chat(said("tool"))


@pytest.mark.parametrize("broken", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_broken_file_is_named(tmp_path: Path, broken: str) -> None:
    save(tmp_path, {})
    (tmp_path / broken).write_text("{% broken" if broken.endswith("jinja") else "{")
    with pytest.raises(ModelLoadError, match="template" if broken.endswith("jinja") else broken):
        Tokenizer.from_dir(tmp_path)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_dir(tmp_path)


@pytest.mark.parametrize("directory", [TINY, STORIES], ids=["tiny", "stories260K"])
def test_ids_and_templates_agree_with_transformers(directory: Path) -> None:
    if not (directory / "tokenizer.json").is_file():
        pytest.skip(f"{directory.name} is not here")
    transformers = pytest.importorskip("transformers")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(directory), Tokenizer.from_dir(directory)
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    rendered = theirs.apply_chat_template(MESSAGES, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert ours.encode(ours.render_chat(MESSAGES), add_special_tokens=False) == rendered


MARKERS = ["<|turn|>", "<|over|>"]
NOT_NORMALIZED = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}


@pytest.mark.parametrize(
    "config",
    [
        {"eos_token": "<|over|>", "additional_special_tokens": ["<|turn|>"]},
        {
            "eos_token": {"__type": "AddedToken", "content": "<|over|>", **NOT_NORMALIZED},
            "extra_special_tokens": {"turn_token": "<|turn|>"},
        },
        {
            "added_tokens_decoder": {
                "260": {"content": "<|new|>", "special": True, **NOT_NORMALIZED},
                "256": {"content": "<|turn|>", "special": True, **NOT_NORMALIZED},
                "257": {"content": "<|over|>", "special": False, **NOT_NORMALIZED},
                "258": {"content": "<|known|>", "special": False, **NOT_NORMALIZED},
            },
        },
        {"eos_token": "<|known|>", "pad_token": None},
        {
            "additional_special_tokens": ["<|known|>", "<|turn|>"],
            "added_tokens_decoder": {
                "258": {"content": "<|known|>", "special": False, **NOT_NORMALIZED, "rstrip": True},
                "259": {"content": "<|special|>", "special": True, **NOT_NORMALIZED, "lstrip": True},
            },
        },
    ],
)
def test_tokens_that_the_configuration_alone_names_are_whole(tmp_path: Path, config: dict[str, Any]) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: number for number, piece in enumerate([*alphabet, *MARKERS, "<|known|>", "<|special|>"])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([tokenizers.AddedToken("<|known|>", special=False, normalized=False)])
    backend.add_special_tokens(["<|special|>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs, ours = PreTrainedTokenizerFast.from_pretrained(tmp_path), Tokenizer.from_dir(tmp_path)
    text = f"a {' b '.join([*MARKERS, '<|known|>', '<|special|>', '<|new|>'])} c"
    ids = theirs.encode(text, add_special_tokens=False)
    assert ours.encode(text, add_special_tokens=False) == ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.special_ids == {i for i, token in theirs.added_tokens_decoder.items() if token.special}


def test_special_tokens_of_older_checkpoints_are_read_where_they_name_them(tmp_path: Path) -> None:
    template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    save(tmp_path, {"chat_template": template, "bos_token": "<unk>", "tokenizer_class": "PreTrainedTokenizerFast"})
    named = {"bos_token": {"content": "<s>", **NOT_NORMALIZED}, "eos_token": "</s>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(named))
    theirs, ours = PreTrainedTokenizerFast.from_pretrained(tmp_path), Tokenizer.from_dir(tmp_path)
    rendered = theirs.apply_chat_template(MESSAGES, tokenize=False)
    assert ours.render_chat(MESSAGES) == rendered == f"<s>{MESSAGES[0]['content']}</s>"
    assert ours.eos_token_id == theirs.eos_token_id == 2
    (tmp_path / "special_tokens_map.json").write_text("[]")
    with pytest.raises(ModelLoadError, match=r"special_tokens_map\.json must hold an object"):
        Tokenizer.from_dir(tmp_path)


def test_padding_of_a_training_is_no_token_of_the_model(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(save(tmp_path, {"pad_token": "[never seen]"}))
    assert tokenizer.vocab_size == code_tokenizers.byte_fallback().get_vocab_size()


def test_tokens_that_are_none_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json names tokens"):
        Tokenizer.from_dir(save(tmp_path, {"added_tokens_decoder": {"one": {"content": "<s>"}}}))


CONTINUED = [
    ("{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}", "It goes on  "),
    ("{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>\n{% endfor %}", "It goes on  "),
    ("{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>\n{% endfor %}", "It goes on"),
]


@pytest.mark.parametrize(("template", "content"), CONTINUED)
def test_a_last_message_is_continued_where_transformers_would(tmp_path: Path, template: str, content: str) -> None:
    messages = [{"role": "user", "content": "It goes on"}, {"role": "assistant", "content": content}]
    save(tmp_path, {"chat_template": template})
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), chat_template=template)
    rendered = theirs.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=False, continue_final_message=True
    )
    options = ChatOptions(add_generation_prompt=False, continue_final_message=True)
    assert Tokenizer.from_dir(tmp_path).render_chat(messages, options=options) == rendered


def test_a_message_that_the_template_leaves_out_cannot_be_continued(tmp_path: Path) -> None:
    save(tmp_path, {"chat_template": "{{ messages[0].content }}"})
    options = ChatOptions(add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(InvalidRequestError) as caught:
        Tokenizer.from_dir(tmp_path).render_chat([*MESSAGES, {"role": "assistant", "content": "b"}], options=options)
    assert caught.value.field == "continue_final_message"


CALLING: list[dict[str, Any]] = [
    {"role": "user", "content": "a"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"x": "é", "y": [1]}}},
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "b"},
]
CALLS = "{% for m in messages %}{% for c in m.tool_calls or [] %}"
ENDS = "{% endfor %}{% if m.role == 'tool' %}({{ m.tool_call_id }}){% endif %}{% endfor %}"


@pytest.mark.parametrize(
    "written",
    ["{{ c.function.arguments | tojson }}", "{{ c.function.name[:0] + c.function.arguments }}",
     "{{ c['function']['arguments'] }}"],
    ids=["makes JSON", "joins texts", "writes it as it comes"],
)  # fmt: skip
def test_arguments_of_calls_are_json_however_the_template_takes_them(written: str) -> None:
    text = ChatTemplate(CALLS + written + ENDS).render(CALLING, special_tokens={})
    assert text == '{"x": "é", "y": [1]}(call_1)'


def test_ids_of_calls_are_shortened_for_templates_that_refuse_others() -> None:
    source = CALLS + "{% if c.id|length != 9 %}{{ raise_exception('nine') }}{% endif %}{{ c.id }}" + ENDS
    text = ChatTemplate(source).render(CALLING, special_tokens={})
    assert len(text) == 9 + len("()") + 9
    assert text[:9] == text[10:19], "a call and its result have one id"
    nine = [{**CALLING[1], "tool_calls": [{**CALLING[1]["tool_calls"][0], "id": "abcdef123"}]}]
    assert ChatTemplate(source).render(nine, special_tokens={}) == "abcdef123"


def test_calls_that_the_template_would_leave_out_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="knows no calls of tools") as caught:
        ChatTemplate(OPEN + PLAIN).render(CALLING, special_tokens={})
    assert caught.value.field == "messages[1].tool_calls"


def test_the_template_for_tools_writes_chats_that_have_some(tmp_path: Path) -> None:
    named = {"default": "plain", "tool_use": "{{ tools[0].function.name }}"}
    save(tmp_path, {"chat_template": [{"name": name, "template": source} for name, source in named.items()]})
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.knows_tools
    assert tokenizer.render_chat(MESSAGES) == "plain"
    assert tokenizer.render_chat(MESSAGES, [{"type": "function", "function": {"name": "f"}}]) == "f"


def test_templates_in_files_are_found_by_name_and_go_before_those_of_the_configuration(tmp_path: Path) -> None:
    """As `transformers` saves them, and as it leaves them where a template is replaced by a file."""
    tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]
    older = [{"name": "default", "template": "old"}, {"name": "tool_use", "template": "old for tools"}]
    save(tmp_path, {"chat_template": older, "tokenizer_class": "PreTrainedTokenizerFast"})
    (tmp_path / "chat_template.jinja").write_text("new{% if tools %} with {{ tools[0].function.name }}{% endif %}")

    def agreed() -> tuple[str, str]:
        theirs, ours = PreTrainedTokenizerFast.from_pretrained(tmp_path), Tokenizer.from_dir(tmp_path)
        rendered = [
            theirs.apply_chat_template(MESSAGES, tools=some, tokenize=False, add_generation_prompt=True)
            for some in (None, tools)
        ]
        assert [ours.render_chat(MESSAGES), ours.render_chat(MESSAGES, tools)] == rendered
        return rendered[0], rendered[1]

    assert agreed() == ("new", "new with f")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("for {{ tools[0].function.name }}")
    assert agreed() == ("new", "for f")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelLoadError, match=r"chat_template\.jinja cannot be read"):
        Tokenizer.from_dir(tmp_path)


#: As LLaVA's.
OF_PARTS = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': '}}{% endif %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' '}}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


def test_contents_are_parts_where_the_template_would_leave_out_texts(tmp_path: Path) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "It was"}]
    save(tmp_path, {"chat_template": OF_PARTS, "tokenizer_class": "PreTrainedTokenizerFast"})
    theirs, ours = PreTrainedTokenizerFast.from_pretrained(tmp_path), Tokenizer.from_dir(tmp_path)
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
    rendered = theirs.apply_chat_template(parts, tokenize=False, add_generation_prompt=True)
    assert ours.render_chat(messages) == rendered
    assert all(message["content"] in rendered for message in messages)
    begun = ours.render_chat(messages, options=ChatOptions(add_generation_prompt=False, continue_final_message=True))
    assert begun.endswith("ASSISTANT: It was")


@pytest.mark.parametrize("written", ["{{ m.content }}", "{% if m.content is string %}{{ m.content }}{% endif %}"])
def test_contents_stay_texts_where_the_template_writes_them(written: str) -> None:
    template = ChatTemplate("{% for m in messages %}" + written + "{% endfor %}")
    assert template.render(MESSAGES, special_tokens={}) == "".join(message["content"] for message in MESSAGES)
