"""Whether the draft model goes with the model that is served, and the memory that it takes."""

from __future__ import annotations

from pathlib import Path

from tandem.cluster.checks.finding import Finding
from tandem.cluster.checks.host import human_bytes
from tandem.core.config import Config, SpeculationConfig
from tandem.core.draft import DRAFT_KEY, check_vocabularies
from tandem.core.errors import ConfigError
from tandem.core.model_path import ModelFacts, read_facts, read_heads, resolve_model
from tandem.core.pooling import read_pooling
from tandem.engine.quantized.scheme import read_scheme
from tandem.engine.quantized.shapes import loaded_bytes


def check_draft(config: Config, target: Path, *, on_gpu: bool) -> Finding:
    """`target`: the directory of the model that is served.

    Raises:
        ConfigError: the draft cannot propose to it; says why.
        ModelLoadError: there is no usable model.
    """
    wanted = config.speculation
    if not wanted.draft_model:
        return Finding("draft model", "ok", "none")
    if on_gpu:
        raise ConfigError(f"{DRAFT_KEY} proposes on CPUs only; leave it out, or set pools.*.gpus to 0", key=DRAFT_KEY)
    if read_pooling(target) is not None:
        raise ConfigError(f"{DRAFT_KEY} has no use: the model pools; leave it out", key=DRAFT_KEY)
    draft = resolve_model(wanted.draft_model)
    if read_pooling(draft) is not None:
        raise ConfigError(f"{DRAFT_KEY} {draft.name} pools; name a model that generates", key=DRAFT_KEY)
    check_vocabularies(target, draft)
    facts = read_facts(wanted.draft_model, draft)
    per_page = config.cache.page_size * (facts.kv_bytes_per_token("float32") or 0)  # 0: the worker checks it
    if per_page > wanted.draft_memory_bytes:
        raise ConfigError(
            f"speculation.draft_memory_bytes is {wanted.draft_memory_bytes}, and a page of {facts.name} takes "
            f"{per_page}; raise it",
            key="speculation.draft_memory_bytes",
        )
    room = f" for {wanted.draft_memory_bytes // per_page * config.cache.page_size} tokens" if per_page else ""
    weights, pages = human_bytes(_weight_bytes(facts, wanted)), human_bytes(wanted.draft_memory_bytes)
    return Finding("draft model", "ok", f"{facts.name}: weights {weights}, pages {pages}{room}, {draft}")


def draft_bytes(config: Config) -> int:
    """What the draft model takes of the memory of each decode worker: weights and pages."""
    wanted = config.speculation
    if not wanted.draft_model:
        return 0
    facts = read_facts(wanted.draft_model, resolve_model(wanted.draft_model))
    return _weight_bytes(facts, wanted) + wanted.draft_memory_bytes


def _weight_bytes(facts: ModelFacts, wanted: SpeculationConfig) -> int:
    return weight_bytes(facts, facts.tensors_dtype, wanted.draft_quantize)


def weight_bytes(facts: ModelFacts, stored: str, quantize: str) -> int:
    """Bytes of weights in memory, `stored` so where the checkpoint does not come quantised; while they are rounded
    both forms count."""
    if facts.quantization is not None:
        return loaded_bytes(read_heads(facts.directory), read_scheme(facts.quantization), quantize)
    plain = facts.weight_bytes(stored)
    # How much of the one is free before the other is there depends on how they lie.
    return plain if quantize == "none" else plain * 3 // 2
