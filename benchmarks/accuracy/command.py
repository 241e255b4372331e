"""`python -m benchmarks accuracy`: the embedded model in all types, on texts that training never saw."""

from __future__ import annotations

import importlib.util
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from rich.console import Console

from benchmarks.accuracy.section import FORMAT, section
from benchmarks.origin import origin
from tandem.bench.report import json_file
from tandem.core.config import EMBEDDED_MODEL
from tandem.core.model_path import resolve_model
from tandem.core.tokenizer import Tokenizer
from tandem.engine.engine import Engine, SequenceInput

_CORPUS = Path(__file__).resolve().parents[2] / "tools" / "tiny_corpus.py"
_SEED = 20_012  # of no training, and of no other measurement
_NUM_PAGES = 64
_ANSWER_TOKENS = 16

#: How each way is loaded, the exact one first.
WAYS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantize": "int8"},
    "int4": {"quantize": "int4"},
    "KV in bfloat16": {"dtype": "float32", "cache_dtype": "bfloat16"},
    "KV in int8": {"dtype": "float32", "cache_dtype": "int8"},
}


@dataclass(frozen=True)
class AccuracySizes:
    """How much is measured."""

    num_texts: int = 20
    num_recalls: int = 100


def run(json: Path | None, sizes: AccuracySizes) -> None:
    """Print the table, and write it to `json`. Raises `ConfigError` where it cannot be written."""
    content = measure(sizes, lambda text: Console(stderr=True).print(text, highlight=False))
    Console(soft_wrap=True).print("\n".join(section(content)).strip(), highlight=False, markup=False)
    if json is not None:
        json_file.write(json, content)


def measure(sizes: AccuracySizes, tell: Callable[[str], None]) -> dict[str, Any]:
    """Plain data."""
    model_dir = resolve_model(EMBEDDED_MODEL)
    tokenizer, corpus = Tokenizer.from_dir(model_dir), _corpus()
    generator = random.Random(_SEED)
    texts = [tokenizer.encode(corpus.story(generator)) for _ in range(sizes.num_texts)]
    recalls = _recalls(tokenizer, corpus, generator, sizes.num_recalls)
    exact: list[torch.Tensor] = []
    ways = {}
    for name, options in WAYS.items():
        tell(f"{name}: {sizes.num_texts} texts, {sizes.num_recalls} prompts")
        engine = Engine.load(model_dir, num_pages=_NUM_PAGES, **options)  # type: ignore[arg-type]
        found = [torch.log_softmax(_logits(engine, text).double(), dim=-1) for text in texts]
        exact = exact or found
        ways[name] = {
            **_distance(texts, exact, found),
            "num_recalled": sum(code in tokenizer.decode(_answer(engine, ids)) for ids, code in recalls),
            "types": {**asdict(engine.types), "pages": engine.layout.dtype},
        }
    return {
        "format": FORMAT,
        **origin(),
        "settings": asdict(sizes),
        "num_tokens": sum(map(len, texts)),
        "ways": ways,
    }


def _corpus() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tiny_corpus", _CORPUS)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where its dataclasses look for it
    spec.loader.exec_module(module)
    return module


def _recalls(
    tokenizer: Tokenizer, corpus: ModuleType, generator: random.Random, num: int
) -> list[tuple[list[int], str]]:
    """Prompts of 400 to 900 tokens that ask for a code in them, and the code."""
    found: list[tuple[list[int], str]] = []
    while len(found) < num:
        task = corpus.recall_task(generator, generator.randint(400, 900), generator.randint(3, 6), 1)
        ids = tokenizer.encode(task.plain_prompt())
        if 400 <= len(ids) <= 900:
            found.append((ids, task.questions[0][2]))
    return found


def _logits(engine: Engine, ids: Sequence[int]) -> torch.Tensor:
    """`[tokens, vocab]`: after each of them."""
    pages = range(engine.layout.num_pages_for(len(ids)))
    return engine.forward([SequenceInput(list(ids), 0, pages, len(ids))]).clone()


def _answer(engine: Engine, ids: Sequence[int]) -> list[int]:
    """The likeliest tokens that follow."""
    pages = range(engine.layout.num_pages_for(len(ids) + _ANSWER_TOKENS))
    tokens, start, answer = list(ids), 0, []
    for _ in range(_ANSWER_TOKENS):
        logits = engine.forward([SequenceInput(tokens, start, pages, 1)])
        start += len(tokens)
        tokens = [int(logits[0].argmax())]
        answer += tokens
    return answer


def _distance(
    texts: Sequence[list[int]], exact: Sequence[torch.Tensor], found: Sequence[torch.Tensor]
) -> dict[str, float]:
    """Of log-probabilities `[tokens, vocab]` of each text: how likely it is, and how far from the exact ones."""
    loss = num_followed = divergence = same = num = 0.0
    for ids, of_exact, of_found in zip(texts, exact, found, strict=True):
        following = torch.tensor(ids[1:])
        loss -= float(of_found[:-1].gather(1, following[:, None]).sum())
        num_followed += len(following)
        divergence += float((of_exact.exp() * (of_exact - of_found)).sum())
        same += float((of_exact.argmax(dim=-1) == of_found.argmax(dim=-1)).sum())
        num += len(ids)
    return {"perplexity": math.exp(loss / num_followed), "divergence": divergence / num, "same_token": same / num}
