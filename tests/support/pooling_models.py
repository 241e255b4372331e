"""Small random checkpoints that pool, and what `transformers` makes of prompts by them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoModelForSequenceClassification

from tandem.engine.random_model import ModelSpec, make_config, make_tokenizer, save

_MODES = {"last": "lasttoken", "cls": "cls_token", "mean": "mean_tokens"}


def write_modules(target: Path, kind: str, *, normalizes: bool = True) -> None:
    """What sentence-transformers writes beside a checkpoint."""
    pooling = {"word_embedding_dimension": 64, **{f"pooling_mode_{name}": key == kind for key, name in _MODES.items()}}
    (target / "1_Pooling").mkdir(parents=True)
    (target / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    names = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] if normalizes else [])]
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
        for index, (path, name) in enumerate(names)
    ]
    (target / "modules.json").write_text(json.dumps(modules))


def save_embedder(
    target: Path, kind: str = "last", *, normalizes: bool = True, config: dict[str, Any] | None = None, **spec: Any
) -> Path:
    """A checkpoint that embeds; `config` is added to its `config.json`."""
    save(ModelSpec(**{"max_positions": 512, **spec}), target)
    write_modules(target, kind, normalizes=normalizes)
    file = target / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | (config or {})))
    return target


def save_scorer(target: Path, **spec: Any) -> Path:
    """A checkpoint with a head of one label."""
    config = make_config(ModelSpec(**{"max_positions": 512, **spec}))
    config.num_labels, config.pad_token_id = 1, 0
    model = AutoModelForSequenceClassification.from_config(config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.copy_(noise if parameter.dim() > 1 else parameter + 0.5 * noise)
    model.save_pretrained(target)
    make_tokenizer(config.vocab_size).save_pretrained(target)
    return target


def embeddings_of(directory: Path, prompts: Sequence[Sequence[int]], kind: str) -> torch.Tensor:
    """`[prompts, hidden]`, of length 1, by the model's own forward and each prompt alone."""
    model = AutoModel.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        hidden = [model(torch.tensor([list(ids)])).last_hidden_state[0] for ids in prompts]
    pooled = {"last": lambda h: h[-1], "cls": lambda h: h[0], "mean": lambda h: h.mean(dim=0)}[kind]
    return torch.nn.functional.normalize(torch.stack([pooled(rows) for rows in hidden]), dim=-1)


def scores_of(directory: Path, prompts: Sequence[Sequence[int]]) -> list[float]:
    """Between 0 and 1, by the model's own forward and each prompt alone."""
    model = AutoModelForSequenceClassification.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        return [float(torch.sigmoid(model(torch.tensor([list(ids)])).logits[0, 0])) for ids in prompts]
