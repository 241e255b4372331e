"""Grammars of calls against the readers of the same formats: what a random model may write is read as valid calls."""

from __future__ import annotations

import dataclasses
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

    def asked(self, strict: bool = False, card: ModelCard | None = None, **body: Any) -> ParsedRequest:
        tools = [
            {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}
            for name, schema in SCHEMAS.items()
        ]
        body = {"model": "toy", "messages": HI, "tools": tools, **body}
        parsed = parse_chat(body, LimitsConfig(), PromptBounds(1, None))
        return with_bound_calls(parsed, card or self.card, self.tokenizer, LimitsConfig())

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


NAMES = sorted(form.name for form in FORMATS)


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


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
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


#: Calls as each format has them, of `weather` and some days, and what stands between two; texts, and what says one.
CALLS: dict[str, tuple[str, str]] = {
    "hermes": ('<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": DAYS}}\n</tool_call>', "\n"),
    "llama": ('{"name": "weather", "parameters": {"city": "Oslo", "days": DAYS}}', "; "),
    "mistral": ('[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo", "days": DAYS}}]', ""),
    "mistral-named": ('[TOOL_CALLS]weather[ARGS]{"city": "Oslo", "days": DAYS}', ""),
    "qwen-coder": ("<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\nDAYS\n"
                   "</parameter>\n</function>\n</tool_call>", "\n"),
    "gemma": ('<|tool_call>call:weather{city:<|"|>Oslo<|"|>,days:DAYS}<tool_call|>', ""),
    "function-gemma": ("<start_function_call>call:weather{city:<escape>Oslo<escape>,days:DAYS}<end_function_call>", ""),
    "harmony": ("<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
                '{"city": "Oslo", "days": DAYS}', ""),
}  # fmt: skip
#: Text as each format has it where it is the whole answer, and before a call.
SAID = {"harmony": "<|channel|>final<|message|>{}"}
BEFORE = {
    "harmony": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>{}<|end|>"
    "<|start|>assistant"
}


def call_of(name: str, days: int = 2) -> str:
    return CALLS[name][0].replace("DAYS", str(days))


@pytest.mark.parametrize("name", NAMES)
def test_calls_of_strict_tools_follow_their_schemas_and_text_is_free(models: dict[str, Model], name: str) -> None:
    model, good, bad = models[name], call_of(name), call_of(name, 12)
    strict = model.asked(strict=True)
    assert model.takes(strict, good)
    assert not model.takes(strict, bad)
    say, before = SAID.get(name, "{}"), BEFORE.get(name, "{}")
    assert model.takes(strict, say.format("It is warm in Oslo, < 30."))
    assert model.takes(strict, say.format(""))
    if name != "llama":
        assert model.takes(strict, before.format("I look.\n") + good)
        assert not model.takes(strict, before.format("I look.\n") + bad)
    loose = model.asked(tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
        {"type": "function", "function": {"name": "weather"}}]}})  # fmt: skip
    assert model.takes(loose, bad)
    assert not model.takes(loose, good.replace("weather", "now"))


@pytest.mark.parametrize("name", sorted(CALLS.keys() - {"harmony"}))
def test_one_call_a_turn_where_they_may_not_be_parallel(models: dict[str, Model], name: str) -> None:
    model, (_, again) = models[name], CALLS[name]
    one = model.asked(strict=True, parallel_tool_calls=False)
    two = again.join([call_of(name)] * 2)
    if name == "mistral":
        two = two.replace("][TOOL_CALLS] [", ", ")
    assert model.takes(one, call_of(name))
    assert not model.takes(one, two)
    assert model.takes(model.asked(strict=True), two)
    forced: dict[str, Any] = {"tool_choice": "required"}
    assert model.takes(model.asked(**forced), two)
    assert not model.takes(model.asked(**forced, parallel_tool_calls=False), two)


def test_the_text_of_an_opening_begins_a_call_also_where_it_is_no_token(models: dict[str, Model]) -> None:
    """A reader cannot tell them apart, so a grammar lets none be spelled."""
    model = models["gemma"]
    text = call_of("gemma", 12)
    strict = model.asked(strict=True)
    matcher = model.compiled(strict).new_matcher().inner
    assert matcher.try_consume_tokens([*text.encode()]) < len(text)
    assert matcher.try_consume_tokens([*b"<|tool_cal and more"])


def test_gpt_oss_says_thinks_and_calls_in_channels(models: dict[str, Model]) -> None:
    model = models["harmony"]
    strict = model.asked(strict=True)
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    good, bad = call_of("harmony"), call_of("harmony", 12)
    templates = good.replace("<|channel|>commentary to=functions.weather <|constrain|>json",
                             " to=functions.weather<|channel|>commentary json")  # fmt: skip
    for call in (good, templates, thought + good, thought * 2 + templates):
        assert model.takes(strict, call)
        pieces = [piece for piece in model.read(strict, call) if not _is_thought(piece)]
        assert pieces == [Called("weather", '{"city": "Oslo", "days": 2}')]
    assert model.takes(strict, thought + "<|channel|>final<|message|>It is warm.")
    assert not model.takes(strict, thought + bad)
    assert not model.takes(strict, thought)
    forced = model.asked(tool_choice="required")
    assert model.takes(forced, thought + good)
    assert not model.takes(forced, thought + "<|channel|>final<|message|>It is warm.")
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
    either = model.asked(response_format=form)
    assert model.takes(either, thought + "<|channel|>final<|message|>{}")
    assert not model.takes(either, thought + "<|channel|>final<|message|>It is warm.")


def test_the_end_of_a_call_ends_the_turn_where_that_is_enough(models: dict[str, Model]) -> None:
    for name in ("hermes", "qwen-coder", "gemma", "function-gemma"):
        parsed = models[name].asked(parallel_tool_calls=False, stop=["x"])
        assert parsed.grammar is None
        assert parsed.stop == ("x", models[name].form.close)
    text = '<tool_call>\n{"name": "now", "arguments": {}}\n'
    assert models["hermes"].read(models["hermes"].asked(), text) == [Called("now", "{}")]


@pytest.mark.parametrize("name", ["gemma", "hermes", "mistral", "qwen-coder"])
def test_an_answer_of_a_form_may_come_in_place_of_calls(models: dict[str, Model], name: str) -> None:
    model = models[name]
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": {**schema, "additionalProperties": False}}}
    either = model.asked(response_format=form)
    assert model.takes(either, '{"sum": 4}')
    assert model.takes(either, call_of(name, 12)), "a tool that is not strict"
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


@pytest.mark.parametrize("name", ["gemma", "hermes", "mistral", "qwen-coder"])
def test_a_form_is_of_no_account_where_a_tool_has_to_be_called(models: dict[str, Model], name: str) -> None:
    """As with OpenAI: clients send both where a tool's schema is the answer's."""
    model = models[name]
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
    for asked in ({"response_format": form}, {"structured_outputs": {"regex": "a"}}):
        forced = model.asked(tool_choice="required", **asked)
        assert forced.ignored_fields == tuple(asked)
        assert not model.takes(forced, call_of(name, 12))
        assert not model.takes(forced, "{}")
        assert not model.takes(forced, "a")


def test_a_format_that_no_grammar_makes_is_refused_by_name(models: dict[str, Model]) -> None:
    """As of a checkpoint whose own template alone says how calls are read."""
    hermes = models["hermes"]
    card = dataclasses.replace(hermes.card, tool_format=dataclasses.replace(hermes.form, form=None))
    with pytest.raises(InvalidRequestError, match="not possible with this model's \\(hermes\\)") as caught:
        hermes.asked(tool_choice="required", card=card)
    assert caught.value.field == "tool_choice"


@pytest.mark.parametrize("name", NAMES)
def test_strict_tools_leave_a_model_free_to_think_and_are_named_where_it_may_call_or_not(
    models: dict[str, Model], tmp_path: Path, name: str
) -> None:
    model = Model(tmp_path, name, "{% if false %}<think></think>{% endif %}")
    parsed = model.asked(strict=True, zebra=1)
    assert parsed.grammar is None
    assert parsed.ignored_fields == ("zebra", "tools.strict")
    assert parsed.tool_use.strict == frozenset()
    forced = model.asked(strict=True, tool_choice="required")
    assert forced.grammar is not None
    assert forced.ignored_fields == ()
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
