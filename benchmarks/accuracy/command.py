"""`python -m benchmarks accuracy`: the embedded model in all types, and from checkpoints that come quantised, on texts
that training never saw."""

from __future__ import annotations

import importlib.util
import math
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from rich.console import Console

from benchmarks.accuracy.quantized_checkpoints import write
from benchmarks.accuracy.section import FORMAT, section
from benchmarks.accuracy.ways import CHECKPOINTS, EXACT, WAYS
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
    questions = Questions.make(sizes)

    def hear(name: str) -> None:
        tell(f"{name}: {sizes.num_texts} texts, {sizes.num_recalls} prompts")

    hear(EXACT)
    exact = questions.ask(_load(questions.model_dir, WAYS[EXACT]))
    ways, checkpoints = {EXACT: exact.beside(exact)}, {}
    for name in WAYS:
        if name != EXACT:
            hear(name)
            ways[name] = measure_way(name, questions, exact)
    for name in CHECKPOINTS:
        hear(name)
        checkpoints[name] = measure_checkpoint(name, questions, exact)
    return {
        "format": FORMAT,
        **origin(),
        "settings": asdict(sizes),
        "num_tokens": sum(map(len, questions.texts)),
        "ways": ways,
        "checkpoints": checkpoints,
    }


def measure_way(name: str, questions: Questions, exact: Answers) -> dict[str, Any]:
    """The model in one of `WAYS`, as plain data."""
    return questions.ask(_load(questions.model_dir, WAYS[name])).beside(exact)


def measure_checkpoint(name: str, questions: Questions, exact: Answers) -> dict[str, Any]:
    """The model as one of `CHECKPOINTS`, loaded as a user's is, as plain data. `added` is the divergence of the same
    weights, which a float32 checkpoint has."""
    with tempfile.TemporaryDirectory(prefix="tandem-accuracy-") as directory:
        quantized, same = Path(directory) / "quantized", Path(directory) / "same"
        write(questions.model_dir, CHECKPOINTS[name], quantized, same)
        found = questions.ask(_load(quantized, {}))
        meant = questions.ask(_load(same, WAYS[EXACT]), recall=False)
    return {**found.beside(exact), "added": found.distance(meant)["divergence"]}


def _load(model_dir: Path, options: dict[str, str]) -> Engine:
    return Engine.load(model_dir, num_pages=_NUM_PAGES, **options)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Questions:
    """What every engine is asked.

    Attributes:
        texts: their tokens.
        recalls: prompts that ask for a code in them, and the code.
    """

    model_dir: Path
    tokenizer: Tokenizer
    texts: list[list[int]]
    recalls: list[tuple[list[int], str]]

    @classmethod
    def make(cls, sizes: AccuracySizes) -> Questions:
        """To the embedded model."""
        model_dir = resolve_model(EMBEDDED_MODEL)
        tokenizer, corpus = Tokenizer.from_dir(model_dir), _corpus()
        generator = random.Random(_SEED)
        texts = [tokenizer.encode(corpus.story(generator)) for _ in range(sizes.num_texts)]
        return cls(model_dir, tokenizer, texts, _recalls(tokenizer, corpus, generator, sizes.num_recalls))

    def ask(self, engine: Engine, *, recall: bool = True) -> Answers:
        """`recall`: whether to ask for the codes, too."""
        log_probs = [torch.log_softmax(_logits(engine, text).double(), dim=-1) for text in self.texts]
        recalls = self.recalls if recall else []
        num_recalled = sum(code in self.tokenizer.decode(_answer(engine, ids)) for ids, code in recalls)
        types = {**asdict(engine.types), "pages": engine.layout.dtype}
        return Answers(self.texts, log_probs, num_recalled, types)


@dataclass(frozen=True)
class Answers:
    """Of one engine.

    Attributes:
        log_probs: `[tokens, vocab]` float64 of each text.
        types: of numbers, as `Engine.types`, and of pages.
    """

    texts: list[list[int]]
    log_probs: list[torch.Tensor]
    num_recalled: int
    types: dict[str, Any]

    def beside(self, exact: Answers) -> dict[str, Any]:
        """All as plain data."""
        return {**self.distance(exact), "num_recalled": self.num_recalled, "types": self.types}

    def distance(self, exact: Answers) -> dict[str, float]:
        """How likely the texts are, and how far its distributions are from the exact ones."""
        return _distance(self.texts, exact.log_probs, self.log_probs)


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
