"""What the router knows of the served model: its names, its context, its vocabulary."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from router.openai.refusal import shown
from router.tools.formats import ToolFormat, format_of
from tandem.core.config import Config
from tandem.core.errors import ModelLoadError, ModelNotFoundError
from tandem.core.model_path import ANY_NAME, model_name, positions_of, shown_name, text_config
from tandem.core.pooling import Pooling, read_pooling
from tandem.core.tokenizer import Tokenizer


@dataclass(frozen=True)
class ModelCard:
    """The model as clients see it."""

    names: tuple[str, ...]  # as configured; may hold `*`
    own_name: str  # what `/v1/cluster` shows
    root: str  # the checkpoint behind all names: a hub id, or a directory's name
    max_context: int | None  # tokens of prompt and output; `None`: only the workers know
    vocab_size: int
    eos_token_ids: tuple[int, ...]  # ends of text, as far as the checkpoint's files name them; workers know all
    refused_roles: frozenset[str]  # of messages that its chat template does not know
    knows_tools: bool  # its chat template does
    tool_format: ToolFormat | None  # how it writes calls; `None`: not known
    markers: Mapping[str, int]  # the special tokens by which it writes them
    created: int  # seconds since the epoch
    pooling: Pooling | None = None  # `None`: it generates
    vector_size: int = 0  # numbers of a token's hidden state
    is_simulated: bool = False  # its tokens mean nothing

    @classmethod
    def from_dir(cls, model_dir: Path, config: Config, tokenizer: Tokenizer) -> ModelCard:
        """Read `config.json` of a checkpoint. Raises `ModelLoadError` where it cannot be read."""
        path = model_dir / "config.json"
        try:
            facts: dict[str, Any] = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{path} cannot be read: {error}") from error
        facts = text_config(facts)
        own = model_name(config.model.path, model_dir)
        names = config.model.served_names or (own,)
        limits = [limit for limit in (positions_of(facts), config.cache.max_context) if limit]
        tool_format = _tool_format(tokenizer)
        return cls(
            names=names,
            own_name=shown_name(names, own),
            root=own,
            max_context=min(limits, default=None),
            vocab_size=int(facts.get("vocab_size") or tokenizer.vocab_size),
            eos_token_ids=_ends_of_text(model_dir, facts, tokenizer),
            refused_roles=tokenizer.refused_roles,
            knows_tools=tokenizer.knows_tools,
            tool_format=tool_format,
            markers=tokenizer.special_ids_of(tool_format.markers if tool_format else ()),
            created=int(time.time()),
            pooling=read_pooling(model_dir),
            vector_size=int(facts.get("hidden_size") or facts.get("n_embd") or 0),
            is_simulated=config.model.engine == "simulated",
        )

    def context_within(self, of_workers: int | None) -> int | None:
        """Tokens that a prompt and its output may have, where each worker can hold so many; `None`: nobody has said."""
        return min((limit for limit in (self.max_context, of_workers) if limit is not None), default=None)

    def check_name(self, name: str) -> None:
        """Raises `ModelNotFoundError` unless requests may use `name`."""
        if name not in self.names and ANY_NAME not in self.names:
            raise ModelNotFoundError(
                f"the model {shown(name)} is not served here; served: {', '.join(self.names)}", field="model"
            )

    def listing(self) -> list[dict[str, Any]]:
        """The models of `GET /v1/models`."""
        return [self.entry(name) for name in self.names if name != ANY_NAME] or [self.entry(self.own_name)]

    def entry(self, name: str) -> dict[str, Any]:
        """One model of `GET /v1/models/{id}`, with vLLM's fields beside OpenAI's."""
        entry = {"id": name, "object": "model", "created": self.created, "owned_by": "tandem"}
        task = {"task": self.pooling.task.value} if self.pooling is not None else {}
        simulated = {"simulated": True} if self.is_simulated else {}
        return {**entry, "root": self.root, "parent": None, "max_model_len": self.max_context, **task, **simulated}


def _ends_of_text(model_dir: Path, facts: dict[str, Any], tokenizer: Tokenizer) -> tuple[int, ...]:
    """What `generation_config.json` and `config.json` say; else the token that the tokenizer calls so."""
    path = model_dir / "generation_config.json"
    try:
        generation: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    found: list[int] = []
    for said in (generation.get("eos_token_id"), facts.get("eos_token_id")):
        found += said if isinstance(said, list) else [] if said is None else [said]
    if not found and (named := tokenizer.eos_token_id) is not None:
        found = [named]
    return tuple(dict.fromkeys(found))


def _tool_format(tokenizer: Tokenizer) -> ToolFormat | None:
    """What the checkpoint says of it, else what our table does."""
    by_table = format_of(tokenizer.tool_template_source)
    if tokenizer.response_template is None:
        return by_table
    # Half a second of imports, for those checkpoints alone that need it.
    from router.tools.response_template import format_of_template

    return format_of_template(tokenizer.response_template, tokenizer.special_texts, by_table) or by_table
