"""Grammars of calls against the readers of the same formats: what a random model may write is read as valid calls."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from router.openai.bound_calls import with_bound_calls
from router.openai.fields import PromptBounds
from router.openai.model_card import ModelCard
from router.openai.schema import ParsedRequest, parse_chat
from router.tools.formats import FORMATS, reader_for
from router.tools.pieces import Called, Piece, Said
from tandem.core import config as configuration
from tandem.core.config import LimitsConfig
from tandem.core.errors import InvalidRequestError
from tandem.core.grammar import CompiledGrammar
from tandem.core.tokenizer import Tokenizer
from tandem.core.vocabulary import Vocabulary
from tests.support.router_site import EOS, write_checkpoint
from tests.unit.router.test_tool_readers import SIGNS

PLACE = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/name"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"name": {"type": "string", "maxLength": 12}},
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"weather": PLACE, "now": NOTHING}
HI = [{"role": "user", "content": "Hi"}]
TOOLS = "{% if tools %}{{ tools }}{% endif %}"
ROUNDS = 12


class Model:
    """A model of one format that writes whatever a grammar lets it write."""

    def __init__(self, directory: Path, name: str, thinking: str = "") -> None:
        form = next(form for form in FORMATS if form.name == name)
        checkpoint = write_checkpoint(directory / name, template=SIGNS[name] + TOOLS + thinking, specials=form.markers)
        self.tokenizer = Tokenizer.from_dir(checkpoint)
        self.card = ModelCard.from_dir(checkpoint, configuration.load(None), self.tokenizer)
        assert self.card.tool_format is form
        self.form = form
        self.vocabulary = Vocabulary(self.tokenizer, [EOS], self.card.vocab_size)

    def asked(self, strict: bool = False, **body: Any) -> ParsedRequest:
        tools = [
            {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}
            for name, schema in SCHEMAS.items()
        ]
        body = {"model": "toy", "messages": HI, "tools": tools, **body}
        parsed = parse_chat(body, LimitsConfig(), PromptBounds(1, None))
        return with_bound_calls(parsed, self.card, self.tokenizer, LimitsConfig())

    def compiled(self, parsed: ParsedRequest) -> CompiledGrammar:
        assert parsed.grammar is not None
        return CompiledGrammar(parsed.grammar.text, self.vocabulary.tokens)

    def text_of(self, token_ids: list[int]) -> str:
        shown = set(self.card.markers.values())
        kept = [i for i in token_ids if i in shown or not self.tokenizer.is_special(i)]
        return b"".join(self.tokenizer.bytes_of(i) for i in kept).decode(errors="replace")

    def write(self, parsed: ParsedRequest, seed: int) -> list[Piece]:
        """One output, drawn at random: what a reader makes of it."""
        matcher = self.compiled(parsed).new_matcher()
        draw, ids = random.Random(seed), list[int]()
        while len(ids) < 4000:
            mask = matcher.inner.compute_bitmask()
            allowed = [i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1]
            # An end, and whatever closes something, is likelier than its share, so that outputs end.
            closing = [i for i in allowed if i in (EOS, *b'"}]') or i > 300]
            token_id = draw.choice(closing if closing and draw.random() < 0.2 else allowed)
            if token_id == EOS:
                return self.read(parsed, self.text_of(ids))
            matcher.take([token_id])
            ids.append(token_id)
        raise AssertionError("it never ends")

    def read(self, parsed: ParsedRequest, text: str) -> list[Piece]:
        reader = reader_for(self.form, parsed.tool_use)
        return [*reader.push(text), *reader.finish()]

    def takes(self, parsed: ParsedRequest, text: str) -> bool:
        """Whether the grammar lets the model write `text` and end there."""
        matcher = self.compiled(parsed).new_matcher().inner
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if matcher.try_consume_tokens(ids) < len(ids):
            return False
        mask = matcher.compute_bitmask()
        return bool(mask[EOS // 8] >> EOS % 8 & 1)


BOUND = sorted(form.name for form in FORMATS if form.form is not None)
UNBOUND = sorted(form.name for form in FORMATS if form.form is None)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    directory = tmp_path_factory.mktemp("models")
    return {form.name: Model(directory, form.name) for form in FORMATS}


def check(calls: list[Piece], names: set[str]) -> None:
    assert calls
    for call in calls:
        assert isinstance(call, Called), calls
        assert call.name in names
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


@pytest.mark.parametrize("name", BOUND)
def test_a_model_that_has_to_call_writes_valid_calls_and_nothing_else(models: dict[str, Model], name: str) -> None:
    model = models[name]
    required, single = (
        model.asked(tool_choice="required"),
        model.asked(tool_choice="required", parallel_tool_calls=False),
    )
    named = model.asked(tool_choice={"type": "function", "function": {"name": "weather"}})
    for seed in range(ROUNDS):
        check([p for p in model.write(required, seed) if not _is_thought(p)], {"weather", "now"})
        one = [p for p in model.write(single, seed) if not _is_thought(p)]
        assert len(one) == 1
        check(one, {"weather", "now"})
        check([p for p in model.write(named, seed) if not _is_thought(p)], {"weather"})


def _is_thought(piece: Piece) -> bool:
    return type(piece).__name__ == "Thought"


CALLS: dict[str, tuple[str, str]] = {
    "hermes": ('<tool_call>\n{"name": "weather", "arguments": ', "}\n</tool_call>"),
    "llama": ('{"name": "weather", "parameters": ', "}"),
    "mistral": ('[TOOL_CALLS] [{"name": "weather", "arguments": ', "}]"),
    "mistral-named": ("[TOOL_CALLS]weather[ARGS]", ""),
}
GOOD, BAD = '{"city": "Oslo", "days": 2}', '{"city": "Oslo", "days": 12}'


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_strict_tools_follow_their_schemas_and_text_is_free(models: dict[str, Model], name: str) -> None:
    model, (before, after) = models[name], CALLS[name]
    strict = model.asked(strict=True)
    assert model.takes(strict, before + GOOD + after)
    assert not model.takes(strict, before + BAD + after)
    assert model.takes(strict, "It is warm in Oslo, < 30.")
    assert model.takes(strict, "")
    if name != "llama":
        assert model.takes(strict, f"I look.\n{before}{GOOD}{after}")
        assert not model.takes(strict, f"I look.\n{before}{BAD}{after}")
    loose = model.asked(tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
        {"type": "function", "function": {"name": "weather"}}]}})  # fmt: skip
    assert model.takes(loose, before + BAD + after)
    assert not model.takes(loose, (before + GOOD + after).replace("weather", "now"))


@pytest.mark.parametrize("name", CALLS)
def test_one_call_a_turn_where_they_may_not_be_parallel(models: dict[str, Model], name: str) -> None:
    model, (before, after) = models[name], CALLS[name]
    one = model.asked(strict=True, parallel_tool_calls=False)
    again = {"llama": "; ", "mistral": ""}.get(name, "\n")
    two = f"{before}{GOOD}{after}{again}{before}{GOOD}{after}"
    if name == "mistral":
        two = f'{before}{GOOD}}}, {{"name": "now", "arguments": {{}}{after}'
    assert model.takes(one, before + GOOD + after)
    assert not model.takes(one, two)
    assert model.takes(model.asked(strict=True), two)


def test_the_end_of_a_call_ends_the_turn_where_that_is_enough(models: dict[str, Model]) -> None:
    for name in ("hermes", *UNBOUND):
        parsed = models[name].asked(parallel_tool_calls=False, stop=["x"])
        assert parsed.grammar is None
        assert parsed.stop == ("x", models[name].form.close)
    text = '<tool_call>\n{"name": "now", "arguments": {}}\n'
    assert models["hermes"].read(models["hermes"].asked(), text) == [Called("now", "{}")]


@pytest.mark.parametrize("name", ["hermes", "mistral"])
def test_an_answer_of_a_form_may_come_in_place_of_calls(models: dict[str, Model], name: str) -> None:
    model, (before, after) = models[name], CALLS[name]
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": {**schema, "additionalProperties": False}}}
    either = model.asked(response_format=form)
    assert model.takes(either, '{"sum": 4}')
    assert model.takes(either, before + BAD + after), "a tool that is not strict"
    assert not model.takes(either, "Four.")
    assert model.takes(either, '{"sum":4}')
    assert model.takes(either, '{\n  "sum": 4\n}')
    compact = model.asked(structured_outputs={"json": schema, "disable_any_whitespace": True})
    assert model.takes(compact, '{"sum":4}')
    assert not model.takes(compact, '{"sum": 4}')
    wide = model.asked(structured_outputs={"json": {**schema, "x-guidance": {}}, "whitespace_pattern": " {2}"})
    assert model.takes(wide, '{  "sum"  :  4  }')
    assert not model.takes(wide, '{"sum": 4}')
    with pytest.raises(InvalidRequestError, match="cannot hold beside `tools`"):
        model.asked(structured_outputs={"regex": "a"})


@pytest.mark.parametrize("name", ["hermes", "mistral"])
def test_a_form_is_of_no_account_where_a_tool_has_to_be_called(models: dict[str, Model], name: str) -> None:
    """As with OpenAI: clients send both where a tool's schema is the answer's."""
    model, (before, after) = models[name], CALLS[name]
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
    for asked in ({"response_format": form}, {"structured_outputs": {"regex": "a"}}):
        forced = model.asked(tool_choice="required", **asked)
        assert forced.ignored_fields == tuple(asked)
        assert not model.takes(forced, before + BAD + after)
        assert not model.takes(forced, "{}")
        assert not model.takes(forced, "a")


@pytest.mark.parametrize("name", UNBOUND)
def test_a_format_that_no_grammar_makes_is_refused_by_name(models: dict[str, Model], name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"not possible with this model's \\({name}\\) yet") as caught:
        models[name].asked(tool_choice="required")
    assert caught.value.field == "tool_choice"


@pytest.mark.parametrize("name", [*CALLS, *UNBOUND, "harmony"])
def test_strict_tools_leave_a_model_free_to_think_and_are_named_where_it_may_call_or_not(
    models: dict[str, Model], tmp_path: Path, name: str
) -> None:
    model = models[name] if name not in CALLS else Model(tmp_path, name, "{% if false %}<think></think>{% endif %}")
    parsed = model.asked(strict=True, zebra=1)
    assert parsed.grammar is None
    assert parsed.ignored_fields == ("zebra", "tools.strict")
    assert parsed.tool_use.strict == frozenset()
    if name in BOUND:
        forced = model.asked(strict=True, tool_choice="required")
        assert forced.grammar is not None
        assert forced.ignored_fields == ()
    if name in CALLS:
        held = models[name].asked(strict=True)
        assert held.grammar is not None
        assert held.ignored_fields == ()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "which is none of `tools`"),
        ({"tool_choice": "required", "tools": []}, "there are no `tools`"),
    ],
)
def test_a_choice_of_what_is_not_there_is_refused(models: dict[str, Model], body: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        models["hermes"].asked(**body)
    assert caught.value.field == "tool_choice"


def test_text_that_no_tool_bounds_asks_for_no_grammar(models: dict[str, Model]) -> None:
    parsed = models["hermes"].asked()
    assert parsed.grammar is None
    assert parsed.sampling.grammar == ""
    assert models["hermes"].read(parsed, "Hi") == [Said("Hi")]
