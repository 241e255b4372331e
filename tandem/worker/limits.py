"""What a worker's role, device and configuration make of the scheduler's limits. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.config import FEWEST_SEQS, MOST_SEQS, Config, TransportConfig
from tandem.core.identity import Role
from tandem.worker.batch import SchedulerLimits

# With fewer waiting prompts the first of a pair waits for the second, and decode hardly gains by it
# (docs/log/experiments.md, 17).
_NUM_TO_PAIR = 4

# A decode step of so many rows takes hardly longer than one of a single row (docs/benchmarks.md, kernels): fewer where
# weights are widened on their way, which then takes longer than to read them; as many as a tile has where there are
# tiles. None on a GPU: its captured steps have one row for each sequence.
_CPU_GUESS_ROWS, _WIDENED_GUESS_ROWS, _TILE_GUESS_ROWS, _GPU_GUESS_ROWS = 12, 5, 16, 0

# Where nothing is configured a batch has as many sequences as there is room for with so many tokens each: with fewer
# places requests wait for one after their first token.
_TOKENS_OF_A_SEQ = 256

# Where a step is bound by compute: on a CPU the products reach their full rate with 16 rows (docs/benchmarks.md); in
# tiles with some hundred (docs/log/experiments.md, 33); for GPUs, what DistServe measured (section 3.1).
_CPU_SATURATING_TOKENS, _TILE_SATURATING_TOKENS = 32, 256
_GPU_SATURATING_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Site:
    """Where a worker computes.

    Attributes:
        on_cpu: it computes on a CPU.
        shares_cores: it shares its CPU threads with the other workers of its node.
        in_tiles: a CPU that multiplies many rows at once.
    """

    role: Role
    on_cpu: bool
    shares_cores: bool = False
    in_tiles: bool = False


def num_to_pair(config: Config, site: Site) -> int:
    """Prompts from which on two are handed off together; 0: always one after the other.

    A decode step costs its core as much for one sequence as for a few, and where the workers share their cores this
    core is prefill's as well, whenever decode rests. With the mixed pool it computes prompts already.
    """
    is_worth_it = site.role is Role.PREFILL and site.shares_cores and not config.scheduling.mixed_pool
    return _NUM_TO_PAIR if is_worth_it else 0


def guess_rows(*, on_cpu: bool, widens: bool, in_tiles: bool) -> int:
    """Rows of a decode step up to which guesses are computed beside its tokens.

    Args:
        widens: weights have fewer bits than they are multiplied in.
        in_tiles: many rows are multiplied at once.
    """
    if not on_cpu:
        return _GPU_GUESS_ROWS
    if in_tiles:
        return _TILE_GUESS_ROWS
    return _WIDENED_GUESS_ROWS if widens else _CPU_GUESS_ROWS


def max_num_seqs(config: Config, num_slots: int) -> int:
    """Sequences in a batch, at most. `num_slots`: tokens for which the worker's pages have room."""
    scheduling = config.scheduling
    if scheduling.max_num_seqs:
        return scheduling.max_num_seqs
    # With more of them than a step has tokens, those at the end would get none until others have ended.
    by_room = max(FEWEST_SEQS, min(MOST_SEQS, num_slots // _TOKENS_OF_A_SEQ))
    return min(by_room, scheduling.max_num_batched_tokens)


def scheduler_limits(
    config: Config, site: Site, num_slots: int, window: int = 0, num_windowed: int = 0
) -> SchedulerLimits:
    """The limits of a worker's batch scheduler. `num_slots`: as of `max_num_seqs`; `window`, `num_windowed`: the
    model's."""
    scheduling = config.scheduling
    on_cpu = _TILE_SATURATING_TOKENS if site.in_tiles else _CPU_SATURATING_TOKENS
    default = on_cpu if site.on_cpu else _GPU_SATURATING_TOKENS
    return SchedulerLimits(
        max_num_seqs=max_num_seqs(config, num_slots),
        max_num_batched_tokens=scheduling.max_num_batched_tokens,
        chunk_size=scheduling.chunk_size,
        queue_bound=scheduling.worker_queue_bound,
        # A decode worker's own grants wait for nobody: only prefill's prompts may hold too much of its pool.
        unpromoted_share=scheduling.unacknowledged_share if site.role is Role.PREFILL else 1.0,
        paced_tokens=scheduling.mixed_step_tokens,
        computes_prompts=site.role is Role.DECODE and scheduling.mixed_pool,
        saturating_tokens=scheduling.saturating_tokens or default,
        num_to_pair=num_to_pair(config, site),
        window=window,
        num_windowed=num_windowed,
    )


def quarantine_cap_pages(transport: TransportConfig, num_pages: int) -> int:
    """More pages than this that stay in quarantine, and the worker is replaced."""
    return max(1, int(transport.quarantine_cap * num_pages))
