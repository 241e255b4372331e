"""Whether one model may propose tokens to another: what their files tell of it. No tensors."""

from __future__ import annotations

from pathlib import Path

from tandem.core.errors import ConfigError
from tandem.core.tokenizer import Tokenizer

DRAFT_KEY = "speculation.draft_model"


def check_vocabularies(target_dir: Path, draft_dir: Path) -> None:
    """Both read and write the same tokens by the same ids. How many rows their embeddings have beyond is their own.

    Raises:
        ConfigError: they do not; names what differs.
        ModelLoadError: a tokenizer cannot be read.
    """
    target, draft = Tokenizer.from_dir(target_dir), Tokenizer.from_dir(draft_dir)
    if target.vocabulary_sha256 == draft.vocabulary_sha256:
        return
    if target.vocab_size != draft.vocab_size:
        what = f"{draft.vocab_size} tokens, the model {target.vocab_size}"
    else:
        ids = (token_id for token_id in range(target.vocab_size) if target.piece(token_id) != draft.piece(token_id))
        first = next(ids)
        what = f"token {first} as {draft.piece(first)!r}, the model as {target.piece(first)!r}"
    raise ConfigError(
        f"{DRAFT_KEY} {draft_dir.name} has another vocabulary than the model: it has {what}; name a model of the "
        "same family, with the same tokenizer",
        key=DRAFT_KEY,
    )
