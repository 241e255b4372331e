"""The text part of a checkpoint that is composed of several models, served as a model of its own.

Its config is the composite's `text_config`; its tensors are those of the language model, under other names. All else of
the file is not loaded. Without images the positions of Qwen's M-RoPE are the same in each of its three sections, so it
is the plain RoPE, and the text part is a Qwen of its generation.
"""

from __future__ import annotations

from transformers import AutoConfig, PreTrainedConfig

from tandem.core.errors import UnsupportedModelError

#: By the type of the composite: the type of its text part as a model of its own; empty: its own.
COMPOSITES = {
    "gemma3": "gemma3_text",
    "llava": "",
    "mistral3": "",
    "qwen2_5_vl": "qwen2",
    "qwen2_vl": "qwen2",
    "qwen3_vl": "qwen3",
}

#: What tensors of the text part are called in a composite, and in a model of its own; regular expressions.
TENSOR_NAMES = {
    r"^language_model\.lm_head\.": "lm_head.",
    r"^model\.language_model\.": "model.",
    r"^language_model\.model\.": "model.",
}

# Of RoPE in three sections.
_OF_SECTIONS = ("mrope_section", "mrope_interleaved", "type")
# Of the composite alone, or of the type of its text part.
_NOT_OF_TEXT = ("model_type", "architectures", "transformers_version", "vision_config")


def text_part(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of what is served of a checkpoint: of one that is not composed of several models, itself.

    Raises:
        UnsupportedModelError: it is composed of several models, and its text part is not known to stand alone.
    """
    text = config.get_text_config(decoder=True)
    if text is config:
        return config
    if config.model_type not in COMPOSITES:
        known = ", ".join(sorted(COMPOSITES))
        raise UnsupportedModelError(
            f"{config.model_type} is composed of several models; of such the text part is served of {known}"
        )
    if getattr(config, "quantization_config", None):
        raise UnsupportedModelError(
            f"{config.model_type} is composed of several models, and comes quantised; take its plain weights"
        )
    fields = {key: value for key, value in text.to_dict().items() if key not in _NOT_OF_TEXT}
    if rope := fields.get("rope_parameters"):
        fields["rope_parameters"] = {key: value for key, value in rope.items() if key not in _OF_SECTIONS}
    part = AutoConfig.for_model(COMPOSITES[config.model_type] or text.model_type, **fields)
    # What the composite says counts for its head, its type and the end of a text.
    part.tie_word_embeddings = config.tie_word_embeddings
    part.architectures = config.architectures
    if part.dtype is None:
        part.dtype = config.dtype
    if part.eos_token_id is None or getattr(config, "eos_token_id", None) is not None:
        part.eos_token_id = getattr(config, "eos_token_id", None)
    return part
