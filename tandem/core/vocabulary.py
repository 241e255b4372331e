"""The tokens of a model for grammars: their bytes, and which of them end a text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.core.errors import InvalidRequestError
from tandem.core.grammar import import_llguidance
from tandem.core.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

# No text in UTF-8 has this byte, and llguidance has a use of its own for it.
_NEVER = b"\xff"


@dataclass(frozen=True, slots=True)
class Description:
    """What llguidance makes its picture of a vocabulary of.

    Attributes:
        text: the tokenizer's file, as it is to be read.
        size: of the vocabulary.
        eos_token_ids: the ends of text.
    """

    text: str
    size: int
    eos_token_ids: list[int]

    def tokens(self) -> llguidance.LLTokenizer:
        """Raises `ValueError`: llguidance cannot read it."""
        made: llguidance.LLTokenizer = import_llguidance().LLTokenizer(
            self.text, n_vocab=self.size, eos_token=self.eos_token_ids
        )
        return made


def description(tokenizer: Tokenizer, eos_token_ids: Sequence[int], vocab_size: int) -> Description:
    """Of the vocabulary of a model. For a large one it takes some tenths of a second, in which no other thread runs.

    Args:
        eos_token_ids: the model's ends of text; no text of a grammar is made of them.
        vocab_size: of the model; the tokenizer may know fewer.

    Raises:
        InvalidRequestError: a text of this tokenizer is not the sum of its tokens' bytes, or nothing ends one; or
            llguidance is not installed.
    """
    import_llguidance()
    if not tokenizer.is_byte_exact:
        raise InvalidRequestError("no grammar holds with this model: its tokenizer does not tell its tokens' bytes")
    if not eos_token_ids:
        raise InvalidRequestError("no grammar holds with this model: it names no token that ends a text")
    size = max(vocab_size, tokenizer.vocab_size)
    return Description(_read_by_llguidance(tokenizer, eos_token_ids), size, list(eos_token_ids))


class Vocabulary:
    """The tokens of one model, as llguidance walks them. It takes a while to make: one a process."""

    def __init__(
        self, tokenizer: Tokenizer, eos_token_ids: Sequence[int], vocab_size: int, made_of: Description | None = None
    ) -> None:
        """
        Args:
            eos_token_ids, vocab_size: as `description` has them.
            made_of: what that made of these.

        Raises:
            InvalidRequestError: as `description`; or llguidance reads the tokenizer otherwise.
        """
        made_of = made_of or description(tokenizer, eos_token_ids, vocab_size)
        self.size = made_of.size
        try:
            self.tokens = made_of.tokens()
        except ValueError as error:
            text = f"no grammar holds with this model: llguidance cannot read its tokenizer: {error}"
            raise InvalidRequestError(text) from error
        self._check_bytes(tokenizer, frozenset(eos_token_ids))

    def _check_bytes(self, tokenizer: Tokenizer, eos_token_ids: frozenset[int]) -> None:
        """Raises `InvalidRequestError` where llguidance reads a token otherwise than texts are made here."""
        for token_id in range(tokenizer.vocab_size):
            ours = tokenizer.bytes_of(token_id)
            if not ours or token_id in eos_token_ids or tokenizer.is_special(token_id) or _NEVER in ours:
                continue
            if (theirs := self.tokens.decode_bytes([token_id])) != ours:
                raise InvalidRequestError(
                    f"no grammar holds with this model: token {token_id} is {ours!r}, and llguidance reads {theirs!r}"
                )

    @property
    def mask_words(self) -> int:
        """Words of 32 bits that a mask has."""
        return (self.size + 31) // 32


def _read_by_llguidance(tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> str:
    """The tokenizer's file, as llguidance is to read it.

    All ends of text are special, so that no text of a grammar is made of them. So are ids that stand for no token: they
    are named, since llguidance takes the number of tokens for the greatest id.
    """
    content = json.loads(tokenizer.to_json())
    known = {token["id"]: token for token in content["added_tokens"]}
    for token_id in eos_token_ids:
        if token_id in known:
            known[token_id]["special"] = True
    vocabulary = content["model"]["vocab"]
    for token_id in range(tokenizer.vocab_size):
        piece = tokenizer.piece(token_id)
        if piece is None and isinstance(vocabulary, dict):
            piece = f"<|no token {token_id}|>"
            vocabulary[piece] = token_id
        elif token_id not in eos_token_ids or token_id in known:
            continue
        content["added_tokens"].append({"id": token_id, "content": piece, **_SPECIAL})
    return json.dumps(content)


_SPECIAL = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
