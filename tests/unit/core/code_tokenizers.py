"""Small tokenizers, made in code: one byte-level, one with byte fallback, one of another kind."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors


def byte_level(merges: tuple[str, ...] = ()) -> tokenizers.Tokenizer:
    """Token id = byte value for 1 to 255, 0 is `</s>` (the NUL byte moved to 299), then `merges`, 300 is `<s>`."""
    from tandem.core.tokenizer import _byte_of_char

    vocab = {char: byte if byte else 299 for char, byte in _byte_of_char().items()}
    pairs = []
    for number, word in enumerate(merges):
        left, right = word.split("+")
        pairs.append((left, right))
        vocab[left + right] = 400 + number
    vocab["<unk>"] = 298
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def byte_fallback(*, strips: bool = True) -> tokenizers.Tokenizer:
    """As Llama 2's: `▁` for spaces, `<0xHH>` for what the vocabulary lacks."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [chr(c) for c in range(ord("a"), ord("z") + 1)] + ["▁", "é", "▁t", "he", "▁the"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he")]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def word_piece() -> tokenizers.Tokenizer:
    """A kind whose text is not the sum of its tokens."""
    pieces = ["[UNK]", "hello", "##s", "world", "##ly", "a", "b"]
    backend = tokenizers.Tokenizer(models.WordPiece({p: n for n, p in enumerate(pieces)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    return backend
