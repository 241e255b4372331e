"""From a checkpoint directory to a model, and what can be known of both."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as hf_logging

from tandem.core import windows
from tandem.core.dtypes import KV_DTYPES
from tandem.core.errors import ConfigError, ModelLoadError, TandemError, UnsupportedModelError
from tandem.core.model_path import has_other_parts, is_of_other_part, positions_of
from tandem.core.pooling import Pooling, PoolingTask
from tandem.core.tokenizer import Tokenizer
from tandem.core.windows import Windows
from tandem.engine.arena import TORCH_DTYPES
from tandem.engine.attention.interface import ATTENTION_NAME
from tandem.engine.layout import KVLayout
from tandem.engine.pooling_model import PoolingModel
from tandem.engine.quantized.loading import (
    check_all_is_understood,
    is_unpacked,
    scheme_of,
    to_be_loaded,
    to_be_unpacked,
)
from tandem.engine.quantized.shapes import WITHOUT_MEANING
from tandem.engine.quantized.stored_linear import StoredLinear
from tandem.engine.text_part import TENSOR_NAMES, text_part

# Says where a model comes from or how it is run, not what it computes.
_CONFIG_NOISE = frozenset(
    {
        "_name_or_path",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "architectures",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
    }
)

_log = logging.getLogger(__name__)

#: What weights of linear layers can be rounded to when they are loaded, and its bits.
QUANTIZED = {"int8": 8, "int4": 4}

_HASH_CHUNK_BYTES = 64 << 20

# Buffers of older files that models make by themselves: tables of RoPE, masks and positions.
_MADE_BY_ITSELF = re.compile(
    r"(^|\.)(rotary_emb\.(inv_freq|cos_cached|sin_cached)|position_ids|(attn|attention)\.(bias|masked_bias))$"
)
# Of what a checkpoint does beside what it is loaded for, which changes nothing of that: for training, or another task.
_OTHER_HEADS = ("lm_head", "score", "v_head")
_MOST_NAMED = 5


def load_config(model_dir: str | os.PathLike[str]) -> PreTrainedConfig:
    """Read `config.json`; of a checkpoint that is composed of several models, what it says of the text part.

    Raises `ModelLoadError` where there is none or it is not understood, `UnsupportedModelError` where what it describes
    cannot be served.
    """
    path = Path(model_dir)
    if not path.is_dir():
        raise ModelLoadError(f"{path} is not a directory; a model is a directory in the Hugging Face layout")
    if not (path / "config.json").is_file():
        raise ModelLoadError(f"{path} has no config.json; a model is a directory in the Hugging Face layout")
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ModelLoadError(f"cannot read {path / 'config.json'}: {error}") from error
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{config.model_type} is an encoder-decoder; only decoder-only models are served")
    part = text_part(config)
    if part is not config:
        _log.info("%s: the text part of %s is served, as %s", path, config.model_type, part.model_type)
    return part


#: Products of bfloat16, as `Types.multiplied` calls them. Those of attention are too, where heads and pages fit.
SHORT, SHORT_IN_TILES = "bfloat16", "bfloat16 in tiles"


@dataclass(frozen=True)
class Types:
    """Names of torch's types, without `torch.`; of `multiplied`, also `SHORT_IN_TILES`.

    Attributes:
        computed: of all that is computed; but of what linear layers multiply, see `multiplied`. K and V in the pages
            may have fewer bits, see `choose_kv_dtype`.
        stored: of the weights in memory. Fewer bits than `computed` has are widened on the way.
        multiplied: of both factors in linear layers, and in attention where heads and pages fit; sums are of
            `computed`. `SHORT_IN_TILES` is bfloat16, too, whose products are added up in another order.
        quantized: `int8` or `int4`: to whole numbers of so many bits the weights of linear layers are rounded once they
            are in memory; empty: they stay.
        only_stored: but those of linear layers stay that do not come quantised.
    """

    computed: str
    stored: str
    multiplied: str
    quantized: str = ""
    only_stored: bool = False

    @property
    def widens(self) -> bool:
        """Whether weights have fewer bits in memory than they are multiplied in, and become as many for few rows: in
        tiles they do so once for many."""
        if self.quantized:
            return not self.in_tiles
        return self.multiplied == "float32" and self.stored != "float32"

    @property
    def multiplies_short(self) -> bool:
        """Whether both factors are bfloat16, whatever else is computed in."""
        return bool(self.products)

    @property
    def in_tiles(self) -> bool:
        """Whether many rows are multiplied at once."""
        return self.multiplied == SHORT_IN_TILES

    @property
    def products(self) -> str:
        """How bfloat16 is multiplied as it is, in linear layers, and in attention where heads and pages fit; empty: it
        is not."""
        return {SHORT: "by two", SHORT_IN_TILES: "in tiles"}.get(self.multiplied, "")

    @classmethod
    def all_of(cls, dtype: str) -> Types:
        return cls(dtype, dtype, dtype)


def choose_types(
    dtype: str,
    config: PreTrainedConfig,
    device: torch.device,
    *,
    tensors: str,
    quantize: str = "none",
    kept_as: str = "",
    can_widen: bool,
    short_products: Callable[[], str],
) -> Types:
    """What `dtype` means for this checkpoint on this device. Raises `ConfigError`.

    Args:
        tensors: the type of the checkpoint's tensors, whatever its config says: what they hold is to stay.
        quantize: `none`, or how weights are rounded.
        kept_as: of a checkpoint that comes quantised, what those weights are kept as unless `quantize` says it.
        can_widen: linear layers can have weights of 16 bits and compute in float32, on this CPU.
        short_products: asked where bfloat16 may be multiplied as it is: what products of it can be made on this CPU;
            empty: none.
    """
    if dtype not in ("auto", *TORCH_DTYPES):
        raise ConfigError(f"dtype {dtype!r} is not one of auto, {', '.join(TORCH_DTYPES)}", key="dtype")
    if quantize not in ("none", *QUANTIZED):
        raise ConfigError(f"quantize {quantize!r} is not one of none, {', '.join(QUANTIZED)}", key="model.quantize")
    own = str(getattr(config, "dtype", None)).removeprefix("torch.")
    own = own if own in TORCH_DTYPES else "float32"
    stored = tensors if can_widen and tensors in TORCH_DTYPES else "float32"
    asked = own if dtype == "auto" else dtype
    # Unasked only what holds nothing else.
    may_be_short = asked == "bfloat16" and (dtype == "bfloat16" or tensors == "bfloat16")
    if kept_as and (device.type != "cpu" or not can_widen):
        raise UnsupportedModelError(
            f"quantised checkpoints are served on CPUs with fused vector arithmetic, not yet on {device}; take its "
            "plain weights there"
        )
    if quantize != "none" or kept_as:
        if device.type != "cpu" or not can_widen:
            raise ConfigError(
                f"model.quantize rounds weights for CPUs with fused vector arithmetic, not for {device}; leave it out",
                key="model.quantize",
            )
        products = short_products() if may_be_short else ""
        if dtype not in ("auto", "float32") and not products:
            raise ConfigError(
                "weights of fewer than 16 bits are multiplied in float32, or in bfloat16 on CPUs that multiply that "
                f"(AVX512_BF16); leave model.dtype: {dtype} out",
                key="model.dtype",
            )
        only_stored = quantize == "none"
        how = kept_as if only_stored else quantize
        if products:
            return Types("float32", "bfloat16", products, how, only_stored)
        return Types("float32", stored, "float32", how, only_stored)
    if device.type != "cpu":
        return Types.all_of(asked)
    if may_be_short and (products := short_products()):
        return Types("float32", "bfloat16", products)
    if dtype in ("auto", "float32"):
        return Types("float32", stored, "float32")
    return Types.all_of(dtype)


def choose_kv_dtype(dtype: str, types: Types, device: torch.device) -> str:
    """What `cache.dtype` means for a model that is computed so. Raises `ConfigError`."""
    if dtype not in KV_DTYPES:
        raise ConfigError(f"cache.dtype {dtype!r} is not one of {', '.join(KV_DTYPES)}", key="cache.dtype")
    if dtype == "auto":
        return "bfloat16" if types.multiplies_short else types.computed
    if (device.type != "cpu" or dtype == "float32") and dtype != types.computed:
        raise ConfigError(
            f"cache.dtype is {dtype}, but on {device} the pages have the type that is computed in, {types.computed}; "
            "leave cache.dtype out, or set model.dtype",
            key="cache.dtype",
        )
    return dtype


def load_model(
    model_dir: str | os.PathLike[str],
    config: PreTrainedConfig,
    dtype: str,
    device: torch.device,
    pooling: Pooling | None = None,
) -> PreTrainedModel:
    """Load the weights, with Tandem's attention.

    Args:
        pooling: of a checkpoint that does not generate; the model gives what is pooled in place of logits.

    Raises:
        ModelLoadError: a weight is missing or misshapen.
        UnsupportedModelError: a head is not known here, or the model has no place for a tensor of the checkpoint.
    """
    kind: Any = _AUTO_MODELS[pooling.task if pooling is not None else None]
    unpacked = is_unpacked(config)
    if unpacked:
        config = to_be_unpacked(config)
    elif scheme_of(config) is not None:
        config = to_be_loaded(config, Path(model_dir))
    hf_logging.disable_progress_bar()  # a server's log is no terminal
    verbosity = hf_logging.get_verbosity()
    if unpacked or has_other_parts(Path(model_dir)):
        hf_logging.set_verbosity_error()  # it warns of what is so on purpose, and lists all that is not loaded
    try:
        model, report = kind.from_pretrained(
            model_dir,
            config=config,
            dtype=TORCH_DTYPES[dtype],
            attn_implementation=ATTENTION_NAME,
            local_files_only=True,
            trust_remote_code=False,
            key_mapping=TENSOR_NAMES,
            output_loading_info=True,
        )
    except TandemError:
        raise
    except Exception as error:
        raise ModelLoadError(f"cannot load {model_dir}: {type(error).__name__}: {error}") from error
    finally:
        hf_logging.set_verbosity(verbosity)
    unexpected = report.get("unexpected_keys") or ()
    check_all_is_understood(Path(model_dir), model, unexpected)
    # `transformers` fills what it misses with random numbers and only warns.
    for problem in ("missing_keys", "mismatched_keys", "error_msgs"):
        if report.get(problem):
            names = ", ".join(str(name) for name in list(report[problem])[:_MOST_NAMED])
            raise ModelLoadError(f"{model_dir}: {problem.replace('_', ' ')}: {names}")
    _check_all_has_a_place(Path(model_dir), model, unexpected)
    if pooling is not None:
        model = PoolingModel(model.base_model, _head_of(model, pooling))
    if device.type != "cpu":
        model = model.to(device)
    result: PreTrainedModel = model.eval()
    return result


def _check_all_has_a_place(model_dir: Path, model: PreTrainedModel, unexpected: Iterable[str]) -> None:
    """Raises `UnsupportedModelError` where a checkpoint holds more than the model that its config describes: biases or
    layers without which its answers are others.

    `transformers` leaves such tensors out and only warns. What an architecture itself says to leave out, as heads that
    guess further tokens, is not among `unexpected`.
    """
    parts = {name for name, _ in model.named_children()}
    others = tuple(f"{head}." for head in _OTHER_HEADS if head not in parts)
    of_no_part = [
        name
        for name in sorted(unexpected)
        if not _MADE_BY_ITSELF.search(name)
        and name.rpartition(".")[2] not in WITHOUT_MEANING
        and not name.startswith(others)
        and not is_of_other_part(name)
    ]
    if of_no_part:
        names = ", ".join(of_no_part[:_MOST_NAMED])
        more = f" and {len(of_no_part) - _MOST_NAMED} more" if len(of_no_part) > _MOST_NAMED else ""
        raise UnsupportedModelError(
            f"{model_dir}: {type(model).__name__} as config.json describes it has no place for {names}{more}; without "
            "them it would be another model"
        )


def load_stored(
    model_dir: str | os.PathLike[str],
    config: PreTrainedConfig,
    types: Types,
    device: torch.device,
    pooling: Pooling | None = None,
) -> PreTrainedModel:
    """`load_model` with weights as they are stored, and what a model makes by itself as it computes.

    Tables that are in no checkpoint are made in the type that is loaded: in 16 bits they would be others. A model that
    has such ones is loaded as it computes, and then its weights become as short as they were.
    """
    model = load_model(model_dir, config, types.stored, device, pooling)
    kept, computed = model.state_dict().keys(), TORCH_DTYPES[types.computed]
    made = (buffer for name, buffer in model.named_buffers() if name not in kept)
    if not any(_is_shorter(buffer, computed) for buffer in made):
        return model
    del model
    model = load_model(model_dir, config, types.computed, device, pooling)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(TORCH_DTYPES[types.stored])
    return model


def _is_shorter(tensor: torch.Tensor, computed: torch.dtype) -> bool:
    """Whether its numbers are widened to be computed with."""
    return tensor.is_floating_point() and tensor.dtype.itemsize < computed.itemsize


_AUTO_MODELS = {
    None: AutoModelForCausalLM,
    PoolingTask.EMBED: AutoModel,
    PoolingTask.SCORE: AutoModelForSequenceClassification,
}


def _head_of(model: PreTrainedModel, pooling: Pooling) -> nn.Module:
    if pooling.task is PoolingTask.EMBED:
        return nn.Identity()
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear | StoredLinear):
        raise UnsupportedModelError(f"{type(model).__name__} has no linear layer `score`; such heads are not served")
    return head


def derive_layout(config: PreTrainedConfig, page_size: int, dtype: str) -> KVLayout:
    """Read the shape of the KV from a config. Raises `UnsupportedModelError` if it does not say."""
    text = config.get_text_config(decoder=True)
    try:
        num_heads = int(text.num_attention_heads)
        num_kv_heads = getattr(text, "num_key_value_heads", None) or num_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // num_heads
        num_layers = int(text.num_hidden_layers)
    except (AttributeError, TypeError) as error:
        raise UnsupportedModelError(
            f"{config.model_type}: its config does not tell the shape of its KV: {error}"
        ) from error
    return KVLayout(num_layers, int(num_kv_heads), int(head_dim), page_size, dtype)


def vocab_size_of(model: PreTrainedModel) -> int:
    """Return the number of token ids that the model can embed."""
    return int(model.get_input_embeddings().weight.shape[0])


def context_of(config: PreTrainedConfig, requested: int | None) -> int:
    """Return the greatest context in tokens. Raises `ConfigError` if more is requested than the model was made for."""
    text = config.get_text_config(decoder=True)
    limit = positions_of({**text.to_dict(), "max_position_embeddings": getattr(text, "max_position_embeddings", None)})
    if requested is None:
        if limit is None:
            raise ConfigError("the model does not state its greatest context; give max_context", key="max_context")
        return limit
    if requested < 1 or (limit is not None and requested > limit):
        raise ConfigError(f"max_context {requested} is not in [1, {limit}], the model's own limit", key="max_context")
    return requested


def windows_of(config: PreTrainedConfig) -> Windows:
    """Return the windows of its layers."""
    return windows.windows_of(config.get_text_config(decoder=True).to_dict())


def eos_of(model_dir: str | os.PathLike[str], config: PreTrainedConfig) -> tuple[int, ...]:
    """Return the ids that end a text: those of `generation_config.json`, then those of `config.json`; where there are
    none, the token that the tokenizer calls so."""
    ids: list[int] = []
    if (Path(model_dir) / "generation_config.json").is_file():
        try:
            ids += _as_ids(GenerationConfig.from_pretrained(model_dir, local_files_only=True).eos_token_id)
        except Exception as error:
            raise ModelLoadError(f"cannot read generation_config.json in {model_dir}: {error}") from error
    ids += _as_ids(getattr(config.get_text_config(decoder=True), "eos_token_id", None))
    if not ids and (Path(model_dir) / "tokenizer.json").is_file():
        ids += _as_ids(Tokenizer.from_dir(Path(model_dir)).eos_token_id)
    return tuple(dict.fromkeys(ids))


def _as_ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(item) for item in value] if isinstance(value, list | tuple) else [int(value)]


def weights_sha256(model: PreTrainedModel, types: Types) -> str:
    """Return the SHA-256 of all that shapes KV: the config, and names, types, shapes and bytes of the tensors.

    Weights count as numbers of the type that is computed in, also where they are stored in fewer bits. Too much of the
    config costs a shared prefix, too little would share wrongly: so all but known noise counts.
    """
    digest = hashlib.sha256()
    if types.multiplied != types.computed:
        digest.update(f"products and attention of {types.multiplied}\n".encode())
    if types.quantized:
        which = "quantised weights kept as" if types.only_stored else "weights rounded to"
        digest.update(f"{which} {types.quantized}\n".encode())
    config = {key: value for key, value in model.config.to_dict().items() if key not in _CONFIG_NOISE}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    seen: dict[tuple[int, tuple[int, ...]], str] = {}
    computed = TORCH_DTYPES[types.computed]
    for name, tensor in sorted(model.state_dict().items()):
        counts_as = computed if _is_shorter(tensor, computed) else tensor.dtype
        digest.update(f"\n{name} {counts_as} {tuple(tensor.shape)} ".encode())
        place = (tensor.data_ptr(), tuple(tensor.shape))
        if place in seen:  # tied weights
            digest.update(f"= {seen[place]}".encode())
            continue
        seen[place] = name
        flat = tensor.detach().contiguous().reshape(-1)
        num_items = _HASH_CHUNK_BYTES // counts_as.itemsize
        for begin in range(0, flat.numel(), num_items):
            chunk = flat[begin : begin + num_items].to(counts_as).view(torch.uint8)
            digest.update(memoryview(chunk.cpu().numpy()))
    return digest.hexdigest()
