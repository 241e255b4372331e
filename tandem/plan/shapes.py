"""The shapes of models: what of them decides how much memory and how much computing they need. Pure but for reading."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.core.config_tree import did_you_mean
from tandem.core.dtypes import kv_head_bytes
from tandem.core.errors import ConfigError
from tandem.core.model_path import text_config
from tandem.core.step_times import ModelSize
from tandem.core.windows import Windows, windows_in, windows_of


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only transformer.

    Attributes:
        hidden: numbers of a token between layers.
        heads, kv_heads, head_dim: of attention: of queries, and of K and V.
        intermediate: numbers within a feed-forward part, or within one of its experts.
        is_gated: the feed-forward part has three matrices, else two.
        is_tied: the output layer is the embedding.
        experts, experts_per_token: of a mixture; 0: there is none.
        shared: numbers within what of a mixture all tokens go through, beside their experts.
        dense_layers, dense_intermediate: layers of a mixture that have no experts, and the numbers within theirs.
        window, full_layers: the last tokens that a token sees in layers with a window, itself included, and how many
            layers see all beside those; 0: all layers see all.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    is_gated: bool = True
    is_tied: bool = False
    experts: int = 0
    experts_per_token: int = 0
    shared: int = 0
    dense_layers: int = 0
    dense_intermediate: int = 0
    window: int = 0
    full_layers: int = 0

    @property
    def windows(self) -> Windows:
        return windows_in(self.window, self.layers, self.full_layers)

    @property
    def num_parameters(self) -> int:
        """Of all matrices; norms and biases are less than a thousandth of them."""
        return self._with_experts(max(1, self.experts))

    @property
    def num_active(self) -> int:
        """That a token is multiplied with: of a mixture those of its experts; the embedding is looked up."""
        embedding = 0 if self.is_tied else self.vocab * self.hidden
        return self._with_experts(max(1, self.experts_per_token)) - embedding

    def _with_experts(self, num: int) -> int:
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        mixed = self.layers - self.dense_layers
        within = mixed * (self.intermediate * num + self.shared) + self.dense_layers * self.dense_intermediate
        feed_forward = (3 if self.is_gated else 2) * self.hidden * within
        router = self.hidden * self.experts
        embeddings = (1 if self.is_tied else 2) * self.vocab * self.hidden
        return self.layers * attention + feed_forward + mixed * router + embeddings

    def kv_bytes_per_token(self, dtype: str) -> int:
        """K and V of one token in all layers."""
        return 2 * self.layers * self.kv_heads * kv_head_bytes(dtype, self.head_dim)

    def weight_bytes(self, bits: float) -> float:
        return self.num_parameters * bits / 8

    def size(self, weight_bits: float, kv_dtype: str) -> ModelSize:
        """As time models take it. Attention is that of its own heads, which may not fill the hidden size."""
        return ModelSize(
            self.num_active,
            self.weight_bytes(weight_bits),
            self.kv_bytes_per_token(kv_dtype),
            self.layers,
            self.heads * self.head_dim,
            self.windows,
        )


KNOWN: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        ModelShape("llama-2-7b", 32, 4096, 32, 32, 128, 11008, 32000),
        ModelShape("llama-2-13b", 40, 5120, 40, 40, 128, 13824, 32000),
        ModelShape("llama-2-70b", 80, 8192, 64, 8, 128, 28672, 32000),
        ModelShape("llama-3-8b", 32, 4096, 32, 8, 128, 14336, 128256),
        ModelShape("llama-3-70b", 80, 8192, 64, 8, 128, 28672, 128256),
        ModelShape("mistral-7b", 32, 4096, 32, 8, 128, 14336, 32000),
        ModelShape("mistral-7b-v0.1", 32, 4096, 32, 8, 128, 14336, 32000, window=4096),
        ModelShape("mixtral-8x7b", 32, 4096, 32, 8, 128, 14336, 32000, experts=8, experts_per_token=2),
        ModelShape("qwen-2.5-7b", 28, 3584, 28, 4, 128, 18944, 152064),
        ModelShape("qwen-2.5-72b", 80, 8192, 64, 8, 128, 29568, 152064),
        ModelShape("gemma-2-9b", 42, 3584, 16, 8, 256, 14336, 256000, is_tied=True, window=4096, full_layers=21),
        ModelShape("gemma-3-27b", 62, 5376, 32, 16, 128, 21504, 262208, is_tied=True, window=1024, full_layers=10),
        ModelShape(
            "gpt-oss-20b",
            24,
            2880,
            64,
            8,
            64,
            2880,
            201088,
            experts=32,
            experts_per_token=4,
            window=128,
            full_layers=12,
        ),
        ModelShape("bloom-176b", 70, 14336, 112, 112, 128, 57344, 250880, is_gated=False, is_tied=True),
    )
}
"""By the names of their publishers, from their `config.json`; of those that see images the text part. Of Mistral 7B the
first version alone has a window."""

# What `config.json` calls them, by age and family.
_NAMES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "intermediate": ("moe_intermediate_size", "intermediate_size", "n_inner"),
    "vocab": ("vocab_size",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "experts_per_token": ("num_experts_per_tok", "moe_k", "moe_topk"),
    "shared": ("shared_expert_intermediate_size",),
    "num_shared": ("n_shared_experts", "moe_num_shared_experts"),  # each as wide as the others
    "dense_layers": ("first_k_dense_replace", "moe_layer_start_index"),
    "dense_intermediate": ("intermediate_size",),
}
# Whose mixtures have one shared expert, whatever the config says.
_ONE_SHARED = ("hunyuan_v1_moe",)
# Families whose feed-forward parts have two matrices.
_PLAIN = (
    "gpt2", "gpt_neox", "gptj", "gpt_bigcode", "bloom", "opt", "phi", "falcon", "starcoder2", "nemotron", "arcee",
    "apertus",
)  # fmt: skip
# Whose output layer is the embedding where the config does not say it.
_TIED = (
    "gpt2", "gpt_bigcode", "bloom", "opt", "gemma", "gemma2", "gemma3_text", "cohere", "cohere2", "smollm3",
    "starcoder2", "ernie4_5", "ernie4_5_moe",
)  # fmt: skip


def find_shape(model: str) -> ModelShape:
    """Of a known name, or of a directory with a `config.json`. Raises `ConfigError`, which names both."""
    if model in KNOWN:
        return KNOWN[model]
    directory = Path(model).expanduser()
    file = directory / "config.json" if directory.is_dir() else directory
    if not file.is_file():
        known = f"{did_you_mean(directory.name, KNOWN)}known: {', '.join(KNOWN)}"
        if directory.is_dir():
            raise ConfigError(
                f"{model} has no config.json; name a checkpoint's directory, or a model; {known}", key="--model"
            )
        raise ConfigError(
            f"{model} is no model that is known here, and no directory with a config.json (nothing is downloaded); "
            f"{known}",
            key="--model",
        )
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as a config.json: {error}", key="--model") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file} must hold an object, not {type(config).__name__}", key="--model")
    return _of_config(directory.name, config)


def _of_config(name: str, config: dict[str, Any]) -> ModelShape:
    config = text_config(config)

    def find(field: str) -> int | None:
        found = (config.get(key) for key in _NAMES[field])
        # Some say it of each layer.
        each = (value[0] if isinstance(value, list) and value else value for value in found)
        return next((value for value in each if isinstance(value, int)), None)

    needed = ("layers", "hidden", "heads", "vocab")
    layers, hidden, heads, vocab = (find(field) for field in needed)
    if layers is None or hidden is None or heads is None or vocab is None:
        missing = ", ".join(" or ".join(_NAMES[field]) for field in needed if find(field) is None)
        raise ConfigError(f"the config.json of {name} does not say {missing}", key="--model")
    for field in _NAMES:
        if (value := find(field)) is not None and value < (field in needed):
            names = " or ".join(_NAMES[field])
            raise ConfigError(f"the config.json of {name} says {value} of {names}: no model has that", key="--model")
    if not (head_dim := find("head_dim") or hidden // heads):
        raise ConfigError(f"the config.json of {name} has more heads than their hidden size, {hidden}", key="--model")
    kind = str(config.get("model_type", ""))
    experts = find("experts") or 0
    num_shared = 1 if kind in _ONE_SHARED else find("num_shared") or 0
    dense_layers = min(layers, find("dense_layers") or 0) if experts else 0
    windows = _windows(name, config, layers)
    return ModelShape(
        name, layers, hidden, heads,
        kv_heads=find("kv_heads") or heads,
        head_dim=head_dim,
        intermediate=find("intermediate") or 4 * hidden,
        vocab=vocab,
        is_gated=kind not in _PLAIN,
        is_tied=bool(config.get("tie_word_embeddings", kind in _TIED)),
        experts=experts,
        experts_per_token=find("experts_per_token") or 0,
        dense_layers=dense_layers,
        dense_intermediate=find("dense_intermediate") or 0 if dense_layers else 0,
        shared=find("shared") or num_shared * (find("intermediate") or 0),
        window=windows.window,
        full_layers=windows.num_full,
    )  # fmt: skip


def _windows(name: str, config: dict[str, Any], layers: int) -> Windows:
    if not isinstance(kinds := config.get("layer_types") or [], list):
        raise ConfigError(f"the config.json of {name} must have a list of layer_types, not {kinds!r}", key="--model")
    try:
        windows = windows_of({**config, "num_hidden_layers": layers})
    except (ArithmeticError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the config.json of {name} says no windows of layers that can be: {error}", key="--model"
        ) from error
    if windows.window < 0 or (windows.window and windows.num_windowed + windows.num_full != layers):
        raise ConfigError(
            f"the config.json of {name} says {windows.window} of sliding_window, and of {layers} layers the kinds of "
            f"{windows.num_windowed + windows.num_full} (layer_types): no model has that",
            key="--model",
        )
    return windows
