"""What a streamed completion told, event by event. Pure: the time comes with the event."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import orjson

_DONE = b"[DONE]"
_SHOWN = 200


@dataclass(slots=True)
class StreamLog:
    """One stream. Times are those of the caller's clock, in seconds."""

    # Of the events that hold a choice, as vLLM counts them; of a chat those that say more than a role or the end.
    event_s: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    num_prompt_tokens: int | None = None  # the server's own `usage`
    num_output_tokens: int | None = None
    num_cached_tokens: int | None = None  # of the prompt's; `None`: the server does not tell
    finish_reason: str | None = None
    error: str | None = None  # what the server said in mid-stream, or what is wrong with an event
    is_done: bool = False

    @property
    def is_whole(self) -> bool:
        """The server has said that nothing is missing: by `[DONE]` or, where it sends none, by a finish reason."""
        return self.error is None and (self.is_done or self.finish_reason is not None)

    @property
    def digest(self) -> str:
        """Of the text, to tell whether two servers said the same."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]

    def take(self, data: bytes, now_s: float) -> None:
        """One event came at `now_s`."""
        if data == _DONE:
            self.is_done = True
            return
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError:
            event = None
        if not isinstance(event, dict):
            self.error = f"an event is no JSON object: {data[:_SHOWN].decode(errors='replace')}"
            return
        if event.get("error"):
            self.error = error_message(event)
        if choices := event.get("choices"):
            self._take_choice(choices[0], now_s)
        if usage := event.get("usage"):
            # Servers that count with each event count on; the last is the whole.
            self.num_prompt_tokens = usage.get("prompt_tokens")
            self.num_output_tokens = usage.get("completion_tokens")
            self.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")

    @property
    def text(self) -> str:
        """What was said; of a chat without its reasoning."""
        return "".join(self.texts)

    def _take_choice(self, choice: Any, now_s: float) -> None:
        delta = choice.get("delta", {}) if isinstance(choice, dict) else None
        if not isinstance(delta, dict):
            self.error = f"a choice is no JSON object, or its delta is none: {choice!r}"[:_SHOWN]
            return
        self.texts.append(choice.get("text") or delta.get("content") or "")
        reason = choice.get("finish_reason")
        self.finish_reason = reason or self.finish_reason
        says = "delta" not in choice or any(value for name, value in delta.items() if name != "role")
        if says or (reason and not self.event_s):  # an answer without a word has its end alone
            self.event_s.append(now_s)


def error_message(answer: Any) -> str:
    """What an error body says: OpenAI's `{"error": {"message": …}}`, vLLM's older `{"message": …}`, or all of it."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    message = error.get("message") if isinstance(error, dict) else None
    return str(message or error)[:_SHOWN]
