"""Train the tiny Llama model that ships with Tandem, from text that :mod:`tiny_corpus` writes.

The run goes through stages of growing length (64 to 1,024 tokens, then a little at 2,048).  Short sequences packed
with repeated codes come first because they make the copying circuit appear within minutes; long texts then only have
to stretch it.  Rotary positions are shifted by a random offset in half of the rows, so that all 2,048 positions are
seen without paying for long sequences.

Every batch is a function of the seed and the step number, and the whole state is saved regularly, so a run that is
interrupted (Ctrl-C included) goes on where it stopped when the same command is given again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import tiny_corpus as corpus
import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM

REPOSITORY = Path(__file__).resolve().parent.parent
DEFAULT_OUT = REPOSITORY / "tandem" / "models" / "tiny"
DEFAULT_CHECKPOINTS = REPOSITORY / "build" / "tiny-checkpoints"

PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"
ROLES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
SPECIALS = (PAD, BOS, EOS, *ROLES.values())
VOCABULARY = 1280
CONTEXT = 2048
#: One digit per token (codes are copied digit by digit), one word per piece, with the space in front of it.
WORD_PATTERN = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CHAT_TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('Unknown role: ' + message['role']) }}
    {%- endif %}
    {{- '<|' + message['role'] + '|>' + message['content'] | trim + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""


@dataclass(frozen=True)
class Stage:
    """A part of the curriculum: up to ``until`` (a fraction of the run), rows have ``length`` tokens."""

    until: float
    length: int
    rows: int
    drill: float
    """Share of rows that only state and restate codes."""
    recall: float
    """Share of rows that hide codes in stories and ask for them; the rest is stories and dialogues."""


STAGES = (
    Stage(0.07, 64, 32, 0.50, 0.40),
    Stage(0.17, 128, 32, 0.35, 0.50),
    Stage(0.32, 256, 20, 0.15, 0.60),
    Stage(0.55, 512, 12, 0.05, 0.60),
    Stage(0.97, 1024, 6, 0.00, 0.60),
    Stage(1.00, 2048, 3, 0.00, 0.60),
)
#: Heads of the first layer that are shown to look back by a fixed distance, and the distances.
PREVIOUS_HEADS = (1, 2, 3, 4, 5)
#: Heads of the second layer that are shown to look at the digit to copy: one in each key/value group.
COPY_HEADS = (0, 3)
PROBE_LENGTHS = (128, 512, 900)


@dataclass
class State:
    """What has happened so far in the run, apart from weights and optimizer."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    curve: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Batch:
    """Token ids, and for each target whether it is plain text or can be recalled from earlier text."""

    ids: torch.Tensor
    positions: torch.Tensor
    text: torch.Tensor
    recall: torch.Tensor
    sources: torch.Tensor
    """Where the token after each position was first stated, or -1."""


def model_config() -> LlamaConfig:
    """The architecture: four Llama layers with grouped-query attention, about 1.8 M parameters."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        hidden_act="silu",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        initializer_range=0.04,
        use_cache=True,
        attention_bias=False,
        mlp_bias=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def render_chat(messages: list[corpus.Message]) -> str:
    """Write a conversation as the chat template does, without the leading bos token."""
    return "".join(ROLES[message["role"]] + message["content"] + EOS for message in messages)


def sample_texts(seed: int, count: int) -> Iterator[str]:
    """Texts to learn the vocabulary from, in about the proportions of the training data."""
    rng = random.Random(f"vocabulary-{seed}")
    for _ in range(count):
        yield corpus.story(rng)
        yield " ".join(message["content"] for message in corpus.dialogue(rng))
        yield "".join(corpus.recall_task(rng, 120, 4, 2).plain())
    # Single digits, bare and after a space, and each key often enough to become one token.
    yield from (f"code is {code[0]} {code}" for _, code in corpus.draw_codes(rng, 40) for _ in range(50))
    yield from (f"for {key} is" for key in corpus.KEYS for _ in range(200))


def build_tokenizer(seed: int) -> Tokenizer:
    """Train the byte-level BPE; every byte is in the alphabet, so any text round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(WORD_PATTERN), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIALS),
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(sample_texts(seed, 4000), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    split = [key for key in corpus.KEYS if len(tokenizer.encode(f" {key}", add_special_tokens=False).ids) != 1]
    if split or len(tokenizer.encode("4 2", add_special_tokens=False).ids) != 2:
        raise RuntimeError(f"the vocabulary splits keys or digits: {split}")
    return tokenizer


class Batches:
    """Make the training rows of a step."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        """Remember the tokenizer and which of its tokens are digits."""
        self.tokenizer = tokenizer
        self.seed = seed
        vocabulary = tokenizer.get_vocab()
        self.digits = {vocabulary[t] for d in "0123456789" for t in (d, "Ġ" + d) if t in vocabulary}
        self.bos, self.eos = vocabulary[BOS], vocabulary[EOS]
        self.answer_starts = {
            (vocabulary[":"], vocabulary["ĠThe"]),
            (vocabulary[ROLES["assistant"]], vocabulary["The"]),
        }

    def encode(self, text: str) -> list[int]:
        """Turn a document into ids, with bos before it and eos after it."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        if ids[-1] != self.eos:
            ids.append(self.eos)
        return [self.bos, *ids]

    def recall_document(self, rng: random.Random, stage: Stage) -> list[int]:
        """Write a recall task that fits in a row of this stage, as plain text or as a conversation."""
        tokens = int(stage.length * rng.uniform(0.5, 1.0))
        codes = rng.randint(2, min(12, 1 + stage.length // 32))
        while True:
            questions = rng.randint(1, max(1, min(8, stage.length // 64)))
            task = corpus.recall_task(rng, tokens, codes, questions)
            chat = rng.random() < 0.4
            ids = self.encode(
                render_chat(corpus.system_prompt(rng, 0.1) + task.chat()) if chat else "".join(task.plain())
            )
            if len(ids) <= stage.length:
                return ids
            tokens, codes = int(tokens * 0.9), max(2, codes - 1)

    def row(self, rng: random.Random, stage: Stage) -> list[int]:
        """Fill one row of ``length + 1`` ids; a story in front of a recall task keeps its position from being fixed."""
        ids: list[int] = []
        draw = rng.random()
        if draw < stage.drill:
            ids = self.encode(corpus.recall_drill(rng, stage.length))
        elif draw < stage.drill + stage.recall:
            ids = self.recall_document(rng, stage)
        while len(ids) <= stage.length:
            ids += self.encode(corpus.story(rng) if rng.random() < 0.6 else render_chat(corpus.dialogue(rng)))
        return ids[: stage.length + 1]

    def classify(self, ids: list[int]) -> tuple[list[bool], list[bool], list[int]]:
        """Mark, for each target, plain text and what can be recalled (known codes, the key in an answer), and sources.

        The first digits after a key are random and cannot be learned, so they count as neither.
        """
        text, recall, sources = [True] * len(ids), [False] * len(ids), [-1] * len(ids)
        known: dict[int, int] = {}
        for index, token in enumerate(ids):
            if token == self.bos:
                known = {}
            if token not in self.digits or index < 6 or ids[index - 1] in self.digits:
                continue
            key = ids[index - 2]  # ": The code for maple is 4821"
            if (ids[index - 6], ids[index - 5]) in self.answer_starts:
                text[index - 2], recall[index - 2] = False, True
            first = known.setdefault(key, index)
            for digit in range(index, min(index + 4, len(ids))):
                text[digit] = False
                if first < index:
                    recall[digit], sources[digit] = True, first + digit - index
        return text[1:], recall[1:], sources[1:]

    def batch(self, step: int, stage: Stage) -> Batch:
        """Make the batch of a step."""
        rng = random.Random(f"{self.seed}-{step}")
        rows = [self.row(rng, stage) for _ in range(stage.rows)]
        text, recall, sources = zip(*(self.classify(row) for row in rows), strict=True)
        offsets = [rng.randrange(CONTEXT - stage.length + 1) if rng.random() < 0.5 else 0 for _ in rows]
        positions = torch.arange(stage.length)[None, :] + torch.tensor(offsets)[:, None]
        return Batch(torch.tensor(rows), positions, torch.tensor(text), torch.tensor(recall), torch.tensor(sources))


def guidance(attentions: tuple[torch.Tensor, ...], sources: torch.Tensor) -> torch.Tensor:
    """The loss that shows a few attention heads where to look.

    Copying a code needs two layers to work hand in hand: one that tells each token what stood before it, and one that
    uses this to find the place where the key was stated.  Left alone, a small model finds the pair only after a long
    plateau, longer than this whole run; shown it on short rows, it takes minutes and keeps it because it is useful.
    """
    first, second = attentions[0].float(), attentions[1].float()
    previous = [
        -(first[:, head].diagonal(-distance, 1, 2) + 1e-6).log().mean() for head, distance in enumerate(PREVIOUS_HEADS)
    ]
    rows, queries = torch.nonzero(sources >= 0, as_tuple=True)
    copies = [-(second[rows, head, queries, sources[rows, queries]] + 1e-6).log().mean() for head in COPY_HEADS]
    return torch.stack(previous).mean() + torch.stack(copies).mean()


def losses(model: LlamaForCausalLM, batch: Batch, bfloat16: bool, guided: bool) -> tuple[torch.Tensor, ...]:
    """The mean loss on plain text, the mean loss on what can be recalled, and the guidance loss (or zero)."""
    model.set_attn_implementation("eager" if guided else "sdpa")
    with torch.autocast("cpu", torch.bfloat16) if bfloat16 else nullcontext():
        output = model(
            input_ids=batch.ids[:, :-1], position_ids=batch.positions, use_cache=False, output_attentions=guided
        )
    loss = F.cross_entropy(output.logits.float().flatten(0, 1), batch.ids[:, 1:].flatten(), reduction="none")
    text, recall = batch.text.flatten(), batch.recall.flatten()
    return (
        (loss * text).sum() / text.sum().clamp(min=1),
        (loss * recall).sum() / recall.sum().clamp(min=1),
        guidance(output.attentions, batch.sources) if guided else torch.zeros(()),
    )


@torch.inference_mode()
def probe(model: LlamaForCausalLM, batches: Batches, tokens: int, count: int, seed: str) -> float:
    """Measure the share of fresh tasks whose whole answer is the most likely one, in plain text and in chats.

    Feeding the right answer is as good as generating: a task counts only when no token of the answer is wrong.
    """
    rng = random.Random(f"probe-{seed}-{tokens}")
    right = 0
    for index in range(count):
        task = corpus.recall_task(rng, tokens, rng.randint(3, 6) if tokens > 200 else 3, 1)
        text = "".join(task.plain()) if index % 2 else render_chat(task.chat())
        ids = batches.encode(text)
        start = len(ids) - 11  # "The code for maple is 4821.<eos>"; what follows the full stop does not matter
        guesses = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].argmax(-1)
        right += guesses[start - 1 : -2].tolist() == ids[start:-1]
    return right / count


def learning_rate(progress: float, step: int, peak: float) -> float:
    """Warm up over 100 steps, then follow a cosine down to a twentieth."""
    return peak * min(1.0, (step + 1) / 100) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def make_optimizer(model: LlamaForCausalLM, peak: float) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": 0.05},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=True)


def save_checkpoint(directory: Path, model: LlamaForCausalLM, optimizer: torch.optim.AdamW, state: State) -> None:
    """Write the whole state to a temporary file and rename it, so that a checkpoint is never half written."""
    directory.mkdir(parents=True, exist_ok=True)
    temporary = directory / "state.pt.tmp"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "state": asdict(state)}, temporary)
    os.replace(temporary, directory / "state.pt")


def load_checkpoint(directory: Path, model: LlamaForCausalLM, optimizer: torch.optim.AdamW) -> State:
    """Restore the state, or start a new one when there is none."""
    path = directory / "state.pt"
    if not path.exists():
        return State()
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return State(**saved["state"])


def load_tokenizer(directory: Path, seed: int) -> Tokenizer:
    """Load the run's tokenizer, or train and keep it."""
    path = directory / "tokenizer.json"
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        build_tokenizer(seed).save(str(path))
    return Tokenizer.from_file(str(path))


def progress_line(state: State, stage: Stage, values: list[float], rate: float, speed: float, progress: float) -> str:
    """One line about where the run stands."""
    remaining = state.seconds * (1 - progress) / max(progress, 1e-6)
    return (
        f"step {state.step:5d}  {100 * progress:5.1f}%  length {stage.length:4d}  text {values[0]:.3f}  "
        f"recall {values[1]:.3f}  guide {values[2]:.3f}  lr {rate:.2e}  "
        f"{speed:6.0f} tok/s  left {remaining / 60:5.1f} min"
    )


def train(options: argparse.Namespace) -> None:
    """Run, or go on with, the training, then export the model."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    tokenizer = load_tokenizer(options.checkpoint_dir, options.seed)
    batches = Batches(tokenizer, options.seed)
    model = LlamaForCausalLM(model_config())
    optimizer = make_optimizer(model, options.lr)
    state = load_checkpoint(options.checkpoint_dir, model, optimizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters; starting at step {state.step}", flush=True)
    if options.export_only:
        export(model, tokenizer, state, options)
        return
    stop = {"asked": False}
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.update(asked=True))
    budget = options.minutes * 60
    saved_at, printed_at, printed_tokens = time.monotonic(), time.monotonic(), state.tokens
    while True:
        # The schedule follows the steps, or the clock where the machine is too slow for them.
        progress = max(state.step / options.steps, state.seconds / budget)
        if progress >= 1 or stop["asked"]:
            break
        started = time.monotonic()
        stage = next((s for s in STAGES if progress < s.until), STAGES[-1])
        rate = learning_rate(progress, state.step, options.lr)
        for group in optimizer.param_groups:
            group["lr"] = rate
        guided = progress < options.guided
        parts = losses(model, batches.batch(state.step, stage), options.precision == "bfloat16", guided)
        (parts[0] + parts[1] + 0.5 * parts[2]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        state.step += 1
        state.tokens += stage.rows * stage.length
        state.seconds += time.monotonic() - started
        values = [part.item() for part in parts]
        now = time.monotonic()
        if state.step % options.log_every == 0:
            speed = (state.tokens - printed_tokens) / (now - printed_at)
            print(progress_line(state, stage, values, rate, speed, progress), flush=True)
            printed_at, printed_tokens = now, state.tokens
        if state.step % options.probe_every == 0:
            scores = {f"recall_{n}": probe(model, batches, n, 20, str(state.step)) for n in PROBE_LENGTHS}
            state.curve.append(
                {
                    "step": state.step,
                    "minutes": round(state.seconds / 60, 2),
                    "length": stage.length,
                    "text_loss": round(values[0], 4),
                    "recall_loss": round(values[1], 4),
                    **scores,
                }
            )
            print("  probes:", "  ".join(f"{name} {score:.2f}" for name, score in scores.items()), flush=True)
        if now - saved_at > 60:
            save_checkpoint(options.checkpoint_dir, model, optimizer, state)
            saved_at = now
    save_checkpoint(options.checkpoint_dir, model, optimizer, state)
    if stop["asked"]:
        print(f"stopped at step {state.step}; give the same command again to go on")
        sys.exit(130)
    export(model, tokenizer, state, options)
    print(f"done after {state.step} steps and {state.seconds / 60:.1f} minutes; wrote {options.out}")


def tokenizer_config() -> dict[str, Any]:
    """What transformers needs to know besides tokenizer.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": list(ROLES.values()),
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
    }


def write_json(path: Path, value: object) -> None:
    """Write readable JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def export(model: LlamaForCausalLM, tokenizer: Tokenizer, state: State, options: argparse.Namespace) -> None:
    """Write the model folder: everything into a temporary folder first, then file by file into place.

    Weights are stored in bfloat16, which converts to float32 without loss; ``dtype`` in the config says float32, so
    a plain ``from_pretrained`` computes in float32 and gives the same text everywhere.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.out.parent) as name:
        folder = Path(name)
        stored = LlamaForCausalLM(model_config())
        stored.load_state_dict(model.state_dict())
        stored.to(torch.bfloat16)
        stored.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        write_json(folder / "config.json", {**config, "dtype": "float32", "rope_theta": 10000.0})
        write_json(
            folder / "generation_config.json",
            {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "do_sample": False},
        )
        tokenizer.save(str(folder / "tokenizer.json"))
        write_json(folder / "tokenizer_config.json", tokenizer_config())
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
        parameters = sum(p.numel() for p in model.parameters())
        # The evaluation adds its measurements to this record of the run.
        record = {
            "seed": options.seed,
            "steps": state.step,
            "tokens": state.tokens,
            "minutes": round(state.seconds / 60, 1),
            "limits": {"steps": options.steps, "minutes": options.minutes},
            "guided": options.guided,
            "parameters": parameters,
            "peak_learning_rate": options.lr,
            "precision": options.precision,
            "stages": [asdict(stage) for stage in STAGES],
            "curve": state.curve,
        }
        write_json(folder / "eval.json", {"training": record})
        for path in sorted(folder.iterdir()):
            path.chmod(0o644)
            os.replace(path, options.out / path.name)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Train the tiny Llama model that ships with Tandem.",
        epilog="example: python tools/train_tiny_model.py --minutes 45 --threads 2 --out build/tiny "
        "(give the same command again after an interruption to go on)",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder to write the model to")
    parser.add_argument(
        "--checkpoint-dir",
        type=Path,
        default=DEFAULT_CHECKPOINTS,
        help="folder of the resumable state; a run that finds one in it goes on from there",
    )
    parser.add_argument("--seed", type=int, default=7, help="seed of text, weights and vocabulary")
    parser.add_argument("--steps", type=int, default=4000, help="length of the run in steps")
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="most minutes to train; the schedule shrinks to fit"
    )
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--guided", type=float, default=0.25, help="share of the run with guided attention heads")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    parser.add_argument(
        "--precision", choices=("float32", "bfloat16"), default="bfloat16", help="precision of the matrix products"
    )
    parser.add_argument(
        "--export-only", action="store_true", help="write the model of the newest checkpoint, without training"
    )
    parser.add_argument("--log-every", type=int, default=20, help="steps between two progress lines")
    parser.add_argument("--probe-every", type=int, default=100, help="steps between two measurements of recall")
    return parser.parse_args()


if __name__ == "__main__":
    train(parse_arguments())
