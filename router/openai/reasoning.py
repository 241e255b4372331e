"""What a model thinks before it speaks: how its template marks that, and an answer's text parted by it. Pure.

Each text is given out exactly once and in order, as reasoning or as content; only the marks are left out. How the text
was cut into pieces makes no difference.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from router.openai.model_card import ModelCard
from router.openai.schema import ParsedRequest
from router.request.request import Request
from router.request.stop_strings import possible_start
from router.tools.formats import is_read, reader_for
from router.tools.pieces import Piece, Reader, Thought
from tandem.core.tokenizer import Tokenizer

#: More of a prompt's last tokens than a mark has, with spaces behind it.
_PROMPT_TAIL = 32


class Marks(NamedTuple):
    """What stands before and behind reasoning."""

    start: str
    end: str


#: As the models that are served by their templates have them; the first that a template names counts.
KNOWN_MARKS = (
    Marks("<think>", "</think>"),  # DeepSeek R1, Qwen 3, GLM 4.5, MiniMax, Nemotron, Hermes 4
    Marks("[THINK]", "[/THINK]"),  # Magistral, Ministral
    Marks("<seed:think>", "</seed:think>"),  # Seed-OSS
    Marks("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    Marks("◁think▷", "◁/think▷"),  # Kimi-VL
    Marks("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A Reasoning
)


@functools.cache
def marks_of(tokenizer: Tokenizer) -> Marks | None:
    """How the model's chat template marks reasoning; `None`: not at all."""
    source = tokenizer.chat_source
    return next((marks for marks in KNOWN_MARKS if marks.end in source), None)


@dataclass(frozen=True, slots=True)
class Reasoning:
    """How an answer is parted.

    Attributes:
        is_open: the prompt ends within reasoning, so the answer begins there.
    """

    marks: Marks
    is_open: bool


def reasoning_of(marks: Marks, *, prompt: str, continued: str | None) -> Reasoning:
    """Where the answer to a chat begins.

    Args:
        prompt: as the template has written it.
        continued: the content of a last message that the answer continues. Only what the template or the assistant
            writes opens reasoning: a user may write of marks.
    """
    if continued is not None:
        return Reasoning(marks, continued.rfind(marks.start) > continued.rfind(marks.end))
    return Reasoning(marks, prompt.rstrip().endswith(marks.start))


class Parted(NamedTuple):
    reasoning: str
    content: str


class ReasoningSplitter:
    """Parts the text of one choice as it comes."""

    def __init__(self, reasoning: Reasoning) -> None:
        self._marks = reasoning.marks
        self._is_begun = reasoning.is_open  # it is known whether the text begins with reasoning
        self._is_open = reasoning.is_open
        self._blanks: list[str] = []  # with which the text begins, as long as a mark may follow
        self._num_blanks = 0
        self._held = ""  # may become a mark

    def push(self, text: str) -> Parted:
        """What is settled by now."""
        text, self._held = self._held + text, ""
        if not self._is_begun:
            text = self._take_blanks(text)
            if _may_become(text, self._marks.start):
                self._held = text
                return Parted("", "")
            self._is_begun = True
            blanks = self._give_blanks()
            self._is_open = text.startswith(self._marks.start)
            text = text.removeprefix(self._marks.start) if self._is_open else blanks + text
        if not self._is_open:
            return Parted("", text)
        thought, mark, content = text.partition(self._marks.end)
        if mark:
            self._is_open = False
            return Parted(thought, content)
        keep = possible_start(text, (self._marks.end,))
        self._held = text[keep:]
        return Parted(text[:keep], "")

    @property
    def num_held(self) -> int:
        return self._num_blanks + len(self._held)

    def flush(self) -> Parted:
        """No more text comes: what was held back is what it is."""
        held, self._held = self._give_blanks() + self._held, ""
        return Parted(held, "") if self._is_open else Parted("", held)

    def _take_blanks(self, text: str) -> str:
        """`text` without the blanks at its beginning, which are kept."""
        rest = text.lstrip()
        num_blanks = len(text) - len(rest)
        self._blanks.append(text[:num_blanks])
        self._num_blanks += num_blanks
        return rest

    def _give_blanks(self) -> str:
        blanks, self._blanks, self._num_blanks = "".join(self._blanks), [], 0
        return blanks


def _may_become(text: str, mark: str) -> bool:
    """Whether more text may make a mark at the beginning of it."""
    return len(text) < len(mark) and mark.startswith(text)


class ThinkingReader:
    """A `Reader` that parts reasoning from what another one reads."""

    def __init__(self, splitter: ReasoningSplitter, content: Reader) -> None:
        self._splitter = splitter
        self._content = content

    def push(self, text: str) -> list[Piece]:
        return self._pieces(self._splitter.push(text))

    def finish(self) -> list[Piece]:
        return [*self._pieces(self._splitter.flush()), *self._content.finish()]

    @property
    def num_held(self) -> int:
        return self._splitter.num_held + self._content.num_held

    def _pieces(self, part: Parted) -> list[Piece]:
        thought: list[Piece] = [Thought(part.reasoning)] if part.reasoning else []
        return [*thought, *(self._content.push(part.content) if part.content else ())]


def reader_of(parsed: ParsedRequest, request: Request, card: ModelCard, tokenizer: Tokenizer) -> Reader | None:
    """What reads the answer to a chat; `None`: all of its text is content."""
    form, use = card.tool_format, parsed.tool_use
    # With a grammar there is no room for reasoning: all of the output has its form.
    marks = marks_of(tokenizer) if parsed.separates_reasoning and parsed.grammar is None else None
    if marks is None and not is_read(form, use):
        return None
    end = tokenizer.decode(request.prompt_ids[-_PROMPT_TAIL:], skip_special_tokens=False)
    if marks is None:
        return reader_for(form, use, end)
    continued = str(parsed.messages[-1]["content"]) if parsed.chat.continue_final_message else None
    splitter = ReasoningSplitter(reasoning_of(marks, prompt=end, continued=continued))
    return ThinkingReader(splitter, reader_for(form, use))
