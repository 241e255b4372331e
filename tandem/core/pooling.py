"""What a checkpoint that gives vectors or scores says of itself; most checkpoints generate and say nothing of it.

    modules.json with a Pooling module      embeds, as sentence-transformers has it
    …ForSequenceClassification, one label   scores pairs of texts
    …Model, a decoder without a head        embeds: the last token, normalised, as vLLM has it

Reads files of JSON; imports no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from tandem.core.errors import ModelLoadError, UnsupportedModelError

# Attention of these goes both ways, so that no chunk of a prompt can be computed before the whole is there.
_ENCODERS = frozenset(
    {"albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "modernbert", "mpnet"}
    | {"nomic_bert", "roberta", "xlm-roberta", "xlm-roberta-xl"}
)
#: As sentence-transformers names them in `1_Pooling/config.json`.
_MODES = {"cls_token": "cls", "mean_tokens": "mean", "lasttoken": "last"}
_PLAIN = frozenset({"Transformer", "Pooling", "Normalize"})


class PoolingTask(StrEnum):
    EMBED = "embed"
    SCORE = "score"


class PoolingKind(StrEnum):
    """Which tokens' hidden states become the vector."""

    LAST = "last"
    CLS = "cls"  # the first token's
    MEAN = "mean"


@dataclass(frozen=True, slots=True)
class Pooling:
    """How a prompt becomes a vector.

    Attributes:
        normalizes: a vector has the length 1.
        has_sigmoid: a score is made one between 0 and 1.
        is_matryoshka: the leading numbers of a vector are a vector too.
        dimensions: those lengths of one that it was made for; empty where it names none.
    """

    task: PoolingTask
    kind: PoolingKind
    normalizes: bool = False
    has_sigmoid: bool = False
    is_matryoshka: bool = False
    dimensions: tuple[int, ...] = ()

    def finished(self, values: Sequence[float], num_dimensions: int | None = None) -> list[float]:
        """What a client gets of the model's own numbers, of the first `num_dimensions` where they are given."""
        if self.task is PoolingTask.SCORE:
            return [_sigmoid(value) for value in values] if self.has_sigmoid else list(values)
        kept = list(values[:num_dimensions])
        return normalized(kept) if self.normalizes else kept


def normalized(values: Sequence[float]) -> list[float]:
    """Of length 1; zeros stay zeros."""
    length = math.sqrt(math.fsum(value * value for value in values)) or 1.0
    return [value / length for value in values]


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value >= 0 else 1 - 1 / (1 + math.exp(value))


def read_pooling(model_dir: Path) -> Pooling | None:
    """What the checkpoint's files say; `None`: it generates.

    Raises:
        ModelLoadError: a file cannot be read.
        UnsupportedModelError: it pools in a way that is not served; says which.
    """
    config = _read(model_dir / "config.json")
    architecture = str((config.get("architectures") or [""])[0])
    modules = _modules(model_dir)
    pools = [module for module in modules if _name(module) == "Pooling"]
    if pools:
        found = _sentence_transformer(model_dir, modules, str(pools[0].get("path", "")), config)
    elif architecture.endswith("ForSequenceClassification"):
        found = _classifier(model_dir, architecture, config)
    elif architecture.endswith("Model") and not architecture.endswith("LMHeadModel"):
        found = Pooling(PoolingTask.EMBED, PoolingKind.LAST, normalizes=True, **_matryoshka(config))
    else:
        return None
    _check_causal(model_dir, architecture, config)
    return found


def _check_causal(model_dir: Path, architecture: str, config: dict[str, Any]) -> None:
    is_encoder = config.get("model_type") in _ENCODERS
    goes_both_ways = config.get("is_causal") is False or config.get("use_bidirectional_attention") is True
    if is_encoder or goes_both_ways:
        raise UnsupportedModelError(
            f"{model_dir}: {architecture or config.get('model_type')} is an encoder: each of its tokens attends to "
            "those behind it; only decoders, whose attention is causal, are served"
        )


def _sentence_transformer(
    model_dir: Path, modules: Sequence[dict[str, Any]], path: str, config: dict[str, Any]
) -> Pooling:
    if others := [name for module in modules if (name := _name(module)) not in _PLAIN]:
        raise UnsupportedModelError(
            f"{model_dir / 'modules.json'}: modules of type {', '.join(others)} are not served; "
            f"known are {', '.join(sorted(_PLAIN))}"
        )
    file = model_dir / path / "config.json"
    said = _read(file)
    modes = [key.removeprefix("pooling_mode_") for key, value in said.items() if _is_mode(key) and value is True]
    if isinstance(named := said.get("pooling_mode"), str):  # as newer versions write it
        modes = named.split("+")
    if len(modes) != 1 or (kind := _MODES.get(modes[0], modes[0])) not in set(PoolingKind):
        raise UnsupportedModelError(
            f"{file}: the pooling {' and '.join(modes) or 'none'} is not served; known are {', '.join(PoolingKind)}"
        )
    if said.get("include_prompt") is False:
        raise UnsupportedModelError(
            f"{file}: include_prompt is false, which is not served: a prompt's tokens all count"
        )
    normalizes = any(_name(module) == "Normalize" for module in modules)
    return Pooling(PoolingTask.EMBED, PoolingKind(kind), normalizes=normalizes, **_matryoshka(config))


def _is_mode(key: str) -> bool:
    return key.startswith("pooling_mode_")


def _matryoshka(config: dict[str, Any]) -> dict[str, Any]:
    dimensions = config.get("matryoshka_dimensions") or ()
    is_matryoshka = bool(dimensions) or config.get("is_matryoshka") is True
    return {"is_matryoshka": is_matryoshka, "dimensions": tuple(int(size) for size in dimensions)}


def _classifier(model_dir: Path, architecture: str, config: dict[str, Any]) -> Pooling:
    num_labels = config.get("num_labels") or len(config.get("id2label") or (0, 1))  # transformers' default is two
    if num_labels != 1:
        raise UnsupportedModelError(
            f"{model_dir}: {architecture} has {num_labels} labels; a model that scores pairs of texts has one"
        )
    return Pooling(PoolingTask.SCORE, PoolingKind.LAST, has_sigmoid=_has_sigmoid(model_dir, config))


def _has_sigmoid(model_dir: Path, config: dict[str, Any]) -> bool:
    """As sentence-transformers says it; with one label it is the default."""
    said = (config.get("sentence_transformers") or {}).get("activation_fn")
    name = str(said or config.get("sbert_ce_default_activation_function") or "Sigmoid").rpartition(".")[2]
    if name not in ("Sigmoid", "Identity"):
        raise UnsupportedModelError(
            f"{model_dir / 'config.json'}: the activation {name} is not served; known are Sigmoid and Identity"
        )
    return name == "Sigmoid"


def _modules(model_dir: Path) -> list[dict[str, Any]]:
    file = model_dir / "modules.json"
    if not file.is_file():
        return []
    modules = _load(file)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelLoadError(f"{file} must hold a list of objects")
    return modules


def _name(module: dict[str, Any]) -> str:
    return str(module.get("type", "")).rpartition(".")[2]


def _read(file: Path) -> dict[str, Any]:
    said = _load(file)
    if not isinstance(said, dict):
        raise ModelLoadError(f"{file} must hold an object")
    return said


def _load(file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file} cannot be read: {error}") from error
