"""Schemas of tools in formats that do not write JSON: what grammars let through is read as what the schema allows."""

from __future__ import annotations

import json
import random
import string
from collections import Counter
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from router.tools import schema_kinds
from router.tools.formats import FUNCTION_GEMMA, GEMMA, QWEN_CODER, ToolFormat, normal_tool, reader_for
from router.tools.grammar import Wanted, grammar_of
from router.tools.pieces import Called, Piece, ToolUse
from router.tools.schema_kinds import InexpressibleError, SchemaKinds
from tandem.core.errors import InvalidRequestError
from tandem.core.grammar import CompiledGrammar
from tests.support.router_site import EOS
from tests.unit.router.test_call_grammars import Model

FORMS = {form.name: form for form in (QWEN_CODER, GEMMA, FUNCTION_GEMMA)}
#: Of arguments that such a model may also write as it has learnt to.
QUOTES = {"gemma": '<|"|>', "function-gemma": "<escape>"}
#: What ends a value, a name, a call and the output: of parameters, and of Gemma's objects, of which 303 is the quote.
#: Each begins with what ends a string; some have to end with `z`.
PARAMETER_ENDS = [[*text] for text in (b"\n</parameter>\n", b'"', b"]", b"}", b">\n", b'": ', b"z", b"</function>")]
GEMMA_ENDS = [[303], [*b"]"], [*b"}"], [*b":"], [*b"z"]]
Json = Any


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    return {name: Model(tmp_path_factory.mktemp(name), name) for name in FORMS}


class Tool:
    """A tool `f` with a schema, and the one call of it that a model has to make."""

    def __init__(self, model: Model, schema: dict[str, Any]) -> None:
        self.model, self.schema = model, schema
        self.ends = (PARAMETER_ENDS if model.form is QWEN_CODER else GEMMA_ENDS) + [[302], [EOS]]

        def marker(text: str) -> str:
            return f"<[{model.card.markers[text]}]>"

        assert model.form.form is not None
        lark = grammar_of(model.form.form, Wanted([("f", schema)], is_forced=True, is_single=True), marker)
        self.grammar = CompiledGrammar(LLMatcher.grammar_from_lark(lark), model.vocabulary.tokens)

    def takes(self, text: str) -> bool:
        matcher = self.grammar.new_matcher().inner
        ids = self.model.tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())

    def write(self, draw: random.Random) -> str:
        """A call at random. What ends something is likelier than its share, so that it ends itself."""
        inner, ids = self.grammar.new_matcher().inner, list[int]()
        while len(ids) < 3000:
            if draw.random() < (0.3 if len(ids) < 200 else 0.9):
                ends = [end for end in self.ends if inner.validate_tokens(end) == len(end)]
                new = draw.choice(ends[: draw.choice([1, len(ends)])]) if ends else []
            else:
                mask = inner.compute_bitmask()
                new = [draw.choice([i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1])]
            if new == [EOS]:
                return self.model.text_of(ids)
            assert inner.consume_tokens(new)
            ids += new
        raise AssertionError(f"it never ends: {self.model.text_of(ids)[-300:]!r}")

    def read(self, *parts: str) -> list[Piece]:
        reader = reader_for(self.model.form, ToolUse((normal_tool("f", None, self.schema),)))
        return [piece for part in parts for piece in reader.push(part)] + [*reader.finish()]

    def arguments(self, text: str) -> dict[str, Any]:
        (call,) = self.read(text)
        assert isinstance(call, Called), text
        assert call.name == "f"
        read: dict[str, Any] = json.loads(call.arguments)
        return read


def written(form: ToolFormat, arguments: dict[str, Any]) -> str:
    """A call as the templates of such checkpoints write it."""
    if form is QWEN_CODER:
        texts = {
            key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for key, value in arguments.items()
        }
        parts = [f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items()]
        return f"<tool_call>\n<function=f>\n{''.join(parts)}</function>\n</tool_call>"
    return f"{form.markers[0]}call:f{_gemma(arguments, QUOTES[form.name])}{form.markers[1]}"


def _gemma(value: Json, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        members = sorted(value.items(), key=lambda member: member[0].lower())
        return "{" + ",".join(f"{key}:{_gemma(part, quote)}" for key, part in members) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_gemma(part, quote) for part in value) + "]"
    return json.dumps(value)


# -- schemas at random, each with a value that it allows

TEXTS = st.text(alphabet=string.ascii_letters + "12 \n\t\"'\\<>{}[]:,=/|é語😀", max_size=8)
TILDE = TEXTS.map(lambda text: f"~{text}")  # none of them looks like JSON
Drawn = tuple[dict[str, Any], Json]
LEAVES: st.SearchStrategy[Drawn] = st.one_of(
    st.tuples(st.just({"type": "string"}), TEXTS),
    st.tuples(st.just({"type": "string", "minLength": 2, "maxLength": 5}), st.text("a\n\"é😀", min_size=2, max_size=5)),
    st.tuples(st.just({"type": "string", "pattern": "^[a-c]+|[x-z]$"}), st.sampled_from(["abc", "1z", "aB", "zzz"])),
    st.tuples(st.just({"type": "string", "format": "date"}), st.sampled_from(["2026-02-28", "1999-12-31"])),
    st.tuples(st.just({"enum": ["red", "d\n'\"", 7, True, None]}), st.sampled_from(["red", "d\n'\"", 7, True, None])),
    st.tuples(st.just({"const": {"a": ["b", 1, {}]}}), st.just({"a": ["b", 1, {}]})),
    st.tuples(st.just({"type": "integer", "minimum": -3, "maximum": 40}), st.integers(-3, 40)),
    st.tuples(st.just({"type": "number"}), st.floats(-1e6, 1e6, allow_nan=False)),
    st.tuples(st.just({"type": ["boolean", "null"], "title": "x"}), st.sampled_from([True, False, None])),
    st.tuples(st.just({"anyOf": [{"type": "string"}, {"type": "null"}]}), TILDE | st.none()),
    st.tuples(st.just({"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 9}]}),
              TILDE | st.integers(0, 99)),
    st.tuples(st.just({"$ref": "#/$defs/tree"}), st.just({"kids": [{"kids": []}], "name": "n"})),
    st.tuples(st.just({"allOf": [{"type": "string"}], "maxLength": 3}), st.just("abc")),
)  # fmt: skip
TREE = {
    "type": "object",
    "properties": {
        "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
        "name": {"type": "string"},
    },
    "required": ["kids"],
    "additionalProperties": False,
}
KEYS = st.sampled_from(["a", "B", "key_1", "of-it", "c d", "é"])


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy[Drawn]) -> Drawn:
    parts = draw(st.dictionaries(KEYS, inner, max_size=4))
    required = [key for key in parts if draw(st.booleans())]
    present = {key: value for key, (_, value) in parts.items() if key in required or draw(st.booleans())}
    schema = {
        "type": "object",
        "properties": {key: schema for key, (schema, _) in parts.items()},
        "required": required,
        "additionalProperties": draw(st.sampled_from([False, {"type": "integer"}])),
    }
    return schema, present


def arrays(inner: st.SearchStrategy[Drawn]) -> st.SearchStrategy[Drawn]:
    def of(items: Drawn, first: Drawn, number: int) -> Drawn:
        schema = {"type": "array", "prefixItems": [first[0]], "items": items[0], "minItems": number, "maxItems": 3}
        return schema, [first[1], *[items[1]] * 2][: max(number, 2)]

    return st.builds(of, inner, inner, st.integers(0, 3))


ANY = st.recursive(LEAVES, lambda inner: objects(inner) | arrays(inner), max_leaves=4)
TOOLS = objects(ANY).map(lambda drawn: ({**drawn[0], "$defs": {"tree": TREE}}, drawn[1]))


@pytest.mark.long
@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=15, deadline=None, phases=[Phase.generate])
@given(drawn=TOOLS, seed=st.integers(0, 999))
def test_what_a_grammar_lets_through_is_read_as_what_the_schema_allows(
    models: dict[str, Model], name: str, drawn: Drawn, seed: int
) -> None:
    schema, value = drawn
    tool = Tool(models[name], schema)
    text = tool.write(random.Random(seed))
    jsonschema.validate(tool.arguments(text), schema)
    whole = tool.read(text)
    for at in range(0, len(text), max(1, len(text) // 40)):
        assert tool.read(text[:at], text[at:]) == whole, at
    # What the model has learnt to write comes through, and is what was meant.
    if name == "qwen-coder" or all(key.isascii() and key.isidentifier() for key in _keys(value)):
        learnt = written(models[name].form, value)
        assert tool.takes(learnt), learnt
        assert tool.arguments(learnt) == value


def _keys(value: Json) -> list[str]:
    if isinstance(value, dict):
        return [*value, *(key for part in value.values() for key in _keys(part))]
    return [key for part in value for key in _keys(part)] if isinstance(value, list) else []


@pytest.mark.parametrize("name", FORMS)
def test_a_call_goes_on_behind_its_journal_with_the_same_masks(models: dict[str, Model], name: str) -> None:
    """A worker is lost within a call: the next one is given its tokens and may choose among the same."""
    tool = Tool(models[name], {"type": "object", "properties": {"t": {"$ref": "#/$defs/tree"}}, "required": ["t"],
                               "$defs": {"tree": TREE}})  # fmt: skip
    text = written(models[name].form, {"t": {"kids": [{"kids": []}], "name": "~"}})
    first, ids = tool.grammar.new_matcher(), models[name].tokenizer.encode(text, add_special_tokens=False)
    for at in range(len(ids)):
        if at % 7 == 3:
            again = tool.grammar.new_matcher()
            for token_id in ids[:at]:  # as `tandem.worker.guide.Guide.replay`
                again.inner.compute_bitmask()
                again.take([token_id])
            assert again.inner.compute_bitmask() == first.inner.compute_bitmask()
        first.inner.compute_bitmask()
        first.take([ids[at]])


STRING = {"type": "string"}


def parameters(x: Json, **more: Json) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": x}, "required": ["x"], "additionalProperties": False, **more}


def test_strings_in_lists_of_a_parameter_may_name_what_would_end_it(models: dict[str, Model]) -> None:
    """As JSON has it, with the stroke escaped: the reader looks for the text of an end."""
    tool = Tool(models["qwen-coder"], parameters({"type": "array", "items": STRING}))
    call = written(QWEN_CODER, {"x": ["</parameter></tool_call>"]})
    assert not tool.takes(call)
    call = call.replace('["</parameter></tool', '["\\ud83d\\ude00<\\/parameter><\\/tool')
    assert tool.takes(call)
    assert tool.arguments(call) == {"x": ["😀</parameter></tool_call>"]}
    assert not tool.takes(call.replace("\\ude00", ""))
    only = Tool(models["qwen-coder"], parameters({"const": ["</parameter>"]}))
    assert only.arguments(only.write(random.Random(3))) == {"x": ["</parameter>"]}


@pytest.mark.parametrize("name", FORMS)
def test_a_string_ends_with_its_first_end_and_may_have_no_other_text_in_it(models: dict[str, Model], name: str) -> None:
    tool = Tool(models[name], parameters(STRING))
    plain = "\n<parameter=x> </function> {\"a\": 'b'}\n\n"
    assert tool.takes(written(models[name].form, {"x": plain}))
    assert tool.arguments(written(models[name].form, {"x": plain})) == {"x": plain}
    ends = ["</parameter>", "</tool_call>"] if name == "qwen-coder" else [QUOTES[name], models[name].form.close]
    for end in ends:
        spelled = [*f"a{end}b".encode()]  # without special tokens
        matcher = tool.grammar.new_matcher().inner
        head = written(models[name].form, {"x": "~"}).partition("~")[0]
        assert matcher.consume_tokens(models[name].tokenizer.encode(head, add_special_tokens=False))
        assert matcher.try_consume_tokens(spelled) < len(spelled)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "pattern": "b+"}, ["b", "abba", "\nb"], ["", "ac"]),
        ({"type": "string", "pattern": "^a|b$"}, ["ax", "xb"], ["xa", "bx"]),
        ({"type": "string", "pattern": "^(a|[|)])/\\d$"}, ["a/1", "|/2"], ["a/", "/1", "aa/1", "a/٣"]),
        ({"type": "string", "pattern": "\\$$"}, ["a$"], ["a"]),
        ({"type": "string", "pattern": "^[a-z]+$", "enum": ["a", "B", "cd"]}, ["a", "cd"], ["B", "d"]),
        ({"type": "string", "minLength": 1, "maxLength": 2}, ["é", "😀😀"], ["", "abc"]),
        ({"type": "string", "format": "date-time"}, ["2026-02-28T23:59:59.5+01:00"], ["2026-02-30T00:00:00Z", "2026"]),
        ({"type": "string", "format": "ipv6"}, ["::1", "1::", "fe80::1:2", "1:2:3:4:5:6:7:8"], [":", "1:2", "1::2::3"]),
        ({"type": "string", "format": "uri"}, ["https://a.b/c?d=1#e", "urn:x:y"], ["a b", "//a"]),
        ({"type": "string", "format": "email"}, ["a.b@c.de"], ["a@", "@b"]),
        ({"type": "string", "format": "duration"}, ["P1Y2M", "PT5S", "P3W"], ["P", "PT", "1Y"]),
        ({"type": "string", "format": "uuid"}, ["00000000-0000-0000-0000-00000000000f"], ["0"]),
    ],
)
def test_what_a_schema_says_of_a_string_holds(
    models: dict[str, Model], schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    for name, model in models.items():
        for inner, put in ((schema, lambda text: text), ({"type": "array", "items": schema}, lambda text: [text])):
            tool = Tool(model, parameters(inner))
            for text in good:
                if name == "qwen-coder" and inner is not schema and "\n" in text:
                    continue  # what a pattern says is of texts that JSON does not escape
                assert tool.takes(written(model.form, {"x": put(text)})), (name, text)
            for text in bad:
                assert not tool.takes(written(model.form, {"x": put(text)})), (name, text)


def test_a_string_beside_another_kind_does_not_look_like_it(models: dict[str, Model]) -> None:
    """What looks like JSON that the schema allows is read as it."""
    anything = {
        "anyOf": [STRING, {"type": "null"}, {"type": "integer"}, {"type": "array", "items": {"type": "integer"}}]
    }
    tool = Tool(models["qwen-coder"], parameters(anything))
    texts = ("three", "nullable", "12 apples", "true", "", "a [1]", "2026-02-28", "10.0.0.1", "1-800", "007", "1e", "-")
    for value in (*texts, 12, None, [], [1, 2]):
        assert tool.takes(written(QWEN_CODER, {"x": value})), value
        assert tool.arguments(written(QWEN_CODER, {"x": value})) == {"x": value}
    for text in ("1e400", "[a]", ' ["a"]', " null\n", "12\n"):
        assert not tool.takes(written(QWEN_CODER, {"x": text})), text


def test_other_parameters_than_those_of_the_schema_follow_additional_properties(models: dict[str, Model]) -> None:
    schema = parameters({"type": "integer"}, additionalProperties={"type": "boolean"}, required=["x", "z"])
    for model in models.values():
        tool = Tool(model, schema)
        for good in ({"x": 1, "z": True}, {"x": 1, "z": True, "zz": True, "zzz": False}):
            text = written(model.form, good)
            assert tool.takes(text), text
            assert tool.arguments(text) == good
        for bad in ({"x": True, "z": True}, {"x": 1}, {"x": 1, "z": True, "zz": 3}):
            assert not tool.takes(written(model.form, bad)), bad
        twice = written(model.form, {"x": 1, "z": True, "zx": False})
        assert tool.takes(twice)
        assert not tool.takes(twice.replace("zx", "x")), "of another kind than the schema has for it"
        assert not Tool(model, parameters({"type": "integer"})).takes(written(model.form, {"x": 1, "y": 1}))


def test_gemmas_keys_are_in_the_order_in_which_its_template_shows_them(models: dict[str, Model]) -> None:
    tool = Tool(models["gemma"], {"type": "object", "properties": {"b": STRING, "A": STRING}, "required": ["A"]})
    assert tool.takes('<|tool_call>call:f{A:<|"|>x<|"|>,b:<|"|>y<|"|>}<tool_call|>')
    assert not tool.takes('<|tool_call>call:f{b:<|"|>y<|"|>,A:<|"|>x<|"|>}<tool_call|>')


SAME = "the same"
#: Of a schema, and what is said of it; `None`: the format takes it.
REFUSED: list[tuple[dict[str, Any], str | None, str | None]] = [
    (parameters({"not": STRING}), "parameters.properties.x.not: such a call cannot be held to it", SAME),
    (parameters({"type": "array", "uniqueItems": True}), "parameters.properties.x.uniqueItems", SAME),
    (parameters({"type": "array", "items": {"type": "object", "minProperties": 2}}),
     "parameters.properties.x.items.minProperties", SAME),
    (parameters({"type": "string", "format": "color"}), "parameters.properties.x.format: is none of date-time", SAME),
    (parameters({"$ref": "#/$defs/y"}), "parameters.properties.x.$ref: #/$defs/y is not there", SAME),
    (parameters({"$ref": "#/$defs/y"}, **{"$defs": {"y": {"$ref": "#/$defs/y"}}}), "refers to itself", SAME),
    (parameters({"type": "text"}), "parameters.properties.x.type: must be of string, null", SAME),
    (parameters({"allOf": [{"type": "string", "pattern": "a"}, {"pattern": "b"}]}), "is said in two places", SAME),
    (parameters({"oneOf": [STRING, {"enum": ["a"]}]}), "parameters.properties.x.oneOf: more than one part", SAME),
    (parameters({"oneOf": [STRING, {"type": "null"}]}), None, None),
    (parameters({"type": ["string", "integer"], "minimum": 3}), "minimum of a number that may be a string", None),
    (parameters({"type": "integer", "enum": [1, 20], "minimum": 3}), None, None),
    (parameters({"type": ["string", "integer"], "enum": [1, "a"], "minimum": 1}), "of a number that may be", None),
    (parameters({"type": "object", "enum": [{"a": 1}], "required": ["a"]}), "has values, and says more", SAME),
    (parameters({"enum": ["</parameter>"]}), "none of it can be written where </parameter> ends", None),
    (parameters({"enum": ['<|"|>']}), None, 'none of it can be written where <|"|> ends'),
    ({"type": "object", "properties": {"a>": STRING}}, "parameters.properties.a>: such a name", None),
    ({"anyOf": [parameters(STRING), parameters({"type": "null"})]}, "must be the schema of one object", None),
    ({"type": "array"}, "must be the schema of", SAME),
    (parameters({"enum": []}), "allows nothing", SAME),
    (parameters({"type": "string", "minLength": "x"}), "minLength and maxLength must be numbers", SAME),
    (parameters({"type": "array", "minItems": 3, "maxItems": 2}), "allows nothing", SAME),
    (parameters({"allOf": [{"minimum": 1}, {"minimum": "x"}]}), "is no JSON schema", SAME),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "of_qwen", "of_gemma"), REFUSED)
def test_what_a_format_cannot_be_held_to_is_refused_with_the_part_that_says_it(
    models: dict[str, Model], schema: dict[str, Any], of_qwen: str | None, of_gemma: str | None
) -> None:
    for name, words in (("qwen-coder", of_qwen), ("gemma", of_qwen if of_gemma == SAME else of_gemma)):
        if words is None:
            tool = Tool(models[name], schema)
            tool.arguments(tool.write(random.Random(1)))
        else:
            with pytest.raises(InexpressibleError) as caught:
                Tool(models[name], schema)
            assert words in str(caught.value)
            assert str(caught.value).startswith("of f: parameters")


@pytest.mark.parametrize("name", FORMS)
def test_a_refusal_names_the_tool_and_the_format(models: dict[str, Model], name: str) -> None:
    tool = {"type": "function", "function": {"name": "g", "strict": True, "parameters": parameters({"not": {}})}}
    with pytest.raises(InvalidRequestError) as caught:
        models[name].asked(tools=[tool])
    assert caught.value.field == "tools"
    assert caught.value.message == (
        f"tools cannot hold in calls as this model writes them ({name}): of g: parameters.properties.x.not: "
        "such a call cannot be held to it"
    )
    odd = {"type": "function", "function": {"name": "a b", "parameters": parameters(STRING)}}
    with pytest.raises(InvalidRequestError, match="the name 'a b' cannot be written"):
        models[name].asked(tools=[odd], tool_choice="required")


def test_a_schema_that_leads_through_itself_again_and_again_is_refused_and_not_followed(
    models: dict[str, Model],
) -> None:
    """Each of 40 levels has two parts that lead on: 2^40 branches."""
    levels = {f"l{n}": {"anyOf": [{"$ref": f"#/$defs/l{n + 1}"}] * 2} for n in range(40)}
    schema = parameters({"$ref": "#/$defs/l0"}, **{"$defs": {**levels, "l40": STRING}})
    for model in models.values():
        with pytest.raises(InexpressibleError, match="leads through too many schemas"):
            Tool(model, schema)
        text = written(model.form, {"x": "a"})
        assert Tool(model, parameters(STRING, **{"$defs": levels})).arguments(text) == {"x": "a"}


def test_parts_of_which_one_alone_holds_are_compared_in_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that lists thousands of them holds up nobody."""
    count, dumps = Counter[str](), json.dumps

    def counted(value: Json) -> str:
        count["values"] += 1
        return dumps(value)

    monkeypatch.setattr(schema_kinds, "json", SimpleNamespace(dumps=counted))
    consts = [{"const": number} for number in range(2000)]
    assert len(SchemaKinds({}).branches({"oneOf": consts})) == 2000
    assert count["values"] <= 3 * 2000
    with pytest.raises(InexpressibleError, match="more than one part may hold"):
        SchemaKinds({}).branches({"oneOf": [*consts, {"const": 7}]})
    with pytest.raises(InexpressibleError, match="more than one part may hold"):
        SchemaKinds({}).branches({"oneOf": [{"type": "number"}, {"enum": [7]}]})

    def tagged(number: int) -> dict[str, Any]:
        return {"type": "object", "properties": {"kind": {"const": number}}, "required": ["kind"]}

    assert len(SchemaKinds({}).branches({"oneOf": [tagged(number) for number in range(90)]})) == 90
    with pytest.raises(InexpressibleError, match="more than one part may hold"):
        SchemaKinds({}).branches({"oneOf": [tagged(1), tagged(2), tagged(1)]})
    with pytest.raises(InexpressibleError, match="too many parts"):
        SchemaKinds({}).branches({"oneOf": [tagged(number) for number in range(200)]})
    values = list(range(2000))
    with pytest.raises(InexpressibleError, match="too many values"):
        SchemaKinds({}).branches({"enum": values, "anyOf": [{"enum": values}] * 50})


def test_a_chain_of_references_that_is_too_long_is_refused(models: dict[str, Model]) -> None:
    chain = {f"d{n}": parameters({"$ref": f"#/$defs/d{n + 1}"}) for n in range(1000)}
    schema = parameters({"$ref": "#/$defs/d0"}, **{"$defs": {**chain, "d1000": STRING}})
    for name in FORMS:
        with pytest.raises(InexpressibleError, match="nested too deeply"):
            Tool(models[name], schema)
