"""From what `model.path` says to a directory with a checkpoint, and the few facts its files tell.

Reads `config.json` and the heads of `*.safetensors`; imports no torch, so the command line stays quick.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from tandem.core.config import EMBEDDED_MODEL
from tandem.core.dtypes import DTYPE_BYTES, kv_head_bytes
from tandem.core.errors import ModelLoadError
from tandem.core.windows import NO_WINDOWS, Windows, windows_of

EMBEDDED_NAME = "tandem-tiny"
ANY_NAME = "*"
_WEIGHTS = "*.safetensors"
_PATTERNS = (_WEIGHTS, "*.json", "*.model", "*.txt", "*.jinja")
"""What `snapshot_download` fetches: weights in safetensors, configuration, tokenizer."""
# Of safetensors, by its names.
_SHORT_TYPES = {"BF16": "bfloat16", "F16": "float16"}
# Ends of the names that quantised layers give their scales.
_SCALES = (".scales", ".weight_scale", ".weight_scale_inv", ".input_scale")
#: Of `quant_method`: experts of 4 bits, as gpt-oss has them, which become bfloat16 when they are loaded.
MXFP4 = "mxfp4"
_MXFP4_NUMBERS = "_blocks"
# What those of the text parts of composites are that are known to rely on them.
_DEFAULTS = {
    "gemma3_text": {
        "hidden_size": 2304, "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256, "vocab_size": 262_208, "max_position_embeddings": 131_072,
    },
    "llama": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048},
}  # fmt: skip
# Of what is not the text part of a checkpoint.
_OTHER_PARTS = re.compile(r"(model\.)?(vision_tower|vision_model|visual|multi_modal_projector)\.")


@dataclass(frozen=True)
class ModelFacts:
    """What the files say; `None` where they do not say it in a way known here.

    Attributes:
        name: the name under which the model is served when the configuration gives none.
        max_positions: tokens of prompt and output together that the model was made for.
        num_parameters, num_bytes: of all tensors in the safetensors files, 0 when there are none.
        tensors_dtype: of all floating-point tensors in these files, whatever the config says; see `tensors_dtype`.
        quantization: what the config says of that, where the checkpoint comes quantised and is not unpacked at once.
        windows: of its layers.
    """

    name: str
    directory: Path
    architecture: str
    dtype: str | None
    max_positions: int | None
    num_layers: int | None
    num_kv_heads: int | None
    head_dim: int | None
    num_parameters: int
    num_bytes: int = 0
    tensors_dtype: str = "float32"
    quantization: dict[str, Any] | None = None
    windows: Windows = NO_WINDOWS

    def kv_bytes_per_token(self, dtype: str) -> int | None:
        """Bytes of K and V of one token in all layers, `None` when the shape is not known."""
        if self.num_layers is None or self.num_kv_heads is None or self.head_dim is None:
            return None
        return 2 * self.num_layers * self.num_kv_heads * kv_head_bytes(dtype, self.head_dim)

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of the weights once loaded as `dtype`."""
        return self.num_parameters * DTYPE_BYTES[dtype]


def resolve_model(path: str, *, with_weights: bool = True) -> Path:
    """The directory of a checkpoint: the embedded one, a directory, or a hub id that is downloaded.

    `with_weights`: it must hold them.

    Raises:
        ModelLoadError: nothing usable there; says what to do.
    """
    if path == EMBEDDED_MODEL:
        return _embedded()
    directory = Path(path).expanduser()
    if directory.is_dir():
        return _checked(directory.resolve(), with_weights)
    if directory.exists():
        raise ModelLoadError(f"{path} is a file; name the directory that holds config.json")
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise ModelLoadError(
            f"there is no directory {path}; name a directory with a transformers checkpoint, "
            f"a hub id such as Qwen/Qwen2.5-0.5B, or `{EMBEDDED_MODEL}`"
        )
    return _checked(_downloaded(path, with_weights), with_weights)


def model_name(path: str, directory: Path) -> str:
    """The model's own name: `tandem-tiny` for the embedded one, else the hub id or the directory's name."""
    if path == EMBEDDED_MODEL:
        return EMBEDDED_NAME
    is_hub_id = not Path(path).expanduser().is_dir()
    return path if is_hub_id else directory.resolve().name


def shown_name(served_names: Iterable[str], own_name: str) -> str:
    """A name to show that requests may use too: the first that is served, the model's own where `*` accepts any."""
    return next((name for name in served_names if name != ANY_NAME), own_name)


def _dtype_said(config: dict[str, Any]) -> Any:
    return config.get("dtype", config.get("torch_dtype"))


def read_facts(path: str, directory: Path) -> ModelFacts:
    """What `directory`'s files tell. Raises `ModelLoadError` when `config.json` is not readable."""
    config = _read_json(directory / "config.json")
    text = text_config(config)
    heads = _first(text, "num_attention_heads", "n_head")
    hidden = _first(text, "hidden_size", "n_embd")
    head_dim = _first(text, "head_dim")
    if head_dim is None and heads and hidden:
        head_dim = hidden // heads
    kv_heads = _first(text, "num_key_value_heads")
    architectures = config.get("architectures") or ["unknown"]
    dtype, tensors = _dtype_said(config) or _dtype_said(text), _unpacked(_of_text(read_heads(directory)))
    return ModelFacts(
        name=model_name(path, directory),
        directory=directory,
        architecture=str(architectures[0]),
        dtype=dtype if dtype in DTYPE_BYTES else None,
        max_positions=positions_of(text),
        num_layers=_first(text, "num_hidden_layers", "n_layer"),
        num_kv_heads=kv_heads if kv_heads is not None else heads,
        head_dim=head_dim,
        num_parameters=sum(math.prod(head.shape) for head in tensors.values()),
        num_bytes=sum(head.num_bytes for head in tensors.values()),
        tensors_dtype=_dtype_of(tensors),
        quantization=_quantization(config),
        windows=_windows(text),
    )


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """What a `config.json` says of the part that reads and writes text, where it is composed of several models.

    Composites leave out what is as their text part's type has it by default; and StarCoder calls one KV head otherwise.
    """
    text = config.get("text_config")
    if isinstance(text, dict):
        return config | _DEFAULTS.get(str(text.get("model_type")), {}) | text
    if config.get("model_type") == "gpt_bigcode" and config.get("multi_query", True):
        return config | {"num_key_value_heads": 1}
    return config


def positions_of(text: Mapping[str, Any]) -> int | None:
    """The greatest context, in tokens, of a model whose `config.json` says this of its text part; `None`: it says none.

    YaRN is asked for by `factor` and the length it stretches, and publishers leave `max_position_embeddings` at that
    length: the longer one of the two holds.
    """
    limit = _first(text, "max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    if limit is None or not isinstance(rope, Mapping) or rope.get("rope_type", rope.get("type")) != "yarn":
        return limit
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings") or limit
    if not isinstance(factor, int | float) or not isinstance(original, int) or not math.isfinite(factor):
        return limit
    return max(limit, int(factor * original))


def is_of_other_part(tensor: str) -> bool:
    """Whether a tensor of this name is of another part of a checkpoint than that which reads and writes text."""
    return _OTHER_PARTS.match(tensor) is not None


def has_other_parts(directory: Path) -> bool:
    """Whether the checkpoint holds tensors of other parts than that which reads and writes text."""
    return any(is_of_other_part(name) for name in read_heads(directory))


def tensors_dtype(directory: Path) -> str:
    """The type of all floating-point tensors of a checkpoint but for those of quantised layers; float32 where they
    differ, or are of another type.

    Raises:
        ModelLoadError: a file is no safetensors file.
    """
    return _dtype_of(_of_text(read_heads(directory)))


def _of_text(heads: dict[str, TensorHead]) -> dict[str, TensorHead]:
    """Without those of the other parts of a checkpoint that is composed of several models, which are not loaded."""
    return {name: head for name, head in heads.items() if not is_of_other_part(name)}


def _unpacked(heads: dict[str, TensorHead]) -> dict[str, TensorHead]:
    """With bfloat16 for experts of MXFP4, of which two numbers lie in a byte, and scales beside them."""
    unpacked = {}
    for name, head in heads.items():
        if name.endswith(_MXFP4_NUMBERS):
            unpacked[name] = TensorHead("BF16", (*head.shape[:-1], 2 * head.shape[-1]))
        elif f"{name.removesuffix('_scales')}{_MXFP4_NUMBERS}" not in heads:
            unpacked[name] = head
    return unpacked


def _dtype_of(heads: dict[str, TensorHead]) -> str:
    types = {
        head.dtype
        for name, head in heads.items()
        if "F" in head.dtype and not head.dtype.startswith("F8") and not name.endswith(_SCALES)
    }
    return _SHORT_TYPES.get(types.pop(), "float32") if len(types) == 1 else "float32"


@dataclass(frozen=True, slots=True)
class TensorHead:
    """Of a tensor in a safetensors file; `dtype` by that format's names."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        bits = re.search(r"\d+", self.dtype)  # of `BOOL` a byte
        return math.prod(self.shape) * (int(bits[0]) if bits else 8) // 8


def read_heads(directory: Path) -> dict[str, TensorHead]:
    """Of all tensors of a checkpoint, by name: of the files that `transformers` reads where others lie beside them.

    Raises:
        ModelLoadError: a file is no safetensors file, or is missing.
    """
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        files = [single]
    elif index.is_file():
        by_name = _read_json(index).get("weight_map")
        if not isinstance(by_name, dict) or not all(isinstance(name, str) for name in by_name.values()):
            raise ModelLoadError(f"{index} has no weight_map from tensors to files; get it anew")
        files = [directory / name for name in sorted(set(by_name.values()))]
    else:
        files = sorted(directory.glob("*.safetensors"))
    return {
        name: TensorHead(tensor["dtype"], tuple(tensor["shape"]))
        for file in files
        for name, tensor in _read_head(file).items()
        if name != "__metadata__"
    }


def _quantization(config: dict[str, Any]) -> dict[str, Any] | None:
    said = config.get("quantization_config")
    if said and not isinstance(said, dict):
        raise ModelLoadError(f"quantization_config in config.json must be an object, not {said!r}")
    return said if said and said.get("quant_method") != MXFP4 else None


def _windows(text: dict[str, Any]) -> Windows:
    """What is not to be understood is left to whoever loads the model: here it counts as none."""
    try:
        windows = windows_of(text)
    except (ArithmeticError, TypeError, ValueError):
        return NO_WINDOWS
    num_layers = windows.num_windowed + windows.num_full
    return windows if windows.window > 0 and num_layers == text.get("num_hidden_layers") else NO_WINDOWS


def _embedded() -> Path:
    directory = Path(str(resources.files("tandem"))) / "models" / "tiny"
    if not (directory / "config.json").is_file():
        raise ModelLoadError(
            f"the embedded model is missing from this installation ({directory}); "
            "reinstall tandem-serving or name another model with --model"
        )
    return directory


def _downloaded(hub_id: str, with_weights: bool) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelLoadError(
            f"there is no directory {hub_id}, and huggingface_hub is not installed to download it; "
            "pip install huggingface_hub, or name a directory"
        ) from error
    patterns = [pattern for pattern in _PATTERNS if with_weights or pattern != _WEIGHTS]
    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns))
    except Exception as error:  # the library raises its own, httpx' and OS errors
        reason = str(error).strip().splitlines()
        raise ModelLoadError(
            f"cannot get {hub_id} from the Hugging Face hub ({type(error).__name__}: {reason[0] if reason else ''}); "
            "check the id, the network and HF_TOKEN, or download it elsewhere and name its directory"
        ) from error


def _checked(directory: Path, with_weights: bool) -> Path:
    if not (directory / "config.json").is_file():
        raise ModelLoadError(f"{directory} holds no config.json; name a directory with a transformers checkpoint")
    if with_weights and not any(directory.glob(_WEIGHTS)):
        raise ModelLoadError(
            f"{directory} holds no *.safetensors; convert the weights with transformers' "
            "save_pretrained(..., safe_serialization=True)"
        )
    return directory


def _read_json(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text())
    except OSError as error:
        raise ModelLoadError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise ModelLoadError(f"{file} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ModelLoadError(f"{file} must hold an object")
    return data


def _first(config: Mapping[str, Any], *names: str) -> int | None:
    return next((config[name] for name in names if isinstance(config.get(name), int)), None)


def _read_head(file: Path) -> dict[str, Any]:
    """What a safetensors file says of its tensors: 8 bytes of length, then JSON."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > file.stat().st_size:
                raise ValueError(f"its head is to have {length} bytes")
            head: dict[str, Any] = json.loads(stream.read(length))
    except (OSError, ValueError, struct.error) as error:
        raise ModelLoadError(f"{file} is not a safetensors file: {error}") from error
    return head
