"""What computes the steps of a worker: the model, or a clock in its place."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from tandem.core.config import Config
from tandem.core.identity import Role
from tandem.engine.engine import Engine
from tandem.engine.simulated import SimulatedEngine
from tandem.worker.limits import max_num_seqs

StepEngine: TypeAlias = Engine | SimulatedEngine


def load_engine(
    role: Role,
    config: Config,
    *,
    model_dir: Path,
    kv_bytes: int,
    num_threads: int,
    device: str,
    weight_register: Path | None,
    kept: StepEngine | None = None,
) -> StepEngine:
    """As the configuration has it, and warm.

    Args:
        kv_bytes: of pages; a simulated engine has as many pages as its time model says.
        num_threads, device, weight_register: as of `Engine.load`.
        kept: of an earlier life of this process, perhaps in the other role: it is made ready for this one, and nothing
            is loaded.

    Raises:
        TandemError: the model cannot be served, or memory cannot be had.
    """
    max_context = config.cache.max_context or None
    if config.model.engine == "simulated":
        return SimulatedEngine(
            model_dir,
            Path(config.model.time_model).expanduser(),
            role,
            page_size=config.cache.page_size,
            max_context=max_context,
            mixed=config.cache.mixed_windows,
        )
    if isinstance(kept, Engine):
        if not kept.on_cpu:
            _warm_up(kept, role, config)
        return kept
    engine = Engine.load(
        model_dir,
        dtype=config.model.dtype,
        cache_dtype=config.cache.dtype,
        quantize=config.model.quantize,
        page_size=config.cache.page_size,
        kv_bytes=kv_bytes,
        num_threads=num_threads,
        device=device,
        max_context=max_context,
        weight_register=weight_register,
        kernels=config.model.kernels,
        mixed=config.cache.mixed_windows,
        attention_first=role is Role.DECODE,  # prefill begins with the products of weights
    )
    _warm_up(engine, role, config)
    return engine


def _warm_up(engine: Engine, role: Role, config: Config) -> None:
    generates = role is Role.DECODE and engine.pooling is None
    engine.warmup(max_num_seqs(config, num_slots(engine)) if generates else 0)


def num_slots(engine: StepEngine) -> int:
    """Tokens for which its pages have room; of a mixed model in texts that are within the window."""
    return engine.num_pages // (1 + engine.num_windowed) * engine.layout.page_size
