"""Token ids to text, one token at a time, without ever showing half a character.

The text of all tokens together is what decoding prompt and output as a whole gives beyond the prompt's text, so a
word that begins with the tokenizer's space mark keeps its space after a prompt and loses it at the beginning of a
text. Bytes that never become a character come out as U+FFFD, as soon as that is certain.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence, Set

from tandem.core.tokenizer import Tokenizer

#: So many of a prompt's last tokens can hold the beginning of a character that the output completes, with room
#: to spare for special tokens in between.
_PROMPT_TAIL = 16


def detokenizer_for(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], shown_ids: Set[int] = frozenset()
) -> ByteDetokenizer | WindowDetokenizer:
    """A detokenizer for one choice that goes on after `prompt_ids`. Special tokens are no text, but for `shown_ids`."""
    if tokenizer.is_byte_exact:
        return ByteDetokenizer(tokenizer, prompt_ids, shown_ids)
    return WindowDetokenizer(tokenizer, prompt_ids, shown_ids)


class ByteDetokenizer:
    """For tokenizers whose tokens are bytes in a row (byte-level BPE, byte fallback): one table look-up a token."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], shown_ids: Set[int]) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._shown_ids = shown_ids
        self._is_special = tokenizer.is_special
        self._text_of = tokenizer.own_text
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_between = True  # characters: then the decoder holds no part of one
        # Invariant: true while no text has come out and one leading space would be the tokenizer's own.
        self._strip_space = tokenizer.strips_first_space
        for token_id in prompt_ids[-_PROMPT_TAIL:]:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        """The text that this token settles; empty while a character is incomplete."""
        if self._is_special(token_id) and token_id not in self._shown_ids:
            return ""
        if self._is_between and (text := self._text_of(token_id)) is not None:
            return self._begun(text) if self._strip_space else text
        text = self._utf8.decode(self._token_bytes(token_id))
        self._is_between = not self._utf8.getstate()[0]
        return self._begun(text)

    def flush(self) -> str:
        """The end is reached: the rest, with U+FFFD for an incomplete character."""
        return self._begun(self._utf8.decode(b"", final=True))

    def _begun(self, text: str) -> str:
        if self._strip_space and text:
            self._strip_space = False
            return text.removeprefix(" ")
        return text


class WindowDetokenizer:
    """For every other tokenizer: decodes a short window with and without the new tokens and takes the difference.

    ids     … p p p │ s s s │ n
              context └ start └ shown     decode([context:]) minus decode([context:shown]) is new text
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], shown_ids: Set[int]) -> None:
        self._tokenizer = tokenizer
        self._shown_ids = shown_ids
        self._ids = list(prompt_ids[-_PROMPT_TAIL:])
        # Invariant: the text of _ids[:_shown] has been given out (or is the prompt's); _context <= _shown.
        self._context = 0
        self._shown = len(self._ids)

    def push(self, token_id: int) -> str:
        """As `ByteDetokenizer.push`."""
        self._ids.append(token_id)
        new = self._new_text()
        if not new or new.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        return new

    def flush(self) -> str:
        """As `ByteDetokenizer.flush`."""
        new = self._new_text()
        self._context = self._shown = len(self._ids)
        return new

    def _new_text(self) -> str:
        known = self._text(self._ids[self._context : self._shown])
        return self._text(self._ids[self._context :])[len(known) :]

    def _text(self, token_ids: Sequence[int]) -> str:
        if not self._shown_ids:
            return self._tokenizer.decode(token_ids)
        is_special = self._tokenizer.is_special
        kept = [i for i in token_ids if i in self._shown_ids or not is_special(i)]
        return self._tokenizer.decode(kept, skip_special_tokens=False)
