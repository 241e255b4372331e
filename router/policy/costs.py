"""What serving a prompt costs at a worker, or over the way between two: in prompt tokens that a prefill worker could
compute meanwhile. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvtransfer.layout import KvFormat
from router.policy.pool import Order, may_compute
from router.policy.route import RequestFacts, Wishes
from router.policy.snapshot import Snapshot
from router.policy.worker_load import WorkerLoad
from tandem.core.errors import IncompatibleError
from tandem.core.identity import WorkerKey
from tandem.core.pages import pages_for

# What a prompt token costs in a decode step, relative to one in a prefill worker's chunk, at least, and where nothing
# is known of its steps. With a lower factor decode would take prompts for which prefill has time soon.
_SMALL_STEP_COST = 1.2
# By so much more a decode worker that nobody is at may take than prefill: it saves the handoff, and steps are not
# foreseen any better.
_AS_SOON = 1.2
# Prefill's speed, learnt from so many tokens, is known for prompts of so many times as many: what a few took was the
# step rather than they.
_KNOWN_TIMES = 4
# One of whose steps nothing is known is tried with prompts that prefill computes in so many seconds.
_TRIED_S = 2.0
# By what share of a prompt's computation its pages may come later than it ends before another pair is looked for.
_NOTABLE = 0.25
# What it costs to send a token's pages, relative to its computation, where nothing is known of the way: little.
_SENT_COST = 0.05
# Prompt tokens that one more sequence in decode's batch is worth: its rows make the steps of all others longer.
_ROW_COST = 16.0
# A prefill worker that is idle so soon is as good as one that other routers may choose at the same time.
_HARDLY_S = 0.05


def own_cost(snapshot: Snapshot, facts: RequestFacts, worker: WorkerKey) -> float:
    """Of the prompt itself: what the worker does not hold is computed, what it holds in a tier is read where that is
    sooner."""
    num_computed, read = _computed_and_read(snapshot, facts, worker)
    return num_computed + read


def _computed_and_read(snapshot: Snapshot, facts: RequestFacts, worker: WorkerKey) -> tuple[int, float]:
    """Tokens of the prompt that the worker computes, and what those cost that it reads from a tier."""
    num_missing = facts.num_prompt_tokens - facts.prefix.num_ready(worker)
    num_stored, num_near = facts.prefix.num_stored(worker), facts.prefix.num_near(worker)
    if not num_stored:
        return num_missing, 0.0
    near, far = snapshot.read_costs(worker)
    # As the worker decides (`tandem.core.tiers.plan_read`): it reads what comes first as far as that saves most.
    ways = (0, 0.0), (num_near, num_near * near), (num_stored, num_near * near + (num_stored - num_near) * far)
    num_read, read = min(ways, key=lambda way: way[1] - way[0])
    return num_missing - num_read, read


def prefill_cost(snapshot: Snapshot, facts: RequestFacts, worker: WorkerLoad) -> float:
    """Prompt tokens that are computed before the prompt is."""
    return worker.num_queued_tokens + own_cost(snapshot, facts, worker.key)


def send_cost(facts: RequestFacts, worker: WorkerLoad) -> float:
    """Of the pages that it does not hold. What it has in a tier is sent too: no handoff waits for a disk."""
    return _SENT_COST * _num_sent(facts, worker.key, worker.kv_format)


def _num_sent(facts: RequestFacts, decode: WorkerKey, kv_format: KvFormat) -> int:
    """Tokens whose pages go to a decode worker: those that it does not hold, as far as an output sees them."""
    num_missing, layout = facts.num_prompt_tokens - facts.prefix.num_ready(decode), kv_format.layout
    if not layout.window:
        return num_missing
    num_sent = layout.num_sent_pages(facts.num_prompt_tokens) * layout.page_size
    return min(num_missing, num_sent // (1 + layout.num_windowed))


def batch_cost(facts: RequestFacts, worker: WorkerLoad, smallest: int) -> float:
    """What its batch costs beside the smallest one; and what it lacks room for, which has to be waited for."""
    crowd = _ROW_COST * (worker.num_active - smallest)
    return crowd if has_room(worker, facts) else crowd + facts.num_prompt_tokens


def cost_alone(snapshot: Snapshot, facts: RequestFacts, worker: WorkerLoad) -> float:
    """Of what the worker does not hold, computed in its own steps; endless where it may not be."""
    num_left, read = _computed_and_read(snapshot, facts, worker.key)
    if why_not_alone(facts, worker, num_left):
        return math.inf
    return read + steps_cost(snapshot, worker, worker.num_queued_tokens + num_left)


def why_not_alone(facts: RequestFacts, worker: WorkerLoad, num_left: int) -> str:
    """Why a decode worker may not compute the `num_left` tokens that it lacks; empty: it may."""
    if not facts.mixed_pool_tokens:
        return "the mixed pool is off"
    if not may_be_slow(facts):
        return "the request is urgent" if facts.is_first_attempt else "it is tried again, and goes as recovery wants"
    if num_left > facts.mixed_pool_tokens:
        return f"more than {facts.mixed_pool_tokens:.0f} tokens are missing there (scheduling.mixed_prompt_tokens)"
    if not worker.prompt_steps.num_tokens:
        return "the targets of those who generate there leave its steps no time for prompts"
    if not may_compute(worker):
        return "all places in its batch are taken"
    return "" if has_room(worker, facts) else "it has no room for the prompt"


def may_be_slow(facts: RequestFacts) -> bool:
    """Whether a decode worker may compute the prompt beside its batch: neither a retry nor what is urgent."""
    return facts.is_first_attempt and facts.priority >= 0


def steps_cost(snapshot: Snapshot, worker: WorkerLoad, num_tokens: int) -> float:
    """Of so many prompt tokens in the steps of a decode worker that has time and a place."""
    meanwhile = snapshot.prefill_tokens_per_s * worker.prompt_steps.seconds(num_tokens)
    return max(num_tokens if _is_lone(snapshot, worker, num_tokens) else _SMALL_STEP_COST * num_tokens, meanwhile)


def beside_pairs(snapshot: Snapshot, worker: WorkerLoad, num_tokens: float, cost: float) -> float:
    """What the cost of so many prompt tokens at a decode worker counts as beside that of a handoff."""
    return cost / _AS_SOON if _is_lone(snapshot, worker, num_tokens) else cost


def _is_lone(snapshot: Snapshot, worker: WorkerLoad, num_tokens: float) -> bool:
    """Whether a decode worker that nobody is at is as good a place for so many prompt tokens as prefill, if it is as
    quick. Only where both speeds are known, or little is risked: else a slow one could be taken again and again, and
    prefill's speed, which is not seen then, never be put right."""
    if worker.num_active or num_tokens > _KNOWN_TIMES * snapshot.num_prefill_tokens_known:
        return False
    steps = worker.prompt_steps
    return steps.token_s + steps.step_s > 0 or num_tokens <= _TRIED_S * snapshot.prefill_tokens_per_s


def delay_behind(worker: WorkerLoad) -> float:
    """What a prompt at a prefill worker costs those who come behind it: while it waits as many come as wait before it,
    and each of them waits for it, as it does for them."""
    return worker.num_queued_tokens


def delay_beside(snapshot: Snapshot, worker: WorkerLoad, num_tokens: float) -> float:
    """What so many prompt tokens in the steps of a decode worker cost those who generate there, and as `delay_behind`
    those who come behind them."""
    of_token = (snapshot.prefill_tokens_per_s * worker.prompt_steps.token_s) or 1.0
    return of_token * (worker.num_stepping * num_tokens + worker.num_queued_tokens)


def is_late(snapshot: Snapshot, facts: RequestFacts, cost: float) -> bool:
    """Whether a first token that so many prompt tokens go before comes later than it is wanted; not known: no."""
    return cost > facts.first_token_in_s * snapshot.prefill_tokens_per_s > 0


def exposed_tokens(snapshot: Snapshot, facts: RequestFacts, prefill: WorkerLoad, decode: WorkerKey) -> float:
    """How many prompt tokens a prefill worker computes while a handoff goes on after the prompt's own computation.

    Pages travel while the prompt is computed, so only a way that is slower than the computation counts; and only where
    it is so by more than its share of `_NOTABLE`, as else the batches matter more.
    """
    link = snapshot.links.get((prefill.key, decode))
    if link is None or not snapshot.prefill_tokens_per_s:
        return 0.0
    try:
        token_bytes = prefill.kv_format.layout.token_bytes
    except IncompatibleError:  # elements of a later version: how long they take is not known
        return 0.0
    num_sent, num_computed = _num_sent(facts, decode, prefill.kv_format), own_cost(snapshot, facts, prefill.key)
    layout = prefill.kv_format.layout
    if layout.window and not layout.num_windowed:  # of what is before the last ones nothing is sent
        num_computed = min(num_computed, num_sent)
    handoff_s = num_sent * token_bytes / max(link.bytes_per_s, 1.0)
    exposed = handoff_s * snapshot.prefill_tokens_per_s - num_computed
    return exposed if exposed > _NOTABLE * facts.num_prompt_tokens else 0.0


def even_load(snapshot: Snapshot, formats: Sequence[KvFormat]) -> float:
    """Up to how many prompt tokens in front a prefill worker is as good as the least loaded one of these formats."""
    return next(snapshot.prefill.walk(Order.LOAD, formats)).num_queued_tokens + hardly_more(snapshot)


def hardly_more(snapshot: Snapshot) -> float:
    """Up to how many more prompt tokens in front are hardly more: to one router, which knows who is idle, any are."""
    return _HARDLY_S * snapshot.prefill_tokens_per_s if snapshot.share.of > 1 else 0.0


def prefill_rank(
    snapshot: Snapshot, facts: RequestFacts, wishes: Wishes, prefill: WorkerLoad, decode: WorkerKey, even: float
) -> tuple[float, ...]:
    """For this decode worker: a way that works, then wishes, then fewer prompt tokens until all pages are there."""
    delay = max(even, prefill.num_queued_tokens + exposed_tokens(snapshot, facts, prefill, decode))
    is_broken = is_way_broken(snapshot, prefill.key, decode)
    return is_broken, prefill.key in wishes.avoid, prefill.key != wishes.prefill, delay


def decode_class(
    worker: WorkerLoad, facts: RequestFacts, wishes: Wishes, wished_format: KvFormat | None
) -> tuple[bool, bool, bool, bool]:
    """What counts before its load."""
    is_off = wished_format is not None and worker.kv_format != wished_format
    return worker.key in wishes.avoid, worker.key != wishes.decode, is_off, not has_room(worker, facts)


def format_to_pair(snapshot: Snapshot, wishes: Wishes) -> KvFormat | None:
    """That of the wished prefill worker, which is to find a partner."""
    wished = snapshot.prefill.find(wishes.prefill)
    return wished.kv_format if wished is not None and wished.key not in wishes.exclude else None


def has_room(worker: WorkerLoad, facts: RequestFacts) -> bool:
    num_tokens, layout = facts.num_prompt_tokens, worker.kv_format.layout
    num_pages = layout.num_sent_pages(num_tokens) if layout.window else pages_for(num_tokens, worker.page_size)
    return num_pages <= worker.num_available_pages


def is_way_broken(snapshot: Snapshot, prefill: WorkerKey, decode: WorkerKey) -> bool:
    link = snapshot.links.get((prefill, decode))
    return link is not None and link.is_broken
