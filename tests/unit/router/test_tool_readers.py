"""Calls in a model's text: each format, cut at every place, with nothing lost."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.tools.formats import (
    FORMATS,
    FUNCTION_GEMMA,
    GEMMA,
    HARMONY,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_NAMED,
    QWEN_CODER,
    ToolFormat,
    format_of,
    normal_tool,
    reader_for,
)
from router.tools.pieces import Called, Piece, Said, Thought, ToolUse, add_piece
from router.tools.response_template import format_of_template
from tandem.core.errors import ModelLoadError
from tests.support.router_site import write_checkpoint
from tests.support.tool_site import TOOL_TEMPLATE
from tests.support.work import growth, num_instructions

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
USE = ToolUse((normal_tool("weather", "Of a city.", SCHEMA), normal_tool("now", None, None)))
ONE = Called("weather", '{"city": "Kyōto", "days": 2}')
OTHER = Called("now", "{}")
NESTED = Called("weather", '{"city": "a } \\" ] </tool_call> \\\\", "days": [{"x": []}]}')

#: What a model writes, and what it means.
WRITTEN: list[tuple[ToolFormat, str, list[Piece]]] = [
    (HERMES, "Hello", [Said("Hello")]),
    (HERMES, '<tool_call>\n{"name": "weather", "arguments": {"city": "Kyōto", "days": 2}}\n</tool_call>', [ONE]),
    (HERMES, 'I look.\n<tool_call>{"name": "weather", "arguments": {"city": "Kyōto", "days": 2}}</tool_call>\n\n'
             '<tool_call>{"name": "now"}</tool_call>\n', [Said("I look."), ONE, OTHER]),
    (HERMES, '<tool_call>{"name": "now", "arguments": {}}</tool_call> Done. ', [OTHER, Said(" Done. ")]),
    (HERMES, f'<tool_call>{{"name": "weather", "arguments": {NESTED.arguments}}}</tool_call>', [NESTED]),
    (HERMES, '<tool_call>{"name": "now", "arguments": "{}"}', [OTHER]),  # the turn ended in place of the close
    (QWEN_CODER, "<tool_call>\n<function=weather>\n<parameter=city>\nKyōto\n</parameter>\n<parameter=days>\n2\n"
                 "</parameter>\n</function>\n</tool_call>", [ONE]),
    (QWEN_CODER, "Now:\n<tool_call><function=now></function></tool_call>", [Said("Now:"), OTHER]),
    (QWEN_CODER, "<tool_call><function=now>\n<parameter=a>\n\n</parameter>\n<parameter=b>\n\n\n</parameter>"
                 "<parameter=c><parameter=d></parameter></function></tool_call>",
     [Called("now", '{"a": "", "b": "\\n", "c": "<parameter=d>"}')]),
    (LLAMA, '{"name": "weather", "parameters": {"city": "Kyōto", "days": 2}}', [ONE]),
    (LLAMA, '{"name": "weather", "parameters": {"city": "Kyōto", "days": 2}}; {"name": "now", "parameters": {}}',
     [ONE, OTHER]),
    (LLAMA, '<|python_tag|>{"name": "now", "parameters": {}}', [OTHER]),
    (LLAMA, '{"answer": 42}', [Said('{"answer": 42}')]),
    (LLAMA, '{"name": "unknown", "parameters": {}}', [Said('{"name": "unknown", "parameters": {}}')]),
    (LLAMA, "It is {warm}.", [Said("It is {warm}.")]),
    (MISTRAL, '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Kyōto", "days": 2}}, {"name": "now"}]',
     [ONE, OTHER]),
    (MISTRAL_NAMED, '[TOOL_CALLS]weather[ARGS]{"city": "Kyōto", "days": 2}[TOOL_CALLS]now[CALL_ID]abc[ARGS]{}',
     [ONE, OTHER]),
    (MISTRAL_NAMED, 'I see.[TOOL_CALLS]now{}', [Said("I see."), OTHER]),
    (GEMMA, '<|tool_call>call:weather{city:<|"|>Kyōto<|"|>,days:2}<tool_call|>', [ONE]),
    (GEMMA, 'Yes <|tool_call>call:now{}<tool_call|>', [Said("Yes"), OTHER]),
    (FUNCTION_GEMMA, "<start_function_call>call:weather{city:<escape>Kyōto<escape>,days:2}<end_function_call>", [ONE]),
    (HARMONY, "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>It is warm.",
     [Thought("Hm."), Said("It is warm.")]),
    (HARMONY, "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
              '<|constrain|>json<|message|>{"city": "Kyōto", "days": 2}', [Thought("Hm."), ONE]),
    (HARMONY, "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.now<|channel|>commentary"
              "<|message|>{}<|call|>", [Said("I look."), OTHER]),
    (HARMONY, '<|channel|>commentary to=functions.now<|message|>{"a": "<|end|> \\"<|call|>"}<|call|><|start|>assistant'
              "<|channel|>final<|message|>Yes.", [Called("now", '{"a": "<|end|> \\"<|call|>"}'), Said("Yes.")]),
    (HARMONY, '<|channel|>commentary to=functions.now<|message|>{"a": "b}<|call|><|start|>assistant<|channel|>analysis'
              "<|message|>Hm.<|end|>", [Said('{"a": "b}'), Thought("Hm.")]),
]  # fmt: skip

#: What is no call comes out as it was written.
MALFORMED: list[tuple[ToolFormat, str]] = [
    (HERMES, "a < b <tool b <tool_call"),
    (HERMES, "<tool_call>"),
    (HERMES, "<tool_call>hello</tool_call>"),
    (HERMES, '<tool_call>{"name": "now"</tool_call>'),
    (HERMES, '<tool_call>{"name": "now", "arguments": [1]}</tool_call>'),
    (HERMES, '<tool_call>{"name": "now", "arguments": {"x": NaN}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "\\ud800"}</tool_call>'),
    (HERMES, '<tool_call>{"name": "now", "arguments": {"x": ' + "[" * 9000 + "]" * 9000 + "}}</tool_call>"),
    (HERMES, 'so: <tool_call> {"name": "now"} no more </tool_call>'),
    (HERMES, " \n" * 300),
    (QWEN_CODER, "<tool_call>\n<function=now>\nhello</function></tool_call>"),
    (QWEN_CODER, "<tool_call><function=now>"),
    (QWEN_CODER, "<tool_call><function=now><parameter=a>\n1</function></tool_call>"),
    (QWEN_CODER, "<tool_call><function=now><parameter=a>1</parameter><parameter=b></function></tool_call>"),
    (QWEN_CODER, "<tool_call><function=now><parameter=a>1</parameter> x</function></tool_call>"),
    (LLAMA, '  {"name": "now", "parameters": {}} is a call'),
    (LLAMA, '{"name": "now"'),
    (MISTRAL, "[TOOL_CALLS] none"),
    (MISTRAL, "[TOOL_CALLS] []"),
    (MISTRAL_NAMED, "[TOOL_CALLS]" + "x" * 600 + "{}"),
    (MISTRAL_NAMED, '[TOOL_CALLS]now[ARGS]{"x"'),
    (GEMMA, '<|tool_call>call:now{x:<|"|>y}<tool_call|>'),
    (FUNCTION_GEMMA, "<start_function_call>now<end_function_call>"),
    (HARMONY, "I never learned to write so."),
    (HARMONY, "x" * 2000),
]


def read(form: ToolFormat, parts: Iterable[str]) -> list[Piece]:
    """All that is read of `parts`, with text that follows text joined."""
    reader = reader_for(form, USE)
    pieces = [piece for part in parts for piece in reader.push(part)] + list(reader.finish())
    joined: list[Piece] = []
    for piece in pieces:
        add_piece(piece, joined)
    return joined


@pytest.mark.parametrize(("form", "text", "meant"), WRITTEN, ids=lambda value: getattr(value, "name", None))
def test_every_format_is_read_wherever_the_stream_is_cut(form: ToolFormat, text: str, meant: list[Piece]) -> None:
    assert read(form, [text]) == meant
    assert read(form, text) == meant
    for at in range(len(text)):
        assert read(form, [text[:at], text[at:]]) == meant, at


@pytest.mark.parametrize(("form", "text"), MALFORMED, ids=lambda value: getattr(value, "name", None))
def test_what_is_no_call_comes_out_as_it_was_written(form: ToolFormat, text: str) -> None:
    assert read(form, [text]) == [Said(text)]
    assert read(form, text) == [Said(text)]


#: JSON that Python has no number for, or would write in another way.
ODD = '{"x": 1e400, "y":[ -1E+999,1.50 ],\n"x":"\\ud800"}'


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, f'<tool_call>{{"arguments": {{"x": 1}} , "name": "now",\n "arguments" :{ODD} }}</tool_call>'),
        (HERMES, f'<tool_call>{{"name": "now", "arguments": {json.dumps(ODD)}}}</tool_call>'),
        (LLAMA, f'{{"name": "now", "parameters": {ODD}}}'),
        (MISTRAL, f'[TOOL_CALLS] [ {{"name": "now", "arguments": {ODD}}} , {{"name": "now", "arguments":{ODD}}}]'),
        (MISTRAL_NAMED, f"[TOOL_CALLS]now[ARGS]{ODD}"),
        (HARMONY, f"<|channel|>commentary to=functions.now<|message|>{ODD}<|call|>"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_arguments_stay_as_the_model_has_written_them(form: ToolFormat, text: str) -> None:
    pieces = read(form, [text])
    assert pieces
    assert set(pieces) == {Called("now", ODD)}


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (QWEN_CODER, "<tool_call><function=weather><parameter=days>\n1e400\n</parameter></function></tool_call>"),
        (GEMMA, "<|tool_call>call:weather{days:1e400}<tool_call|>"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_parameter_stays_the_number_that_the_model_has_written(form: ToolFormat, text: str) -> None:
    assert read(form, [text]) == [Called("weather", '{"days": 1e400}')]


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, " 12 ", 12),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "12", 12),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "1.5", "1.5"),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, '["a"]', ["a"]),
        ({"$ref": "#/$defs/level"}, "2", 2),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"type": "array", "contains": {}}, "[1]", [1]),
        ({"type": "integer"}, "two", "two"),
        ({}, "12", "12"),
        ({"$ref": "#/$defs/nowhere"}, "12", "12"),
        ({"type": "array", "minItems": "x", "anyOf": [{"minItems": 1}]}, "[1]", [1]),
    ],
)
def test_a_parameter_is_what_its_schema_lets_it_be(schema: dict[str, Any], written: str, value: object) -> None:
    parameters = {"type": "object", "properties": {"x": schema}, "$defs": {"level": {"type": "integer"}}}
    reader = reader_for(QWEN_CODER, ToolUse((normal_tool("now", None, parameters),)))
    text = f"<tool_call><function=now><parameter=x>\n{written}\n</parameter></function></tool_call>"
    (call,) = [*reader.push(text), *reader.finish()]
    assert isinstance(call, Called)
    assert json.loads(call.arguments) == {"x": value}


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{a:<|"|>x, y:1<|"|>,b:[1,{c_d:null}],e-f:{}}', '{"a": "x, y:1", "b": [1, {"c_d": null}], "e-f": {}}'),
        ('{<|"|>a b<|"|>:1, c : -1.50}', '{"a b": 1, "c": -1.50}'),
        ('{"a":"x,y:1","b":["\\"<|", 2]}', '{"a": "x,y:1", "b": ["\\"<|", 2]}'),
    ],
)
def test_gemmas_arguments_become_json_and_strings_stay_what_they_are(written: str, arguments: str) -> None:
    assert read(GEMMA, [f"<|tool_call>call:now{written}<tool_call|>"]) == [Called("now", arguments)]


MARKS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|tool_call>", "<tool_call|>", "<|python_tag|>", '<|"|>',
     '{"name": "now", "arguments": {}}', '{"name": "now", "parameters": {}}', "call:now", "{", "}", "[", "]", '"', "\\",
     ";", " ", "\n", "x", "<", "<function=now>", "</function>", "now"]
)  # fmt: skip


@pytest.mark.parametrize("form", [form for form in FORMATS if form is not HARMONY], ids=lambda form: form.name)
@given(parts=st.lists(MARKS, max_size=12), cuts=st.lists(st.integers(0, 80), max_size=6))
def test_the_cuts_never_matter_and_text_is_never_lost(form: ToolFormat, parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = read(form, [text[a:b] for a, b in itertools.pairwise(places)])
    assert pieces == read(form, text)
    said = "".join(piece.text for piece in pieces if isinstance(piece, Said))
    if not any(isinstance(piece, Called) for piece in pieces):
        assert said == text
    rest = iter(text)
    assert all(char in rest for char in said), "text that was not written, or in another order"
    for piece in pieces:
        if isinstance(piece, Called):
            assert isinstance(json.loads(piece.arguments), dict)


@pytest.mark.long
def test_the_work_for_a_token_does_not_grow_with_the_output() -> None:
    """A long call costs a long text's work, not its square: a million characters, one at a time."""
    text = '<tool_call>{"name": "now", "arguments": {"x": "' + "y" * 1_000_000 + '"}}</tool_call>'
    reader = reader_for(HERMES, USE)
    pieces = [piece for char in text for piece in reader.push(char)]
    assert [piece.name for piece in pieces if isinstance(piece, Called)] == ["now"]


#: A call of gpt-oss whose body is a string that never ends.
UNENDED = '<|channel|>commentary to=functions.now<|message|>"\\"<|end|><|start|>assistant'


def test_strings_that_never_end_lose_no_text_however_many_there_are() -> None:
    assert read(HARMONY, [UNENDED] * 2000) == [Said('"\\"' * 2000)]


def test_strings_that_never_end_are_read_anew_a_bounded_number_of_times() -> None:
    def work(num: int) -> int:
        reader = reader_for(HARMONY, USE)
        reader.push(UNENDED * num)
        return num_instructions(reader.finish)

    assert work(200) < 6 * work(50)


@pytest.mark.parametrize(
    ("form", "before", "again", "after"),
    [
        (QWEN_CODER, "<tool_call><function=now>", "<parameter=a>\n", "</function></tool_call>"),
        (GEMMA, "<|tool_call>call:now{", '\\"', "}<tool_call|>"),
        (GEMMA, "<|tool_call>call:now{", '\\"', "\\\n}<tool_call|>"),
        (GEMMA, "<|tool_call>call:now{", '\\"', '\\<|"|>x<|"|>}<tool_call|>'),
    ],
    ids=["parameters", "quotes", "a last line", "a last escape"],
)
def test_what_never_ends_within_a_call_is_not_read_again_and_again(
    form: ToolFormat, before: str, again: str, after: str
) -> None:
    def call(num: int) -> None:
        text = before + again * num + after
        assert read(form, [text]) == [Said(text)]

    assert growth(call, 2000) < 9


def test_nothing_is_read_without_tools() -> None:
    text = '<tool_call>{"name": "now"}</tool_call>'
    reader = reader_for(HERMES, ToolUse(()))
    assert [*reader.push(text), *reader.finish()] == [Said(text)]


#: From the templates that come with the checkpoints.
SIGNS = {
    "harmony": "{{ '<|start|>assistant<|channel|>analysis<|message|>' }}",
    "hermes": '{{- \'\\n<tool_call>\\n{"name": "\' }}',
    "qwen-coder": "{{- '\\n<tool_call>\\n<function=' + tool_call.name + '>\\n' }}",
    "llama": "{{- '<|python_tag|>' + tool_call.name + \".call(\" }}",
    "mistral": "{{- '[TOOL_CALLS] [' }}",
    "mistral-named": "{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}",
    "gemma": "{{- '<|tool_call>call:' + function['name'] + '{' }}...<tool_call|>",
    "function-gemma": "{{- '<start_function_call>call:' }}",
}


def test_a_template_says_which_format_it_is() -> None:
    assert {form.name for form in FORMATS} == set(SIGNS)
    for name, template in SIGNS.items():
        form = format_of(template)
        assert form is not None
        assert form.name == name
    assert format_of("{{ '<tool_call>' + tc.name + '<arg_key>' }}") is None
    assert format_of("{% for m in messages %}{{ m.content }}{% endfor %}") is None


#: As transformers has it for Qwen, and as a checkpoint carries it.
TEMPLATE: dict[str, Any] = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*<\|im_end\|>", "content": "text"},
    },
}
BY_TEMPLATE = format_of_template(TEMPLATE, ["<|im_end|>", "<tool_call>", "</s>"], HERMES)


#: The template ends a call at the first close, also within a text.
READABLE = [(text, meant) for form, text, meant in WRITTEN if form is HERMES and NESTED not in meant]
READABLE = [(text, meant) for text, meant in READABLE if text.endswith(("</tool_call>", "Hello"))]


@pytest.mark.parametrize(("text", "meant"), [*READABLE, ("<think>Hm.</think>Hello", [Thought("Hm."), Said("Hello")])])
def test_a_checkpoints_own_template_is_read_wherever_the_stream_is_cut(text: str, meant: list[Piece]) -> None:
    assert BY_TEMPLATE is not None
    for at in range(len(text) + 1):
        assert read(BY_TEMPLATE, [text[:at], text[at:]]) == meant, at


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>hello</tool_call> x",
        '<tool_call>{"name": "now", "arguments": {"x": NaN}}</tool_call>',
        '<tool_call>{"name": 1}</tool_call>',
        "a <tool_call",
    ],
)
def test_what_a_checkpoints_template_cannot_read_is_text(text: str) -> None:
    assert BY_TEMPLATE is not None
    for at in range(len(text) + 1):
        assert read(BY_TEMPLATE, [text[:at], text[at:]]) == [Said(text)], at


@pytest.mark.long
@pytest.mark.parametrize(
    "opening",
    [
        pytest.param("", marks=pytest.mark.faults),
        pytest.param("<think>", marks=pytest.mark.faults),
        '<tool_call>{"name": "now", "arguments": {"x": "',
    ],
)
def test_a_character_costs_no_more_after_a_long_output(opening: str) -> None:
    """Of text, of reasoning and of a call; the parser would copy all that it has read for each character."""
    assert BY_TEMPLATE is not None
    reader = reader_for(BY_TEMPLATE, USE)
    reader.push(opening)

    def seconds(text: str) -> float:
        begun = time.process_time()
        for char in text:
            reader.push(char)
        return time.process_time() - begun

    first = seconds("y" * 2_000)
    reader.push("y" * 200_000)
    assert seconds("y" * 2_000) < 4 * first


@pytest.mark.parametrize("schema", [{"properties": None}, {"properties": 1}, {}])
def test_a_schema_may_be_odd(schema: dict[str, Any]) -> None:
    form, text = QWEN_CODER, "<tool_call><function=now><parameter=x>1</parameter></function></tool_call>"
    tool = normal_tool("now", None, {"type": "object", **schema})
    reader = reader_for(form, ToolUse((tool,)))
    assert [*reader.push(text), *reader.finish()] == [Called("now", '{"x": "1"}')]


#: A placeholder of which the message has nothing, and a schema that is none: KeyError and TypeError within the parser.
ODD_FIELD = {**TEMPLATE["fields"]["tool_calls"], "transform": {"function": {"name": "now", "arguments": "{other}"}}}
ODD_TOOL = normal_tool("now", None, {"type": "object", "properties": {"x": {"anyOf": 1}}})


@pytest.mark.parametrize(
    ("fields", "tool"),
    [({**TEMPLATE["fields"], "tool_calls": ODD_FIELD}, USE.tools[0]), (TEMPLATE["fields"], ODD_TOOL)],
)
def test_an_error_that_no_reader_foresees_leaves_text(
    fields: dict[str, Any], tool: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.tools.defects._told", set())
    text = '<tool_call>{"name": "now", "arguments": {"x": "1"}}</tool_call> so'
    form = format_of_template({**TEMPLATE, "fields": fields}, [], HERMES)
    assert form is not None
    for _ in range(3):
        reader = reader_for(form, ToolUse((tool,)))
        pieces = [piece for char in text for piece in reader.push(char)] + list(reader.finish())
        assert "".join(piece.text for piece in pieces if isinstance(piece, Said)) == text
    assert len(caplog.records) == 1


def test_text_that_only_looked_like_a_call_is_neither_lost_nor_doubled() -> None:
    text = "<tool_<tool_call>hello</tool_call>x"
    fields = {**TEMPLATE["fields"]}
    fields["tool_calls"] = {"open": "<tool_call>", "close_pattern": r"</tool_call>\s*", "repeats": True,
                            "content": "json", "content_args": {"allow_non_json": True}}  # fmt: skip
    form = format_of_template({**TEMPLATE, "fields": fields}, [], None)
    assert form is not None
    for at in range(len(text) + 1):
        assert read(form, [text[:at], text[at:]]) == [Said(text)], at


def test_a_message_that_the_prompt_has_begun_goes_on() -> None:
    assert BY_TEMPLATE is not None
    assert BY_TEMPLATE.markers == ("<|im_end|>", "<tool_call>")
    reader = reader_for(BY_TEMPLATE, USE, "x<|im_end|><|im_start|>assistant\n<think>")
    assert [*reader.push("Hm.</think>Yes"), *reader.finish()] == [Thought("Hm."), Said("Yes")]


def test_a_template_that_leaves_text_out_is_not_used() -> None:
    fields = {name: field for name, field in TEMPLATE["fields"].items() if name != "content"}
    assert format_of_template({**TEMPLATE, "fields": fields}, [], None) is None
    with pytest.raises(ModelLoadError, match="response_template cannot be read"):
        format_of_template({"fields": {}}, [], None)


@pytest.mark.processes
def test_a_checkpoints_template_is_used_without_torch(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "toy", template=TOOL_TEMPLATE)
    file = checkpoint / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "response_template": TEMPLATE}))
    code = (
        "import sys; from pathlib import Path; import router.http.app; from router.openai.model_card import ModelCard; "
        "from tandem.core import config; from tandem.core.tokenizer import Tokenizer; d = Path(sys.argv[1]); "
        "assert 'transformers' not in sys.modules; "
        "c = ModelCard.from_dir(d, config.load(None), Tokenizer.from_dir(d)); "
        "print(c.tool_format.name, 'transformers' in sys.modules, 'torch' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", code, checkpoint], capture_output=True, text=True, check=True).stdout
    assert told.split() == ["response_template", "True", "False"]
