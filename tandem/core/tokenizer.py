"""Text to token ids and back, and chat templates: what the router needs of a checkpoint's tokenizer.

Built on the `tokenizers` library alone. The token ids are those that `transformers` gives for the same files:
`tokenizer.json`'s own post-processor decides which special tokens a prompt gets, and a chat template writes its
special tokens itself, so its text is encoded without adding any.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from tandem.core.chat_template import ChatOptions, ChatTemplate
from tandem.core.errors import InvalidRequestError, ModelLoadError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SURROGATE = re.compile("[\ud800-\udfff]")
_SPIECE_SPACE = "▁"


class Tokenizer:
    """The tokenizer of one checkpoint. Safe to use from several threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: ChatTemplate | None = None,
        tool_template: ChatTemplate | None = None,
        special_tokens: dict[str, str] | None = None,
        response_template: dict[str, Any] | None = None,
    ) -> None:
        """`special_tokens` are the names that chat templates read: `bos_token`, `eos_token`, …

        Where there is a `tool_template`, chats with tools are rendered by it. `response_template` says how messages of
        the model are to be read, in transformers' form.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._chat_template = chat_template
        self._tool_template = tool_template or chat_template
        self._special_tokens = special_tokens or {}
        self.response_template = response_template
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self._pieces = _piece_reader(backend)
        #: Whether the text of a sequence is the UTF-8 decoding of its tokens' bytes in a row, which makes
        #: incremental decoding exact and cheap. True of byte-level BPE and of sentencepiece with byte fallback.
        self.is_byte_exact = self._pieces is not None
        #: Whether one space at the very beginning of a text is the tokenizer's, not the text's.
        self.strips_first_space = self.is_byte_exact and _STRIP_ONE in _decoders(backend)
        self.token_bytes = functools.lru_cache(maxsize=None)(self.bytes_of)
        self.own_text = functools.lru_cache(maxsize=None)(self._own_text)

    @classmethod
    def from_dir(cls, model_dir: Path) -> Tokenizer:
        """Read `tokenizer.json`, the chat template, and what a checkpoint's other files say of its special tokens.

        Raises:
            ModelLoadError: a file is missing or unreadable; names it.
        """
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise ModelLoadError(f"{path} is missing: Tandem needs the `tokenizers` format (save a fast tokenizer)")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare `Exception`: its one border
            raise ModelLoadError(f"{path} cannot be read: {error}") from error
        config_path = model_dir / "tokenizer_config.json"
        config = _object_in(config_path)
        if "added_tokens_decoder" not in config:  # as older checkpoints have it
            config |= _object_in(model_dir / "special_tokens_map.json")
        try:
            _add_named_tokens(backend, config)
        except (TypeError, ValueError, AttributeError) as error:
            raise ModelLoadError(f"{config_path} names tokens in a way that is not known: {error}") from error
        return cls(
            backend,
            chat_template=ChatTemplate.from_dir(model_dir, config),
            tool_template=ChatTemplate.from_dir(model_dir, config, "tool_use"),
            special_tokens=_special_tokens(config),
            response_template=config.get("response_template"),
        )

    # -- text to ids

    def encode(self, text: str, second: str | None = None, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of `text`, and of a `second` one behind it as the post-processor puts two together.

        `add_special_tokens` lets the post-processor add its own (a BOS, say).

        Half a surrogate pair, which JSON can write as an escape and UTF-8 cannot carry, counts as U+FFFD.
        """
        try:
            encoded = self._backend.encode(text, second, add_special_tokens=add_special_tokens)
        except TypeError:  # what the library says of such halves; a look at every text would cost more
            whole, rest = (part and _SURROGATE.sub("\ufffd", part) for part in (text, second))
            encoded = self._backend.encode(whole, rest, add_special_tokens=add_special_tokens)
        return encoded.ids

    @property
    def chat_variables(self) -> frozenset[str]:
        """The names that the chat template reads, `enable_thinking` say; none where there is no template."""
        return self._chat_template.variables if self._chat_template is not None else frozenset()

    @property
    def refused_roles(self) -> frozenset[str]:
        """The roles whose messages the chat template does not know and nobody may speak for."""
        return self._chat_template.refused_roles if self._chat_template is not None else frozenset()

    @property
    def chat_source(self) -> str:
        """The chat template as it is written; empty where there is none."""
        return self._chat_template.source if self._chat_template is not None else ""

    @property
    def tool_template_source(self) -> str:
        """The template by which chats with tools are rendered; empty where there is none."""
        return self._tool_template.source if self._tool_template is not None else ""

    @property
    def knows_tools(self) -> bool:
        """Whether a model that reads the chat template's text can be told of tools."""
        return self._tool_template is not None and self._tool_template.knows_tools

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        options: ChatOptions | None = None,
    ) -> str:
        """The prompt text of a conversation, by default up to where the assistant answers.

        Encode it without adding special tokens: the template writes its own.

        Raises:
            InvalidRequestError: the checkpoint has no template, or its template refuses these messages or tools.
        """
        template = self._tool_template if tools else self._chat_template
        if template is None:
            raise InvalidRequestError(
                "this model has no chat template; use /v1/completions with a prompt of your own", field="messages"
            )
        return template.render(messages, options or ChatOptions(), special_tokens=self._special_tokens, tools=tools)

    # -- ids to text

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    @property
    def special_texts(self) -> list[str]:
        """The texts of all special tokens."""
        return [token.content for token in self._backend.get_added_tokens_decoder().values() if token.special]

    def special_ids_of(self, texts: Iterable[str]) -> dict[str, int]:
        """Those of `texts` that are special tokens, with their ids."""
        ids = {text: self._backend.token_to_id(text) for text in texts}
        return {text: i for text, i in ids.items() if i is not None and self.is_special(i)}

    @property
    def special_ids(self) -> frozenset[int]:
        """The tokens that stand for no text."""
        return self._special_ids

    def is_special(self, token_id: int) -> bool:
        """Whether the token stands for no text (BOS, EOS, turn markers)."""
        return token_id in self._special_ids

    @property
    def eos_token_id(self) -> int | None:
        """The token that `tokenizer_config.json` calls the end of text."""
        name = self._special_tokens.get("eos_token")
        token_id: int | None = self._backend.token_to_id(name) if name is not None else None
        return token_id

    def piece(self, token_id: int) -> str | None:
        """The token as the tokenizer's file writes it; `None` where it knows none."""
        piece: str | None = self._backend.id_to_token(token_id)
        return piece

    @property
    def vocabulary_sha256(self) -> str:
        """Of all tokens in the order of their ids: equal where two tokenizers mean the same by the same ids."""
        digest = hashlib.sha256()
        for token_id in range(self.vocab_size):
            digest.update(f"{self.piece(token_id)!r}\n".encode())
        return digest.hexdigest()

    def to_json(self) -> str:
        """The tokenizer's file."""
        text: str = self._backend.to_str()
        return text

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that a token stands for within a text; of a special token, those of its name.

        Ids that the tokenizer does not know (padded vocabularies) stand for none. Only for `is_byte_exact`
        tokenizers is a text the sum of these; for others they serve for display.
        """
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if self._pieces is None:
            text: str = self._backend.decode([token_id], skip_special_tokens=False)
            return text.encode()
        return self._pieces(piece)

    def _own_text(self, token_id: int) -> str | None:
        """What its bytes say by themselves; `None` where they are no whole characters."""
        try:
            return self.token_bytes(token_id).decode()
        except UnicodeDecodeError:
            return None


def _object_in(path: Path) -> dict[str, Any]:
    """What a file of JSON says; nothing where there is none. Raises `ModelLoadError`."""
    try:
        said = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(said, dict):
        raise ModelLoadError(f"{path} must hold an object")
    return said


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The named special tokens of `tokenizer_config.json`, where each is a text or an object with `content`."""
    named = {}
    for name, value in config.items():
        if not name.endswith("_token"):
            continue
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            named[name] = content
    return named


#: Under these names `tokenizer_config.json` has the special tokens that every tokenizer may have.
_USUAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_TOKEN_FIELDS = frozenset({"content", "single_word", "lstrip", "rstrip", "normalized", "special"})


def _add_named_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Have no text cut within a token that `tokenizer_config.json` alone names, as `transformers` has it.

    Where a checkpoint was trained further, the markers of its turns may be there only: the vocabulary has them, and the
    model knows them whole. What `added_tokens_decoder` says of a token, of the spaces beside it for one, goes before
    what `tokenizer.json` says; but what is special in either is.
    """
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    by_id = sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0]))
    told = {token.content: token for token in (_added_token(said) for _, said in by_id)}
    changed: dict[str, tokenizers.AddedToken] = {}  # at once: a great vocabulary is looked through each time
    for content, token in told.items():
        before = known.get(content)
        token.special = token.special or (before is not None and before.special)
        if repr(token) != repr(before):
            changed[content] = token
    more = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    others = (_added_token(said, special=True) for said in (more.values() if isinstance(more, dict) else more))
    named = [_added_token(said, special=True) for name in _USUAL_TOKENS if (said := config.get(name))]
    for token in (*named, *(token for token in others if token.content not in told)):
        before = told.get(token.content) or known.get(token.content)
        if before is None and backend.token_to_id(token.content) is None:
            continue  # it would get an id that the model may not have: padding, mostly, of a training
        if before is None or not before.special:
            changed[token.content] = before or token
            changed[token.content].special = True
    backend.add_tokens([*changed.values()])


def _added_token(said: str | dict[str, Any], *, special: bool = False) -> tokenizers.AddedToken:
    """The token that a configuration names by its text, or as an object. `special`: it is, whatever that says."""
    fields = {"content": said} if isinstance(said, str) else {k: v for k, v in said.items() if k in _TOKEN_FIELDS}
    is_special = special or bool(fields.get("special"))
    return tokenizers.AddedToken(**{"normalized": not is_special, **fields, "special": is_special})


# -- what a token's piece stands for, by the kind of decoder


def _decoders(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """The decoder's steps as data."""
    decoder = json.loads(backend.to_str())["decoder"]
    if decoder is None:
        return []
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


_REPLACE_SPACE = {"type": "Replace", "pattern": {"String": _SPIECE_SPACE}, "content": " "}
_STRIP_ONE = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def _piece_reader(backend: tokenizers.Tokenizer) -> Callable[[str], bytes] | None:
    """The function from a piece to its bytes, or `None` where a text is not the sum of its tokens' bytes."""
    steps = _decoders(backend)
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return _byte_level_piece
    with_fallback = [_REPLACE_SPACE, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if steps in (with_fallback, [*with_fallback, _STRIP_ONE]):
        return _byte_fallback_piece
    return None


@functools.cache
def _byte_of_char() -> dict[str, int]:
    """GPT-2's table: each byte is written as one printable character; those that are not printable move up."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return table | {chr(256 + n): byte for n, byte in enumerate(others)}


def _byte_level_piece(piece: str) -> bytes:
    table = _byte_of_char()
    try:
        return bytes(table[char] for char in piece)
    except KeyError:  # an added token that was never byte-coded (it holds a space, say) stands for itself
        return piece.encode()


def _byte_fallback_piece(piece: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(piece)
    if match:
        return bytes.fromhex(match[1])
    return piece.replace(_SPIECE_SPACE, " ").encode()
