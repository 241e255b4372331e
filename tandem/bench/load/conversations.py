"""Conversations: what users say, turn by turn, and the history that grows with what the server answers. Pure.

Each turn's prompt is the whole history, the server's own answers among it, and a new text. The same seed gives the same
texts and pauses, whatever is answered.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any, Literal

from tandem.bench.load.workload import Job, completion_fields

Api = Literal["completions", "chat"]
APIS: tuple[Api, ...] = ("completions", "chat")
PATHS: dict[Api, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}

#: Usual words: a token each, or little more, in vocabularies that were made from English.
_USUAL = """
the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not what
all were we when your can said there use an each which she do how their if will up other about out many then them these
so some her would make like him into time has look two more write go see number no way could people my than first water
been call who oil its now find long down day did get come made may part over new sound take only
"""
_WORDS = _USUAL.split()


@dataclass(frozen=True)
class ConversationPlan:
    """What all conversations of a load have in common.

    Attributes:
        num_words: of a user's text; the server counts its tokens.
        num_output: tokens of an answer.
        think_s: mean pause between an answer and the next text, of an exponential distribution.
    """

    num: int
    num_turns: int = 6
    num_words: int = 512
    num_output: int = 64
    think_s: float = 0.0
    api: Api = "completions"


@dataclass(frozen=True)
class Turn:
    """What a user says, and for how long they think before."""

    text: str
    think_s: float


def make_conversations(plan: ConversationPlan, seed: str) -> list[Conversation]:
    """All of a load, numbered from 0."""
    return [Conversation(number, plan, _turns(plan, f"{seed}:conversation:{number}")) for number in range(plan.num)]


def _turns(plan: ConversationPlan, seed: str) -> list[Turn]:
    generator = random.Random(seed)
    turns = []
    for number in range(plan.num_turns):
        think_s = generator.expovariate(1.0) * plan.think_s if number else 0.0
        turns.append(Turn(" ".join(generator.choices(_WORDS, k=plan.num_words)), think_s))
    return turns


class Conversation:
    """One conversation. `job` and `body` are of its next turn; `take` hears the answer and goes on to the one after."""

    def __init__(self, number: int, plan: ConversationPlan, turns: list[Turn]) -> None:
        self._number, self._plan, self._turns = number, plan, turns
        self._num_answered = 0
        self._messages: list[dict[str, str]] = []  # of the chat
        self._text = ""  # of the completion
        self._num_before: int | None = 0  # tokens of the history, by the server's count; `None`: it does not say

    @property
    def num_left(self) -> int:
        """Turns without an answer."""
        return len(self._turns) - self._num_answered

    @property
    def think_s(self) -> float:
        """The pause before the next turn."""
        return self._turns[self._num_answered].think_s

    @property
    def path(self) -> str:
        return PATHS[self._plan.api]

    @property
    def job(self) -> Job:
        """Turns of all conversations are numbered one conversation after the other."""
        number = self._number * len(self._turns) + self._num_answered
        return Job(number, (), self._plan.num_output, num_repeated=self._num_before, turn=self._num_answered + 1)

    def body(self, model: str, *, ignore_eos: bool) -> bytes:
        """The JSON of the next turn's request; with it the history grows by the user's text."""
        text = self._turns[self._num_answered].text
        prompt: dict[str, Any]
        if self._plan.api == "chat":
            self._messages.append({"role": "user", "content": text})
            prompt = {"messages": self._messages}
        else:
            self._text += f"{text}\n\n"
            prompt = {"prompt": self._text}
        fields = completion_fields(model, self._plan.num_output, ignore_eos=ignore_eos) | prompt
        return json.dumps(fields, separators=(",", ":")).encode()

    def take(self, answer: str, num_input: int | None, num_output: int) -> None:
        """The server answered; `num_input` is its count of the prompt's tokens, `None`: it does not say."""
        if self._plan.api == "chat":
            self._messages.append({"role": "assistant", "content": answer})
        else:
            self._text += f"{answer}\n\n"
        self._num_before = None if num_input is None else num_input + num_output
        self._num_answered += 1
