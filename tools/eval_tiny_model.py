"""Measure the tiny model and write down what it does: ``eval.json``, ``reference.json`` and the model card.

The recall prompts are drawn from a seed that training never uses, and a prompt counts as right only when greedy
generation writes the asked code.  ``reference.json`` holds greedy continuations that any correct implementation of
the model must reproduce; a prompt is taken only when no choice along its path is nearly a tie, so that rounding
differences between implementations cannot change the text.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import tiny_corpus as corpus
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

DEFAULT_MODEL = Path(__file__).resolve().parent.parent / "tandem" / "models" / "tiny"
EVALUATION_SEED = 20_011
SMALLEST_GAP = 2e-3
Json = dict[str, Any]


class TinyModel:
    """The exported model in float32, with the few calls that the measurements need."""

    def __init__(self, folder: Path, attention: str = "sdpa") -> None:
        """Load the model from its folder, as a user would."""
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
        self.model.eval()

    def encode(self, prompt: str | list[corpus.Message]) -> list[int]:
        """Turn a plain prompt or a conversation into ids."""
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt)["input_ids"])
        text = self.tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: list[int]) -> str:
        """Turn ids into text without special tokens."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def generate(self, ids: list[int], count: int, temperature: float = 0.0) -> list[int]:
        """Continue, greedily or by sampling from torch's global generator."""
        sampling: Json = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        tensor = torch.tensor([ids])
        output = self.model.generate(tensor, attention_mask=torch.ones_like(tensor), max_new_tokens=count, **sampling)
        return [int(token) for token in output[0, len(ids) :]]

    def smallest_gap(self, ids: list[int], continuation: list[int]) -> float:
        """The smallest difference between the two best logits at the chosen tokens of a continuation."""
        with torch.inference_mode():
            logits = self.model(torch.tensor([ids + continuation])).logits[0, len(ids) - 1 : -1]
        best = logits.topk(2).values
        return float((best[:, 0] - best[:, 1]).min())


def recall_prompts(model: TinyModel, seed: int, count: int, shortest: int, longest: int, chat: bool) -> Iterator[Json]:
    """Draw fresh recall prompts whose length in tokens lies between the limits."""
    rng = random.Random(f"evaluation-{seed}-{chat}")
    made = 0
    while made < count:
        target = rng.randint(shortest, longest)
        task = corpus.recall_task(rng, target, rng.randint(3, 6), 1)
        ids = model.encode(task.chat()[:-1] if chat else task.plain_prompt())
        if not shortest <= len(ids) <= longest:
            continue
        made += 1
        code = task.questions[0][2]
        yield {
            "ids": ids,
            "code": code,
            "depth": task.context.index(f"is {code}.") / len(task.context),
            "prompt": task.chat()[:-1] if chat else task.plain_prompt(),
        }


def share(results: Iterable[tuple[float, bool]], edges: list[float]) -> list[Json]:
    """Count the right answers in the buckets between the edges."""
    results = list(results)
    buckets = []
    for low, high in itertools.pairwise(edges):
        hits = [right for value, right in results if low <= value < high]
        buckets.append({"from": low, "to": high, "right": sum(hits), "of": len(hits)})
    return buckets


def measure_recall(model: TinyModel, seed: int, count: int, chat: bool) -> Json:
    """Ask for codes in texts of 400 to 900 tokens and count the right answers."""
    outcomes: list[tuple[int, float, bool]] = []
    for number, task in enumerate(recall_prompts(model, seed, count, 400, 900, chat), 1):
        text = model.decode(model.generate(task["ids"], 16))
        outcomes.append((len(task["ids"]), task["depth"], task["code"] in text))
        print(
            f"\rrecall ({'chat' if chat else 'plain'}): {sum(o[2] for o in outcomes)} right of {number}",
            end="",
            flush=True,
        )
    print()
    return {
        "right": sum(outcome[2] for outcome in outcomes),
        "of": len(outcomes),
        "by_length": share(((length, right) for length, _, right in outcomes), [400, 500, 600, 700, 800, 901]),
        "by_depth": share(((depth, right) for _, depth, right in outcomes), [0.0, 0.2, 0.4, 0.6, 0.8, 1.01]),
    }


def measure_text_loss(model: TinyModel, seed: int, count: int) -> float:
    """The mean loss per token on fresh stories."""
    rng = random.Random(f"evaluation-text-{seed}")
    total, tokens = 0.0, 0
    with torch.inference_mode():
        for _ in range(count):
            ids = torch.tensor([model.encode(corpus.story(rng))])
            total += float(model.model(ids, labels=ids).loss) * (ids.shape[1] - 1)
            tokens += ids.shape[1] - 1
    return round(total / tokens, 4)


def write_samples(model: TinyModel) -> list[Json]:
    """Continue a few prompts, some greedily and some by sampling."""
    torch.manual_seed(EVALUATION_SEED)
    prompts: list[str | list[corpus.Message]] = [
        "Once upon a time",
        "One day, a brave mouse",
        "Anna was a little girl.",
        [{"role": "user", "content": "Tell me a story about a fox."}],
        [{"role": "user", "content": "Hello!"}],
        [{"role": "user", "content": "What colour is the sky?"}],
    ]
    samples: list[Json] = []
    for prompt in prompts:
        ids = model.encode(prompt)
        for temperature in (0.0, 0.7):
            text = model.decode(model.generate(ids, 200, temperature))
            samples.append({"prompt": prompt, "temperature": temperature, "text": text})
            title = prompt if isinstance(prompt, str) else prompt[-1]["content"]
            print(f"\n[{title} | temperature {temperature}]\n{text}")
    return samples


def reference_candidates(model: TinyModel) -> list[tuple[int, list[str | list[corpus.Message]]]]:
    """Groups of prompts, of each of which some are wanted, with the better known ones first."""
    recall = [task["prompt"] for task in recall_prompts(model, EVALUATION_SEED + 1, 8, 560, 640, False)]
    chat_recall = [task["prompt"] for task in recall_prompts(model, EVALUATION_SEED + 1, 8, 280, 340, True)]
    stories: list[str | list[corpus.Message]] = [
        "Once upon a time",
        "Tom was a brave boy.",
        "One day, a little fox named Ruby",
        "Long ago,",
        "Lily went to the park.",
        "There once was a shy owl",
        "In a small house near the river lived",
        "It was a sunny day.",
        "Ben found an old map.",
    ]
    chats: list[str | list[corpus.Message]] = [
        [{"role": "user", "content": f"Tell me a story about {animal}."}]
        for animal in ("a cat", "a dog", "a rabbit", "an owl", "a bear", "a mouse")
    ]
    return [(3, stories), (1, list(recall)), (1, chats), (1, list(chat_recall))]


def make_references(folder: Path, tokens: int) -> Json:
    """Collect greedy continuations that are safe from rounding differences."""
    model = TinyModel(folder, "eager")
    entries: list[Json] = []
    for wanted, prompts in reference_candidates(model):
        found: list[Json] = []
        for prompt in prompts:
            ids = model.encode(prompt)
            continuation = model.generate(ids, tokens)
            gap = model.smallest_gap(ids, continuation)
            if gap <= SMALLEST_GAP:
                continue
            kind = "prompt" if isinstance(prompt, str) else "messages"
            found.append(
                {
                    kind: prompt,
                    "prompt_token_ids": ids,
                    "token_ids": continuation,
                    "text": model.decode(continuation),
                    "finish_reason": "stop" if continuation[-1] == model.tokenizer.eos_token_id else "length",
                    "smallest_logit_gap": round(gap, 5),
                }
            )
            if len(found) == wanted:
                break
        entries += found
    return {
        "about": "Greedy continuations in float32 with eager attention by transformers. token_ids ends with the eos "
        "token when finish_reason is stop; text leaves special tokens out.",
        "max_new_tokens": tokens,
        "entries": entries,
    }


def bucket_table(buckets: list[Json], title: str, percent: bool) -> str:
    """A Markdown table of right answers by bucket."""

    def label(value: float) -> str:
        return f"{100 * min(value, 1):.0f} %" if percent else f"{value:.0f}"

    head = f"| {title} | right | prompts |\n| --- | ---: | ---: |\n"
    rows = []
    for bucket in buckets:
        last = bucket["to"] if percent else bucket["to"] - 1
        rows.append(f"| {label(bucket['from'])} to {label(last)} | {bucket['right']} | {bucket['of']} |\n")
    return head + "".join(rows)


def curve_table(curve: list[Json]) -> str:
    """A Markdown table of at most about fifteen points of the training curve."""
    every = max(1, -(-len(curve) // 15))
    points = [p for i, p in enumerate(curve, 1) if i % every == 0 or i == len(curve)]
    rows = "".join(
        f"| {p['step']} | {p['minutes']:.0f} | {p['length']} | {p['text_loss']:.2f} | {p['recall_loss']:.2f} "
        f"| {p['recall_128']:.2f} | {p['recall_512']:.2f} | {p['recall_900']:.2f} |\n"
        for p in points
    )
    return (
        "| step | minutes | row length | text loss | recall loss | recall at 128 | at 512 | at 900 tokens |\n"
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n" + rows
    )


def model_card(report: Json, config: Json) -> str:
    """Write the model card from the measured numbers, so that the two cannot disagree."""
    run, plain, chat = report["training"], report["recall"]["plain"], report["recall"]["chat"]
    story = next(sample for sample in report["samples"] if sample["temperature"] == 0)
    limits = run["limits"]
    layers, width = config["num_hidden_layers"], config["hidden_size"]
    heads, groups, head = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    return f"""---
language: en
library_name: transformers
pipeline_tag: text-generation
---

# Tandem Tiny

A real, trained, very small language model with the Llama architecture. It exists so that Tandem can be tried, tested
and measured without downloading anything: it writes readable simple English, and it can recall a 4-digit code from
far up in its prompt, which shows at once whether a transferred key/value cache is the right one.

## What it is

- `LlamaForCausalLM`, {run["parameters"]:,} parameters: {layers} layers, hidden size {width}, {heads} query heads
  over {groups} key/value heads of size {head}, tied embeddings, context {config["max_position_embeddings"]:,} tokens.
- Byte-level BPE with {config["vocab_size"]:,} tokens; any UTF-8 text round-trips; every digit is a token of its own.
- Weights are stored in bfloat16 and meant to be computed in float32 (the conversion is exact).
- A chat turn is `<|system|>`, `<|user|>` or `<|assistant|>`, then the text, then `<|eos|>`.
  Everything, chat or not, starts with `<|bos|>`.

## What it is not

- Not for any real use. It knows no facts beyond a handful of sentences in its grammar, and cannot reason or calculate.
- English only, and only the simple English of its own stories; on other text it writes nonsense.
- Not instruction-tuned and not aligned. It repeats the phrases of its grammar, and names or objects can change midway.
- Recall works for codes stated as in its training text (below), not for retrieval in general.

## Data

Every word comes from `tools/tiny_corpus.py`: a grammar for children's stories and short dialogues, and a generator
that hides keyed codes in such stories. No text was downloaded or copied. Keys are {len(corpus.KEYS)} single words.
The format it knows:

```text
... The code for maple is 4821. ... Note: the code for tiger is 9035. ...

Question: What is the code for maple?
Answer: The code for maple is 4821.
```

In a chat the user turn holds the text, an empty line and the question, and the answer is the assistant turn.

## Training

`python tools/train_tiny_model.py --seed {run["seed"]} --steps {limits["steps"]} --minutes {limits["minutes"]:.0f}`:
{run["steps"]:,} steps, {run["tokens"] / 1e6:.1f} million tokens, {run["minutes"]:.0f} minutes on two CPU cores shared
with other work (the clock ended the run; with idle cores the same time gives more steps). Rows of 64 to 2,048 tokens;
AdamW with a peak learning rate of {run["peak_learning_rate"]} and {run["precision"]} matrix products. The recall
answers weigh as much in the loss as all other text together, and in the first {100 * run["guided"]:.0f} % of the run
a few attention heads are shown where to look. "Recall" below is the share of fresh prompts whose whole answer is
right (20 prompts each). As the clock bounds the schedule, a repetition gives a similar model, not the same bits.
{run.get("note", "")}

{curve_table(run["curve"])}
## Measured

`python tools/eval_tiny_model.py`, greedy, float32, {plain["of"]} fresh prompts of 400 to 900 tokens with three to six
codes each: **{plain["right"]} of {plain["of"]}** right as plain text, **{chat["right"]} of {chat["of"]}** in the chat
format. Loss on fresh stories: {report["story_loss"]:.2f} per token.

{bucket_table(plain["by_length"], "prompt tokens (plain text)", False)}
{bucket_table(plain["by_depth"], "depth of the code (plain text)", True)}
A greedy continuation of "{story["prompt"]}":

> {story["text"].strip()}

`reference.json` holds greedy continuations to check an implementation against.
"""


def write_text(path: Path, text: str) -> None:
    """Replace a file in one step."""
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(
        description="Measure the tiny model's recall and writing.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        epilog="example: python tools/eval_tiny_model.py --model build/tiny --prompts 100",
    )
    parser.add_argument(
        "--model", type=Path, default=DEFAULT_MODEL, help="folder of the model; results are written into it"
    )
    parser.add_argument("--prompts", type=int, default=100, help="recall prompts in each format")
    parser.add_argument("--seed", type=int, default=EVALUATION_SEED, help="seed of the fresh prompts")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    parser.add_argument("--reference-tokens", type=int, default=96, help="longest reference continuation")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    report_path = options.model / "eval.json"
    training = json.loads(report_path.read_text(encoding="utf-8"))["training"]
    model = TinyModel(options.model)
    report = {
        "recall": {
            "seed": options.seed,
            "tokens": [400, 900],
            "plain": measure_recall(model, options.seed, options.prompts, chat=False),
            "chat": measure_recall(model, options.seed, options.prompts, chat=True),
        },
        "story_loss": measure_text_loss(model, options.seed, 100),
        "samples": write_samples(model),
        "training": training,
    }
    references = make_references(options.model, options.reference_tokens)
    config = json.loads((options.model / "config.json").read_text(encoding="utf-8"))
    write_text(report_path, json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    write_text(options.model / "reference.json", json.dumps(references, ensure_ascii=False, indent=1) + "\n")
    write_text(options.model / "README.md", model_card(report, config))
    gaps = ", ".join(f"{entry['smallest_logit_gap']:.3f}" for entry in references["entries"])
    print(f"\n{len(references['entries'])} references with smallest gaps {gaps}; story loss {report['story_loss']}")


if __name__ == "__main__":
    main()
