"""What is simulated: a YAML file, of which every key is known and every value possible."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvtransfer.layout import KvFormat, LayoutId
from router.policy.recovery import RecoveryLimits
from router.policy.retry_budget import retry_burst
from router.request.targets import ON_CPU, ON_GPU
from router.request.tenant import Tenant
from tandem.bench.load.sharegpt import Count, by_characters, by_tokenizer
from tandem.bench.load.trace_entry import MOONCAKE_BLOCK
from tandem.bench.load.traces import detect_format, load_trace, read_text, recorded_turns
from tandem.bench.load.workload import poisson_arrivals
from tandem.cluster.supervisor.autoscale import Range, Settings
from tandem.core.config import MOST_SEQS, Config, SloConfig
from tandem.core.config_tree import build, key, read_yaml
from tandem.core.errors import ConfigError
from tandem.core.identity import WORKER_ROLES, Role
from tandem.core.layer_groups import KeptPages
from tandem.core.time_model import GroupSpec, PoolSpec, TimeModel, beside
from tandem.core.tokenizer import Tokenizer
from tandem.sim.conversations import ConversationPlan, closed, drawn_conversations, recorded_conversations
from tandem.sim.cores import Slowdowns
from tandem.sim.faults import Death, FaultShape, SlowLink, parse_fault
from tandem.sim.load import Arrival, Lengths, drawn, of_kinds, of_tenants, recorded
from tandem.sim.shape import ANY_TYPE, KindShape, PoolShape, TenantShape, WorkerType, WorldShape
from tandem.sim.tiers import TierShape
from tandem.worker.limits import Site, scheduler_limits

_GIGA = 1e9
_HEAD = 1 << 16  # characters of a trace, by which it is known


@dataclass(frozen=True)
class BoundsSpec:
    """Between which a pool follows its load."""

    min: int = key(0, "The fewest workers; 0: as many as it begins with.", minimum=0)
    max: int = key(0, "The most workers; 0: as many as it begins with.", minimum=0)


@dataclass(frozen=True)
class PoolsSpec:
    """Pools that follow their load, by the law that ships."""

    prefill: BoundsSpec = field(default_factory=BoundsSpec)
    decode: BoundsSpec = field(default_factory=BoundsSpec)
    start_s: float = key(60.0, "Seconds from when a worker is asked for until it serves.", minimum=0)
    change_s: float = key(0.5, "Seconds in which one that holds nothing changes its role.", minimum=0)


@dataclass(frozen=True)
class NetworkSpec:
    """Ways between processes."""

    gb_per_s: float = key(25.0, "Out of a prefill worker; 10^9 bytes a second.", minimum=0.000001)
    latency_us: float = key(100.0, "Of the last bytes of a handoff.", minimum=0)
    message_us: float = key(500.0, "From the router to a worker, or back.", minimum=0)
    report_ms: float = key(50.0, "A worker that computes tells of itself so often.", minimum=0)
    tells_links: bool = key(True, "Routers hear of slow ways, as they do; false: what it costs if they do not.")
    tells_changes: bool = key(
        False, "One router, too, hears at once that the number of a worker's requests has changed, as several do."
    )


@dataclass(frozen=True)
class NodeSpec:
    """What the tiers below a worker's pool lie on (`tandem.cache`)."""

    host_gb_per_s: float = key(20.0, "Between a worker's card and host memory; 10^9 bytes a second.", minimum=0.001)
    disk_gb_per_s: float = key(3.0, "Of a worker's disk, to read and to write at once.", minimum=0.001)


@dataclass(frozen=True)
class LoadSpec:
    """Requests: of a trace, or drawn."""

    trace: str = key("", "A trace as of `tandem bench run --trace`, relative to this file; empty: they are drawn.")
    tokenizer: str = key("", "Checkpoint that counts the tokens of a trace of texts (ShareGPT), relative to this file.")
    characters_per_token: float = key(0.0, "Instead of a tokenizer: by which texts are counted.", minimum=0)
    block_size: int = key(MOONCAKE_BLOCK, "Tokens of a block that the trace names.", minimum=1)
    limit: int = key(0, "Requests of the trace; 0: all.", minimum=0)
    speed: float = key(1.0, "Times as fast as it was recorded.", minimum=0.001)
    then: tuple[str, ...] = key((), "Traces that follow, each from the last request of the one before on.")
    copies: int = key(1, "Times that each request comes; but for the first up to half a minute off.", minimum=1)
    requests: int = key(1000, "How many are drawn.", minimum=1, maximum=10_000_000)
    rate: float = key(
        10.0, "Requests a second, at random times, that are drawn, or whose trace has no times.", minimum=0.000001
    )
    input_median: float = key(
        1000.0, "Tokens of a prompt that is drawn: lognormal around this.", minimum=1, maximum=1e8
    )
    input_spread: float = key(0.8, "Standard deviation of their logarithm.", minimum=0, maximum=10)
    output_median: float = key(
        200.0, "Tokens of an output that is drawn: lognormal around this.", minimum=1, maximum=1e8
    )
    output_spread: float = key(0.8, "Standard deviation of their logarithm.", minimum=0, maximum=10)
    common_tokens: int = key(0, "Of instructions that all prompts that are drawn begin with.", minimum=0)
    conversations: int = key(
        0, "How many are drawn instead; then inputs are what users say.", minimum=0, maximum=10_000_000
    )
    turns: float = key(6.0, "Turns of a conversation that is drawn: lognormal around this.", minimum=1, maximum=1000)
    turns_spread: float = key(0.0, "Standard deviation of their logarithm.", minimum=0, maximum=10)
    think_time_s: float = key(0.0, "Mean pause between an answer and the next turn, exponential.", minimum=0)
    concurrency: int = key(0, "Users with one conversation after the other; 0: these begin at `rate`.", minimum=0)
    closed: bool = key(False, "A turn of a trace's conversations does not come before the one before has its answer.")
    names_sessions: bool = key(False, "Requests say of which conversation they are (`session_id`).")

    def __post_init__(self) -> None:
        if self.trace and self.conversations:
            raise ConfigError("a trace has its own conversations (closed): leave one out", key="load.conversations")
        if self.closed and not self.trace:
            raise ConfigError("is about the conversations of a trace: name one (load.trace)", key="load.closed")
        if self.concurrency and not (self.conversations or self.closed):
            raise ConfigError("is of users that hold conversations: say how many", key="load.concurrency")
        if self.tokenizer and self.characters_per_token:
            raise ConfigError("one of both counts texts: leave one out", key="load.characters_per_token")
        of_traces = {
            "limit": self.limit > 0, "speed": self.speed != 1, "then": self.then, "copies": self.copies > 1,
            "tokenizer": self.tokenizer, "characters_per_token": self.characters_per_token > 0,
            "block_size": self.block_size != MOONCAKE_BLOCK,
        }  # fmt: skip
        if not self.trace and (given := [name for name, is_given in of_traces.items() if is_given]):
            raise ConfigError(
                f"load.{given[0]} is of traces, and these requests are drawn; name a trace with load.trace, or leave "
                "it out",
                key=f"load.{given[0]}",
            )


@dataclass(frozen=True)
class TenantSpec:
    """Whose requests some are."""

    name: str = key("", "What the tenant is called.")
    share: float = key(1.0, "Of the requests, beside the shares of the other tenants.", minimum=0, maximum=1e9)
    weight: float = key(1.0, "What it is to get beside others, as in the file of keys.", minimum=0.001, maximum=1000)
    priority: int = key(0, "Of its requests; lower goes first.", minimum=-1000, maximum=1000)
    requests_per_minute: int = key(0, "As in the file of keys; 0: any number.", minimum=0)
    tokens_per_minute: int = key(0, "Of prompts and answers, as in the file of keys; 0: any number.", minimum=0)


@dataclass(frozen=True)
class ClassSpec:
    """What some of the requests ask for: as fields of their bodies."""

    name: str = key("", "What the class is called.")
    share: float = key(1.0, "Of the requests, beside the shares of the other classes.", minimum=0, maximum=1e9)
    priority: int = key(0, "Lower goes first; below 0 only prefill computes prompts.", minimum=-1000, maximum=1000)
    timeout: float = key(0.0, "Seconds, then it fails; refused where that cannot be met. 0: none.", minimum=0)
    slo: SloConfig = field(default_factory=SloConfig)


@dataclass(frozen=True)
class Scenario(TimeModel):
    """All that a simulation needs."""

    pools: PoolsSpec = field(default_factory=PoolsSpec)
    cores: Slowdowns = field(default_factory=Slowdowns)
    network: NetworkSpec = field(default_factory=NetworkSpec)
    node: NodeSpec = field(default_factory=NodeSpec)
    load: LoadSpec = field(default_factory=LoadSpec)
    faults: tuple[str, ...] = key(
        (),
        "Workers that die, and when: decode-0@30 does 30 s after the beginning; ways that become slow: that of "
        "prefill-0@30=0.1 keeps a tenth of its bandwidth.",
    )
    tenants: tuple[TenantSpec, ...] = key((), "Whose requests they are, by chance; empty: all are of one tenant.")
    classes: tuple[ClassSpec, ...] = key((), "What requests ask for, by chance; empty: all ask for the same.")
    refuses: bool = key(False, "The router refuses requests of an overload, as it does; false: whoever comes waits.")
    tandem: Config = field(default_factory=Config)
    seed: int = key(0, "Of what is drawn.", minimum=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_names("tenants", self.tenants)
        _check_names("classes", self.classes)

    def shape(self, load: Sequence[Arrival] = ()) -> WorldShape:
        """The cluster. Of `tandem`, which has the keys of a `tandem.yaml`, counts what docs/simulator.md names. `load`:
        what it is to serve; where no prompts of it are known to begin alike, workers keep no pages of them."""
        config, network = self.tandem, self.network
        ttft_s, tpot_s = ON_CPU if self.on_cpu(self.decode) else ON_GPU
        return WorldShape(
            prefill=self._pool(Role.PREFILL, self.prefill),
            decode=self._pool(Role.DECODE, self.decode),
            kv_format=self._kv_format,
            times=self.step_times(self.decode.type),
            bytes_per_s=network.gb_per_s * _GIGA,
            latency_s=network.latency_us * 1e-6,
            message_s=network.message_us * 1e-6,
            report_s=network.report_ms * 1e-3,
            mixed_pool_tokens=config.scheduling.mixed_pool_tokens,
            start_s=self.pools.start_s,
            look_s=config.transport.heartbeat_s,
            flexible=config.pools.flexible,
            change_s=self.pools.change_s,
            ttft_s=config.slo.ttft_ms / 1000 or ttft_s,
            tpot_s=config.slo.tpot_ms / 1000 or tpot_s,
            settings=Settings(config.pools.utilisation, config.pools.shrink_delay_s),
            slowdowns=self.cores if self.cores != Slowdowns() else None,
            faults=self._faults,
            prefix_cache=config.cache.prefix_cache and any(arrival.begins_like_others for arrival in load),
            tiers=self._tiers,
            names_sessions=self.load.names_sessions,
            tenants={tenant.name: _tenant(tenant) for tenant in self.tenants},
            kinds={one.name: _kind(one) for one in self.classes},
            ageing_s=config.scheduling.priority_ageing_s,
            max_waiting=config.scheduling.max_queued_requests if self.refuses else None,
            changed=self._changed if config.pools.flexible else {},
            num_routers=config.pools.routers,
            tells_changes=network.tells_changes,
            seed=self.seed,
        )

    @property
    def _faults(self) -> FaultShape:
        limits, scheduling = self.tandem.limits, self.tandem.scheduling
        faults = [parse_fault(text) for text in self.faults]
        slow = tuple(fault for fault in faults if isinstance(fault, SlowLink))
        senders = [f"{Role.PREFILL.value}-{number}" for number in range(self.prefill.num_workers)]
        for link in slow:
            if link.worker not in senders:
                raise ConfigError(
                    f"faults has a slow way out of {link.worker!r}, and must name a prefill worker that is there from "
                    f"the start: {', '.join(senders) or 'there is none'}",
                    key="faults",
                )
        return FaultShape(
            tuple(fault for fault in faults if isinstance(fault, Death)),
            slow,
            RecoveryLimits(limits.max_attempts, scheduling.local_prefill_tokens, limits.wait_for_worker_s),
            limits.retry_budget,
            retry_burst(scheduling.max_num_seqs or MOST_SEQS),
            limits.wait_for_worker_s,
            tells_links=self.network.tells_links,
        )

    @property
    def _tiers(self) -> TierShape | None:
        cache, node = self.tandem.cache, self.node
        if self._kept.is_mixed or not (cache.host_bytes or cache.disk_path):
            return None
        disk_bytes = cache.disk_bytes if cache.disk_path else 0
        return TierShape(cache.host_bytes, disk_bytes, node.host_gb_per_s * _GIGA, node.disk_gb_per_s * _GIGA)

    @property
    def _kept(self) -> KeptPages:
        cache = self.tandem.cache
        return self.kept_pages(cache.page_size, mixed=cache.mixed_windows)

    @property
    def _kv_format(self) -> KvFormat:
        model, kept = self.model, self._kept
        layout = LayoutId(
            "0" * 64, model.kv_dtype, kept.num_layers, model.kv_heads, model.head_dim, kept.groups.page_size,
            window=kept.groups.window, num_windowed=kept.groups.num_windowed,
        )  # fmt: skip
        return KvFormat(layout, "simulated")

    def num_pages(self, group: PoolSpec | GroupSpec) -> int:
        """Of each of its workers."""
        return max(1, self._kept.num_pages(self.tokens(group)))

    def most_tokens(self, group: PoolSpec | GroupSpec) -> int:
        """Of the longest text that one of its workers keeps."""
        return self._kept.groups.most_tokens(self.num_pages(group), self.tandem.scheduling.chunk_size)

    def _pool(self, role: Role, pool: PoolSpec) -> PoolShape:
        first, *others = (self._group(role, group) for group in pool.groups)
        return replace(first, bounds=self._bounds(role, pool), others=tuple(others))

    def _group(self, role: Role, group: PoolSpec | GroupSpec) -> PoolShape:
        kept, num_pages = self._kept, self.num_pages(group)
        site, groups = Site(role, on_cpu=self.on_cpu(group)), kept.groups
        limits = scheduler_limits(self.tandem, site, kept.num_slots(num_pages), groups.window, groups.num_windowed)
        return PoolShape(
            group.workers,
            num_pages,
            replace(limits, queue_bound=sys.maxsize),  # a real worker refuses beyond its bound; here all wait
            times=self.step_times(group.type) if group.type else None,
            type=self._type(group.type),
        )

    def _type(self, name: str) -> WorkerType:
        return WorkerType(name, self.types[name].price, self.types[name].power) if name else ANY_TYPE

    @property
    def _changed(self) -> dict[tuple[Role, str], PoolShape]:
        """Workers of either pool in the other role: with the room that they had."""
        return {
            (other, group.type): self._group(other, group)
            for role, other in (WORKER_ROLES, reversed(WORKER_ROLES))
            for group in self.pool(role).groups
            if group.type
        }

    def _bounds(self, role: Role, pool: PoolSpec) -> Range:
        spec: BoundsSpec = getattr(self.pools, role)
        num = pool.num_workers
        found = Range(spec.min or num, spec.max or num)
        if not found.least <= num <= found.most:
            raise ConfigError(
                f"{role}.workers is {num}, and pools.{role} goes from {found.least} to {found.most}; "
                "begin with as many as it may have",
                key=f"pools.{role}",
            )
        if not num and found.follows_load:
            raise ConfigError(
                f"{role}.workers is 0, and pools.{role} goes up to {found.most}; begin with one, or leave it out where "
                "decode workers are to compute all prompts",
                key=f"{role}.workers",
            )
        return found


def _check_names(what: str, each: Sequence[TenantSpec | ClassSpec]) -> None:
    names = [one.name for one in each]
    if "" in names or len(set(names)) < len(names):
        raise ConfigError(f"{what} have the names {', '.join(map(repr, names))}; give each its own", key=what)
    if each and not any(one.share for one in each):
        raise ConfigError(f"none of the {what} has a share of the requests; give one some", key=what)


def _tenant(spec: TenantSpec) -> TenantShape:
    limits = spec.requests_per_minute, spec.tokens_per_minute
    return TenantShape(Tenant(spec.name, spec.name, spec.name, True, None, *limits, spec.weight), spec.priority)


def _kind(spec: ClassSpec) -> KindShape:
    return KindShape(spec.priority, spec.timeout or None, spec.slo.ttft_ms, spec.slo.tpot_ms)


def read_scenario(path: Path) -> Scenario:
    """Raises `ConfigError`, which names file and key."""
    try:
        return beside(path, build(Scenario, read_yaml(path, "FILE")))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", key=error.key) from error


def arrivals(scenario: Scenario, directory: Path) -> list[Arrival]:
    """The load; traces are named relative to `directory`. Raises `ConfigError`."""
    load = scenario.load
    came = _of_traces(scenario, directory) if load.trace else _drawn(scenario)
    shares = {tenant.name: tenant.share for tenant in scenario.tenants}
    came = of_tenants(came, shares, scenario.seed) if shares else came
    of_classes = {one.name: one.share for one in scenario.classes}
    return of_kinds(came, of_classes, scenario.seed) if of_classes else came


def _of_traces(scenario: Scenario, directory: Path) -> list[Arrival]:
    load, seed = scenario.load, scenario.seed
    files = [("load.trace", directory / load.trace), *(("load.then", directory / name) for name in load.then)]
    of_texts = [detect_format(read_text(path, name, _HEAD), path, name) == "sharegpt" for name, path in files]
    if not any(of_texts) and (load.tokenizer or load.characters_per_token):
        name = "tokenizer" if load.tokenizer else "characters_per_token"
        raise ConfigError(
            f"load.{name} counts texts, and {load.trace} has none, but lengths; leave it out", key=f"load.{name}"
        )
    tokenizer = Tokenizer.from_dir(directory / load.tokenizer) if load.tokenizer else None
    count = _count_of(load, tokenizer) if any(of_texts) else None
    limit = load.limit or None
    if load.closed and any(of_texts):
        if len(files) > 1 or load.copies > 1:
            raise ConfigError(
                "then and copies are of requests that come at their times, and these are turns of conversations; leave "
                "them out, or closed",
                key="load.closed",
            )
        assert count is not None
        most = _most_tokens(scenario)
        each = [
            [turn for index, turn in enumerate(turns) if not index or sum(turn) <= most]
            for turns in recorded_turns(files[0][1], count, limit, "load.trace")
        ]
        return recorded_conversations(each, load.rate * load.speed, load.think_time_s, load.concurrency, seed)
    if load.concurrency:
        raise ConfigError(
            "is of users that hold conversations as they go, and this trace has its own times: leave it out",
            key="load.concurrency",
        )
    found = []
    for number, (name, path) in enumerate(files):
        entries = load_trace(
            path, limit=limit, tokenizer=tokenizer, count=count, block_size=load.block_size, key=name
        )  # fmt: skip
        if of_texts[number]:
            times = poisson_arrivals(len(entries), load.rate, f"{seed}:{number}")
            entries = [replace(one, arrival_s=at_s) for one, at_s in zip(entries, times, strict=True)]
        found.append(entries)
    came = recorded(found, load.speed, load.copies, seed)
    return closed(came) if load.closed else came


def _most_tokens(scenario: Scenario) -> int:
    """Of a text, for which all workers have room."""
    groups = [group for role in WORKER_ROLES for group in scenario.pool(role).groups if group.workers]
    return min(scenario.most_tokens(group) for group in groups)


def _count_of(load: LoadSpec, tokenizer: Tokenizer | None) -> Count:
    if tokenizer is not None:
        return by_tokenizer(tokenizer)
    if load.characters_per_token:
        return by_characters(load.characters_per_token)
    raise ConfigError(
        f"{load.trace} holds texts; name the checkpoint that counts their tokens with load.tokenizer, or say how many "
        "characters one has with load.characters_per_token (about 4 in English)",
        key="load.tokenizer",
    )


def _drawn(scenario: Scenario) -> list[Arrival]:
    load, seed = scenario.load, scenario.seed
    inputs, outputs = Lengths(load.input_median, load.input_spread), Lengths(load.output_median, load.output_spread)
    if not load.conversations:
        return drawn(load.requests, load.rate, inputs, outputs, seed, load.common_tokens)
    plan = ConversationPlan(
        load.conversations,
        Lengths(load.turns, load.turns_spread),
        inputs,
        outputs,
        load.think_time_s,
        load.concurrency,
        load.rate,
        load.common_tokens,
        most_tokens=_most_tokens(scenario),
    )
    return drawn_conversations(plan, seed)
