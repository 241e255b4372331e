"""Grammars against instances: what follows a schema can be generated token by token, and nothing else can."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from router.openai.grammar import AskedGrammar, of_choices, of_grammar, of_regex, of_schema
from tandem.core.config import LimitsConfig
from tandem.core.errors import InternalError, InvalidRequestError
from tandem.core.grammar import CompiledGrammar
from tandem.core.grammar_compiler import compile_grammar
from tandem.core.model_path import resolve_model
from tandem.core.tokenizer import Tokenizer
from tandem.core.vocabulary import Vocabulary
from tests.support.work import growth
from tests.unit.core.schema_cases import FORMATS, Case, cases

EOS = 2
LIMITS = LimitsConfig()


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(resolve_model("embedded"))


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary(tokenizer(), (EOS,), tokenizer().vocab_size)


def compiled(asked: AskedGrammar) -> CompiledGrammar:
    return compile_grammar(asked.as_read(LIMITS).text, vocabulary().tokens)


def is_in(mask: bytes, token_id: int) -> bool:
    return bool(mask[token_id >> 3] >> (token_id & 7) & 1)


@cache
def by_first_byte() -> dict[int, list[tuple[bytes, int]]]:
    """The tokens that begin with a byte, the longest first."""
    found: dict[int, list[tuple[bytes, int]]] = {}
    for token_id in range(tokenizer().vocab_size):
        content = tokenizer().token_bytes(token_id)
        if content and not tokenizer().is_special(token_id):
            found.setdefault(content[0], []).append((content, token_id))
    return {byte: sorted(tokens, reverse=True, key=lambda token: len(token[0])) for byte, tokens in found.items()}


def generates(grammar: CompiledGrammar, text: str) -> bool:
    """Whether masks let a model write `text`, token by token, and end there."""
    matcher, left = grammar.new_matcher(), text.encode()
    while left:
        mask = matcher.inner.compute_bitmask()
        matcher.check()
        fitting = (t for t in by_first_byte().get(left[0], []) if left.startswith(t[0]) and is_in(mask, t[1]))
        if (found := next(fitting, None)) is None:
            return False
        matcher.take([found[1]])
        left = left[len(found[0]) :]
    mask = matcher.inner.compute_bitmask()
    matcher.check()
    return is_in(mask, EOS)


def written(instance: Any) -> Iterator[str]:
    """Ways to write it: without spaces, as Python does, and on many lines."""
    yield json.dumps(instance, separators=(",", ":"), ensure_ascii=False)
    yield json.dumps(instance, ensure_ascii=False)
    yield json.dumps(instance, indent=2, ensure_ascii=False)


def wrong(case: Case, grammar: CompiledGrammar) -> list[str]:
    valid, invalid = case.split()
    found = []
    for instance in valid:
        found += [f"{case.name}: {text!r} is valid" for text in written(instance) if not generates(grammar, text)]
    for instance in invalid:
        found += [f"{case.name}: {text!r} is not valid" for text in written(instance) if generates(grammar, text)]
    return found


@pytest.mark.long
def test_of_200_schemas_180_are_taken_and_none_of_their_instances_is_judged_wrongly() -> None:
    found, refused, mistakes, num_valid, num_invalid = cases(), [], [], 0, 0
    for case in found:
        try:
            grammar = compiled(of_schema(case.schema, "schema", LIMITS))
        except InvalidRequestError as error:
            refused.append((case.name, case.schema, error.message))
            continue
        mistakes += wrong(case, grammar)
        valid, invalid = case.split()
        num_valid, num_invalid = num_valid + len(valid), num_invalid + len(invalid)
    assert mistakes == []
    assert len(found) >= 200
    assert len(found) - len(refused) >= 180, refused
    assert min(num_valid, num_invalid) > 500


@pytest.mark.parametrize("name", FORMATS)
def test_formats_hold(name: str) -> None:
    grammar = compiled(of_schema({"type": "string", "format": name}, "schema", LIMITS))
    right, wrong = FORMATS[name]
    assert [text for text in right if not generates(grammar, json.dumps(text))] == []
    assert [text for text in wrong if generates(grammar, json.dumps(text))] == []


def test_whitespace_is_bounded_whatever_a_schema_says() -> None:
    wish = {"whitespace_pattern": "[ ]+", "item_separator": " *, *", "lenient": True, "whitespace_flexible": True}
    for schema in ({"type": "array"}, {"type": "array", "x-guidance": wish}):
        grammar = compiled(of_schema(schema, "schema", LIMITS))
        for text in ("[1,2]", "[1, 2]", "[ 1 , 2 ]", "[\n    1,\n    2\n]", "[\n" + " " * 40 + "1]"):
            assert generates(grammar, text), text
        for text in ("[1,  2]", "[1,\n\n2]", "[\n" + " " * 41 + "1]", " [1]", "[1] "):
            assert not generates(grammar, text), text
    compact = compiled(of_schema({"type": "array"}, "schema", LIMITS, whitespace=None))
    assert generates(compact, "[1,2]")
    assert not generates(compact, "[1, 2]")
    own = compiled(of_schema({"type": "array"}, "schema", LIMITS, whitespace="[ ]{2}"))
    assert generates(own, "[1,  2]")
    assert not generates(own, "[1, 2]")
    with pytest.raises(InvalidRequestError, match="uniqueItems"):  # `lenient` would pass it over
        compiled(of_schema({"type": "array", "uniqueItems": True, "x-guidance": wish}, "schema", LIMITS))


GBNF = """
root ::= greeting " " name   # a comment
greeting ::= "hello" | "good " ("day" | "bye")
name ::= [A-Z] [a-z]*
"""
LARK = """
start: greeting " " NAME
greeting: "hello" | "good " ("day" | "bye")
NAME: /[A-Z][a-z]*/
"""
CHOICES = ["yes", "no", 'a "b" \\ \n', "日本"]
OTHERS: list[tuple[AskedGrammar, list[str], list[str]]] = [
    (of_choices(CHOICES, "f", LIMITS), CHOICES, ["", "ye", "yesno"]),
    (of_regex("[a-c]{2,3}|x", "f", LIMITS), ["ab", "abc", "x"], ["a", "abcd", "xx", ""]),
    (of_regex("a*", "f", LIMITS), ["", "aaa"], ["b"]),
    (of_grammar(GBNF, "f", LIMITS), ["hello Bob", "good day A", "good bye Xy"], ["hello bob", "good Bob", "hello"]),
    (of_grammar(LARK, "f", LIMITS), ["hello Bob", "good day A", "good bye Xy"], ["hello bob", "good Bob", "hello"]),
    (of_schema({"type": "object"}, "f", LIMITS), ["{}", '{"a": [1, {"b": null}]}'], ["[]", "{", '{"a"}', "1"]),
    (of_schema(True, "f", LIMITS), ["1", '"x"', "[]"], ["", "x"]),
]


@pytest.mark.parametrize(("asked", "right", "wrong"), OTHERS)
def test_other_forms_hold(asked: AskedGrammar, right: list[str], wrong: list[str]) -> None:
    grammar = compiled(asked)
    assert [text for text in right if not generates(grammar, text)] == []
    assert [text for text in wrong if generates(grammar, text)] == []


_SIZE = LIMITS.max_grammar_bytes
_NUM_LINKS = 990
SLOW_TO_READ = {
    "brackets": "start: " + "[" * (_SIZE - 7),
    "blank lines": "\n" * (_SIZE - 14) + 'root ::= "b"',
    "a chain": "root ::= long\nlong ::= " + '"a" ' * 25_000 + "r0\n"
    + "".join(f"r{n} ::= r{n + 1}\n" for n in range(_NUM_LINKS)) + f'r{_NUM_LINKS} ::= "b"',
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", SLOW_TO_READ)
def test_a_hostile_grammar_is_read_in_a_time_that_grows_with_its_length(name: str) -> None:
    began_s = time.thread_time()
    asked = of_grammar(SLOW_TO_READ[name], "f", LIMITS)
    assert time.thread_time() - began_s < 0.1, "on the loop, where the body is small"
    asked.as_read(LIMITS)
    assert time.thread_time() - began_s < 3, "beside the loop, by Python that lets others run"


@pytest.mark.parametrize(("begin", "end"), [('"', "\n"), ('"', "\\"), ("/", "\\"), ("/", "\\\n")])
def test_a_text_that_never_ends_is_passed_once(begin: str, end: str) -> None:
    escaped = "\\" + begin

    def read(num: int) -> None:
        with pytest.raises(InvalidRequestError, match="has a text or expression of"):
            of_grammar(f"start: {begin}{escaped * num}{end}", "f", LIMITS)

    assert growth(read, 6000) < 9


def test_gbnf_of_too_many_rules_is_refused_at_once() -> None:
    many = "".join(f"r{n} ::= r{n + 1}\n" for n in range(8000))
    began_s = time.thread_time()
    with pytest.raises(InvalidRequestError, match="f has 8000 rules of GBNF; at most 1000 are taken"):
        of_grammar(many, "f", LIMITS)
    assert time.thread_time() - began_s < 0.1


@pytest.mark.parametrize(
    "asked",
    [
        of_schema({"enum": []}, "f", LIMITS),
        of_schema(False, "f", LIMITS),
        of_schema({"type": "integer", "minimum": 5, "maximum": 4}, "f", LIMITS),
        of_schema({"type": "unheard of"}, "f", LIMITS),
        of_schema({"type": "string", "format": "unheard of"}, "f", LIMITS),
        of_schema({"$ref": "https://example.com/schema"}, "f", LIMITS),
        of_schema({"$ref": "#/$defs/missing"}, "f", LIMITS),
        of_schema({"properties": []}, "f", LIMITS),
        of_schema({"type": "array"}, "f", LIMITS, whitespace="("),
        of_regex("(", "f", LIMITS),
        of_regex("(?=a)b", "f", LIMITS),
        of_grammar("nothing of the kind", "f", LIMITS),
        of_grammar("start: missing", "f", LIMITS),
    ],
)
def test_what_nothing_follows_and_what_cannot_be_enforced_is_refused(asked: AskedGrammar) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        compiled(asked)
    assert 0 < len(caught.value.message) <= 400
    assert "\n" not in caught.value.message


def test_an_end_of_text_may_come_exactly_where_the_output_may_end() -> None:
    """All ends of a model that has several, and no other special token."""
    both = Vocabulary(tokenizer(), (EOS, 1), tokenizer().vocab_size)
    matcher = CompiledGrammar(of_regex("a|ab", "f", LIMITS).text, both.tokens).new_matcher()
    ends = []
    for text in ("a", "b"):
        mask = matcher.inner.compute_bitmask()
        ends.append([token_id for token_id in range(3) if is_in(mask, token_id)])
        matcher.take(tokenizer().encode(text, add_special_tokens=False)[-1:])
    mask = matcher.inner.compute_bitmask()
    assert ends == [[], [1, EOS]]
    assert [token_id for token_id in range(len(mask) * 8) if is_in(mask, token_id)] == [1, EOS]


def optional(number: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"k{n}": {"type": ["string", "integer", "null"]} for n in range(number)}}


#: Each would take seconds or gigabytes without bounds.
HOSTILE = {
    "properties": of_schema(optional(2000), "f", LIMITS),
    "patterns": of_schema({"allOf": [{"type": "string", "pattern": f".*{c}.*"} for c in "abcdefghijklm"]}, "f", LIMITS),
    "nested repetition": of_regex("((a{0,100}){0,100}){0,100}", "f", LIMITS),
    "ambiguous": of_grammar('start: s\ns: s s s | s s | /[a-z]/ | ""', "f", LIMITS),
    "alternatives": of_schema({"allOf": [{"anyOf": [optional(n) for n in range(10)]} for _ in range(6)]}, "f", LIMITS),
    "right recursion": of_grammar("start: many\nmany: one many | one\none: /[a-z]/", "f", LIMITS),
}


def follow_at_random(asked: AskedGrammar, num_tokens: int) -> None:
    grammar, rng = compiled(asked), random.Random(0)
    grammar.try_out()
    matcher = grammar.new_matcher()
    for _ in range(num_tokens):
        mask = matcher.inner.compute_bitmask()
        matcher.check()
        matcher.take([rng.choice([i for i in range(tokenizer().vocab_size) if i != EOS and is_in(mask, i)])])


@pytest.mark.long
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused_in_bounded_time(name: str) -> None:
    """At once, or when an output that it asks for becomes too complex. Most take milliseconds; the bound has slack."""
    began_s = time.monotonic()
    with pytest.raises(InvalidRequestError):
        follow_at_random(HOSTILE[name], 2000)
    assert time.monotonic() - began_s < 30


def test_a_hundred_optional_properties_are_taken() -> None:
    grammar = compiled(of_schema(optional(100), "f", LIMITS))
    grammar.try_out()
    assert generates(grammar, json.dumps({"k3": 1, "k50": None, "k99": "x"}))


def lark_chain(num: int) -> AskedGrammar:
    rules = (f'a{place}: "x" a{place + 1}\n' for place in range(num))
    return of_grammar(f'start: a0\n{"".join(rules)}a{num}: "y"\n', "grammar", LIMITS)


def lexeme_chain(num: int) -> AskedGrammar:
    lexemes = (f'A{place}: "x" A{place + 1}\n' for place in range(num))
    return of_grammar(f'start: A0\n{"".join(lexemes)}A{num}: "y"\n', "grammar", LIMITS)


def schema_chain(num: int) -> AskedGrammar:
    parts: dict[str, Any] = {f"a{place}": {"items": {"$ref": f"#/$defs/a{place + 1}"}} for place in range(num)}
    return of_schema({"$defs": parts | {f"a{num}": {"type": "string"}}, "$ref": "#/$defs/a0"}, "schema", LIMITS)


@pytest.mark.parametrize(
    "asked", [lark_chain(4000), lexeme_chain(6000), schema_chain(1500)], ids=["rules", "lexemes", "refs"]
)
def test_long_chains_of_references_end_no_process(asked: AskedGrammar) -> None:
    """They are followed by calls within calls, which need much of a stack."""
    mask = compiled(asked).new_matcher().inner.compute_bitmask()
    assert any(mask)


def test_that_no_thread_can_be_started_is_no_fault_of_a_short_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its refusal would be remembered, and it would be refused for ever."""
    asked = of_regex("of this test", "f", LIMITS)
    assert vocabulary()

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(InternalError, match="can't start new thread"):
        compiled(asked)
