"""Models with random weights, and tokenizers for them: for tests, and for measurements that need a shape only.

Weights are drawn with a standard deviation of 0.2 or more unless told otherwise: models with the usual small initial
weights repeat one token whatever their attention does, and so test nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging as hf_logging

ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt2", "phi")

BOS_ID, EOS_ID = 0, 1
_SPECIAL = ("<bos>", "<eos>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@dataclass(frozen=True)
class ModelSpec:
    """What is asked of a random model; sizes in elements, `sliding_window` and `max_positions` in tokens."""

    arch: str = "llama"
    hidden: int = 64
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2  # GPT-2 shares no KV: it has one for each head
    head_dim: int | None = None  # hidden / heads; GPT-2 and Phi know no other
    intermediate: int = 128
    vocab: int = 320
    max_positions: int = 1024
    sliding_window: int | None = None  # mistral: all layers; qwen2, qwen3, gemma2: see `full_every`
    full_every: int = 2  # one layer of so many sees all; gemma2: of two
    tie: bool = False  # output weights are the embeddings; random ones then mostly repeat the last token
    std: float = 0.2
    seed: int = 0
    dtype: str = "float32"


def make_config(spec: ModelSpec) -> PreTrainedConfig:
    """Return the `transformers` config of `spec`. Raises `ValueError` for what the architecture does not have."""
    if spec.arch not in ARCHITECTURES:
        raise ValueError(f"arch {spec.arch!r} is not one of {', '.join(ARCHITECTURES)}")
    common: dict[str, Any] = {
        "vocab_size": spec.vocab,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": None,
        "tie_word_embeddings": spec.tie,
    }
    if spec.arch == "gpt2":
        sizes = {"n_embd": spec.hidden, "n_layer": spec.layers, "n_head": spec.heads, "n_inner": spec.intermediate}
        return AutoConfig.for_model("gpt2", **common, **sizes, n_positions=spec.max_positions)
    common |= {
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "max_position_embeddings": spec.max_positions,
    }
    if spec.arch != "phi":
        common["head_dim"] = spec.head_dim or spec.hidden // spec.heads
    return AutoConfig.for_model(spec.arch, **common, **_window_options(spec))


def _window_options(spec: ModelSpec) -> dict[str, Any]:
    window = spec.sliding_window
    if spec.arch == "mistral":
        return {"sliding_window": window}
    if spec.arch == "gemma2":
        dim = spec.head_dim or spec.hidden // spec.heads
        options: dict[str, Any] = {"query_pre_attn_scalar": dim, "attn_logit_softcapping": 20.0}
        return options | {"sliding_window": window or spec.max_positions}
    if window is None:
        return {}
    if spec.arch in ("qwen2", "qwen3"):
        is_full = [layer % spec.full_every == spec.full_every - 1 for layer in range(spec.layers)]
        kinds = ["full_attention" if full else "sliding_attention" for full in is_full]
        return {"use_sliding_window": True, "sliding_window": window, "layer_types": kinds}
    raise ValueError(f"{spec.arch} has no sliding window")


def make_model(spec: ModelSpec, config: PreTrainedConfig | None = None) -> PreTrainedModel:
    """Return a model of `spec` (or of `config`) whose every weight is drawn from `spec.seed`.

    Matrices have the standard deviation `spec.std`; vectors (norms, biases) keep their initial value and get a half of
    that as noise.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)  # some vectors are drawn by their class
        model = AutoModelForCausalLM.from_config(config or make_config(spec), dtype=torch.float32)
    generator = torch.Generator().manual_seed(spec.seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * spec.std
            parameter.copy_(noise if parameter.dim() > 1 else parameter + 0.5 * noise)
    result: PreTrainedModel = model.to(getattr(torch, spec.dtype)).eval()
    return result


def make_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of exactly `vocab_size` ids: bytes where they fit, else words `w2`, `w3` and so on.

    The ids above the bytes never come out of text, but have a text, since a random model does choose them.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    has_bytes = vocab_size >= len(_SPECIAL) + len(alphabet)
    words = [*_SPECIAL, *(alphabet if has_bytes else [])]
    words += [f"{'Ġ' if has_bytes else ''}w{index}" for index in range(len(words), vocab_size)]
    vocab = {word: index for index, word in enumerate(words)}
    if has_bytes:
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token=words[-1]))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=_SPECIAL[0], eos_token=_SPECIAL[1])
    fast.chat_template = _CHAT_TEMPLATE
    return fast


def save(spec: ModelSpec, target: Path, config: PreTrainedConfig | None = None) -> Path:
    """Write the checkpoint of `spec` to the directory `target` and return it."""
    model = make_model(spec, config)
    hf_logging.disable_progress_bar()
    model.save_pretrained(target)
    make_tokenizer(model.config.get_text_config().vocab_size).save_pretrained(target)
    return target
