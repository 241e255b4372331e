"""Reasoning is parted from content alike, however the text was cut, and nothing is lost of either."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.openai.reasoning import (
    KNOWN_MARKS,
    Marks,
    Parted,
    Reasoning,
    ReasoningSplitter,
    ThinkingReader,
    marks_of,
    reasoning_of,
)
from router.tools.formats import HERMES, normal_tool, reader_for
from router.tools.pieces import Called, Said, Thought, ToolUse
from tandem.core.tokenizer import Tokenizer
from tests.support.router_site import write_checkpoint
from tests.support.work import growth

THINK = KNOWN_MARKS[0]
TOOLS = ToolUse((normal_tool("f", None, None),))
#: (the answer, whether the prompt ends within reasoning, its reasoning, its content)
ANSWERS = [
    ("", False, "", ""),
    ("", True, "", ""),
    ("Hello", False, "", "Hello"),
    ("why<think>not</think>?", False, "", "why<think>not</think>?"),
    ("<think>hm</think>Hello", False, "hm", "Hello"),
    ("\n <think>\nhm\n</think>\n\nHello", False, "\nhm\n", "\n\nHello"),
    ("hm</think>Hello", True, "hm", "Hello"),
    ("</think>", True, "", ""),
    ("<think></think>x", False, "", "x"),
    ("a </thin b </think>c</think>d", True, "a </thin b ", "c</think>d"),
    ("a</</think>b", True, "a</", "b"),
    ("it ends too soon </thi", True, "it ends too soon </thi", ""),
    ("<think>it ends too soon", False, "it ends too soon", ""),
    ("<thi", False, "", "<thi"),
    ("  <thinner>", False, "", "  <thinner>"),
    ("   ", False, "", "   "),
]


def parted(pieces: list[str], *, is_open: bool, marks: Marks = THINK) -> Parted:
    splitter = ReasoningSplitter(Reasoning(marks, is_open))
    parts = [*map(splitter.push, pieces), splitter.flush()]
    return Parted("".join(part.reasoning for part in parts), "".join(part.content for part in parts))


@pytest.mark.parametrize(("text", "is_open", "reasoning", "content"), ANSWERS)
def test_every_cut_gives_the_same_parts(text: str, is_open: bool, reasoning: str, content: str) -> None:
    """At every two places, and after each character."""
    for first, second in itertools.combinations_with_replacement(range(len(text) + 1), 2):
        pieces = [text[:first], text[first:second], text[second:]]
        assert parted(pieces, is_open=is_open) == (reasoning, content), pieces
    assert parted(list(text), is_open=is_open) == (reasoning, content)


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text("<>/think[THINK] a\n", max_size=9), max_size=9),
    is_open=st.booleans(),
    marks=st.sampled_from(KNOWN_MARKS[:2]),
)
def test_any_text_in_any_pieces_is_parted_as_it_is_whole(pieces: list[str], is_open: bool, marks: Marks) -> None:
    text = "".join(pieces)
    found = parted(pieces, is_open=is_open, marks=marks)
    assert found == parted([text], is_open=is_open, marks=marks)
    left_out = text.replace(found.reasoning, "", 1)
    assert left_out.endswith(found.content), "content is the end of the text, as it is"


def test_text_is_held_back_only_while_it_may_be_a_mark() -> None:
    splitter = ReasoningSplitter(Reasoning(THINK, is_open=True))
    assert [splitter.push(piece) for piece in ("a", "b<", "c</", "thi", "nk", ">d", "e")] == [
        ("a", ""), ("b", ""), ("<c", ""), ("", ""), ("", ""), ("", "d"), ("", "e"),
    ]  # fmt: skip


def test_blanks_before_a_mark_are_not_read_again_for_each_token() -> None:
    def push(num: int) -> None:
        splitter = ReasoningSplitter(Reasoning(THINK, is_open=False))
        for _ in range(num):
            splitter.push(" " * 64)
        assert splitter.num_held == 64 * num
        assert splitter.push("<think>hm") == ("hm", "")

    assert growth(push, 1000) < 9


def test_only_the_template_or_the_assistant_opens_reasoning() -> None:
    assert reasoning_of(THINK, prompt="<user>hi<assistant><think>\n", continued=None).is_open
    assert not reasoning_of(THINK, prompt="<assistant><think>\n\n</think>\n\n", continued=None).is_open
    assert not reasoning_of(THINK, prompt="what is <think>?<assistant>", continued=None).is_open
    assert reasoning_of(THINK, prompt="<think>well", continued="<think>well").is_open
    assert not reasoning_of(THINK, prompt="...", continued="<think>a</think>b").is_open


def test_a_templates_own_marks_are_found(tmp_path: Path) -> None:
    for number, marks in enumerate(KNOWN_MARKS):
        template = f"{{{{ messages[0].content }}}}{{% if thinking %}}{marks.start}{marks.end}{{% endif %}}"
        assert marks_of(Tokenizer.from_dir(write_checkpoint(tmp_path / str(number), template=template))) == marks
    assert marks_of(Tokenizer.from_dir(write_checkpoint(tmp_path / "plain"))) is None


def test_what_is_said_behind_reasoning_is_read_for_calls() -> None:
    reader = ThinkingReader(ReasoningSplitter(Reasoning(THINK, is_open=True)), reader_for(HERMES, TOOLS))
    text = 'hm <tool_call>no</think>so<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    pieces = [piece for char in text for piece in reader.push(char)] + list(reader.finish())
    thought = "".join(piece.text for piece in pieces if isinstance(piece, Thought))
    said = "".join(piece.text for piece in pieces if isinstance(piece, Said))
    assert (thought, said) == ("hm <tool_call>no", "so")
    assert [piece for piece in pieces if isinstance(piece, Called)] == [Called("f", "{}")]
