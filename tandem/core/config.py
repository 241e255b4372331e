"""The configuration: one frozen tree of dataclasses, read from one commented `tandem.yaml`.

Help text, unit and default stand beside each key, here and nowhere else: `tandem.yaml` and the reference in
`docs/configuration.md` are generated from this file by `tools/generate_config_docs.py`.

Checks that need only the values are made here. Checks that need the machine (a free port, enough memory, the
model's own context) are made by `tandem.cluster.checks.preflight` before anything starts.
"""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.core.config_tree import build, read_yaml
from tandem.core.config_tree import key as _key
from tandem.core.dtypes import KV_DTYPES
from tandem.core.errors import ConfigError

EMBEDDED_MODEL = "embedded"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s*?#]+")
_COLLECTOR = re.compile(r"https?://[^/\s]+\S*")

MAX_POOL = 1024
"""Workers of one pool, or routers; a slip of the finger must not fill the supervisor's memory."""

_HEARTBEATS_PER_LEASE = 5


@dataclass(frozen=True)
class ModelConfig:
    """What is served."""

    path: str = _key(EMBEDDED_MODEL, "The model: `embedded`, a directory with a transformers checkpoint, or a hub id.")
    served_names: tuple[str, ...] = _key(
        (), "Names by which requests may ask for the model; empty: the directory's name; `*`: any name."
    )
    dtype: str = _key(
        "auto",
        "Type of weights and arithmetic. `auto` is the checkpoint's own on a GPU. On a CPU it is float32; weights "
        "of 16 bits stay so in memory, with the same results. `bfloat16`, and `auto` with such a checkpoint, has CPUs "
        "that can (AVX512_BF16, AMX) multiply in it, weights of fewer bits too, sums in float32; where some "
        "workers cannot, take float32, and where some have no AMX, `kernels: vectors`. For KV see `cache.dtype`.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantize: str = _key(
        "none",
        "Round the weights of linear layers to 8 or 4 bits when the model is loaded, on CPUs: less memory, and more "
        "tokens a second of few requests, for answers that are a little other ones. Checkpoints that come quantised "
        "(GPTQ, AWQ, compressed-tensors, FP8) need nothing.",
        choices=("none", "int8", "int4"),
    )
    engine: str = _key(
        "torch",
        "What computes: `torch`; or `simulated`, which computes nothing: steps take as long as `time_model` says, "
        "tokens are drawn at random, all else is real. Of the model its config.json and its tokenizer are enough.",
        choices=("torch", "simulated"),
    )
    time_model: str = _key(
        "", "A YAML file that says how long steps of a simulated engine take, and how many tokens of KV a worker has "
        "room for: a scenario of `tandem sim`, or a part of one. On every host under the same path."
    )
    kernels: str = _key(
        "auto",
        "What computes beside torch. `auto`: kernels made for the device, compiled by Numba for CPUs and by Triton for "
        "GPUs. `vectors`: on CPUs these without AMX, whose products of bfloat16 are another numerical type: only "
        "workers that multiply alike hand pages to each other. `torch`: none, which is slower; to see whether a fault "
        "is the kernels' or the model's own.",
        choices=("auto", "vectors", "torch"),
    )
    share_weights: bool = _key(
        True, "Let the workers of a node that serve on its CPUs have one copy of the weights in memory. Turn it off "
        "where each is to have its own."
    )


@dataclass(frozen=True)
class PoolConfig:
    """One pool of workers."""

    workers: int = _key(
        1, "How many workers the pool starts with. `tandem scale` changes it later.", minimum=1, maximum=MAX_POOL
    )
    min: int = _key(
        0, "The fewest workers of a pool that follows its load, and with how many it starts where `workers` is less; "
        "0: `workers`. Raise it where load comes too suddenly to wait for a worker's start.",
        minimum=0, maximum=MAX_POOL,
    )
    max: int = _key(
        0, "The most workers of a pool that follows its load; 0: `workers`. The pool follows its load where this is "
        "more than `min`.", minimum=0, maximum=MAX_POOL
    )
    threads: int = _key(0, "CPU threads of each worker; 0: an equal share of the cores.", minimum=0)
    gpus: float = _key(
        0.0, "GPUs of each worker: a whole number, or a part of one; 0: it computes on the CPU.", minimum=0
    )

    @property
    def least(self) -> int:
        """Workers that it has at least."""
        return self.min or self.workers

    @property
    def most(self) -> int:
        """Workers that it has at most."""
        return self.max or max(self.workers, self.min)

    @property
    def at_first(self) -> int:
        """Workers with which it starts."""
        return max(self.workers, self.min)


@dataclass(frozen=True)
class PrefillPoolConfig(PoolConfig):
    """The prefill workers, without which a cluster can do."""

    workers: int = _key(
        1, "How many workers the pool starts with; 0: none, and the decode workers compute prompts too, beside what "
        "they generate (a colocated cluster). `tandem scale` changes it later.", minimum=0, maximum=MAX_POOL
    )


@dataclass(frozen=True)
class PoolsConfig:
    routers: int = _key(
        1, "How many routers take requests; each takes all. Raise it where one router's core is busy, or to serve on "
        "while one is replaced. Those of one host share its port; on several hosts each node with the resource "
        "`router` gets one. `tandem scale --routers` changes it later.",
        minimum=1, maximum=MAX_POOL,
    )
    prefill: PrefillPoolConfig = field(default_factory=PrefillPoolConfig)
    decode: PoolConfig = field(default_factory=PoolConfig)
    utilisation: float = _key(
        0.7, "Share of what its workers can do at which a pool that follows its load is to work. It grows a little "
        "above, and shrinks where one worker less would stay below. Lower it for more room for bursts, at the price "
        "of more workers.", minimum=0.05, maximum=0.9,
    )
    shrink_delay_s: float = _key(
        120.0, "Seconds for which a pool must have been too large, and not have grown, before it gives up a worker. "
        "Raise it where workers take long to start; growing is never delayed.", minimum=1
    )
    flexible: int = _key(
        0, "How many workers may serve in the other role than the one they were started in. Where one pool gives up a "
        "worker while the other grows, by an order or as both follow their load, it drains and goes on in the other "
        "pool with the weights that it has, in place of a new one. Needs the certificates of both roles on each node.",
        minimum=0, maximum=MAX_POOL
    )


@dataclass(frozen=True)
class CacheConfig:
    """KV pages of each worker."""

    page_size: int = _key(
        32, "Tokens in a page. Set a multiple of 256 for FlashAttention-2; tiles (AMX) take multiples of 16.", minimum=1
    )
    dtype: str = _key(
        "auto",
        "Type of K and V in the pages. `auto` is the model's own on a GPU; on a CPU bfloat16 where that is multiplied "
        "(see `model.dtype`), else float32. `bfloat16` keeps them in half of float32's bytes, and `int8` in little "
        "more than a quarter: so many more tokens in the same memory, and fewer bytes to send, for answers that are a "
        "little other ones. All workers of a cluster need the same.",
        choices=KV_DTYPES,
    )
    memory_bytes: int = _key(
        0, "Bytes of KV pages of each worker; 0: `memory_share` decides. Set it where workers share memory with other "
        "programs.", minimum=0
    )
    memory_share: float = _key(
        0.7, "Share of the memory that is free at start, less the weights and `host_bytes`, that all workers of a node "
        "together use for KV pages. Lower it where other programs need memory too.",
        minimum=0.001, maximum=0.95,
    )
    max_memory_bytes: int = _key(
        4 << 30, "The most bytes that `memory_share` gives one worker on a CPU; 0: no limit. Raise it for long "
        "contexts or many sequences.", minimum=0
    )
    preallocate: bool = _key(
        False, "Workers on CPUs take the memory of all KV pages before they are ready, which is milliseconds a GiB, or "
        "seconds where a virtual machine has to get it first; otherwise as pages are first used. Turn it on where "
        "other programs may take that memory meanwhile, or where a process that grows is an alarm."
    )
    max_context: int = _key(
        0, "The most tokens of prompt and output together; 0: the model's own limit. Lower it to refuse requests that "
        "would take most of the pages; of a model with longrope it also decides which of its factors hold "
        "(docs/checkpoints.md).", minimum=0
    )
    prefix_cache: bool = _key(
        True, "Keep full pages of ended requests for prompts that begin alike; the least recently used go first. Turn "
        "it off where prompts share nothing."
    )
    mixed_windows: bool = _key(
        True, "Of models of which some layers see a sliding window and others all (Gemma 2 and 3, gpt-oss), workers on "
        "CPUs give back the pages of the former behind the window. Turn it off to keep copies of such models' pages "
        "(`disk_path`, `host_bytes`), or where they are handed off between CPUs and GPUs."
    )
    disk_path: str = _key(
        "", "Directory for copies of cached pages, which outlive eviction and the worker; each worker makes one of its "
        "own in it, on its node. Set it where prompts come again later than memory lasts; empty: none are kept on disk."
    )
    disk_bytes: int = _key(
        16 << 30, "The most bytes of each worker's pages on disk (`disk_path`); the least recently used go first.",
        minimum=1 << 20,
    )
    host_bytes: int = _key(
        0, "Bytes of host memory of each worker for copies of cached pages; 0: none. Set it where pages lie on GPUs.",
        minimum=0,
    )


#: Sequences in a batch where `scheduling.max_num_seqs` is 0, at least and at most.
FEWEST_SEQS, MOST_SEQS = 64, 256


@dataclass(frozen=True)
class SchedulingConfig:
    """The batch scheduler of every worker and the queues around it."""

    max_num_seqs: int = _key(
        0, "The most sequences in one batch; 0: as many as have room for 256 tokens each, but 64 at least and 256 at "
        "most, and never more than `max_num_batched_tokens`. Lower it for a lower TPOT under load; what is beyond "
        "waits for a place before its first token.", minimum=0,
    )
    max_num_batched_tokens: int = _key(
        2048, "The most tokens in one step, decodes and chunks of prompts together.", minimum=1
    )
    chunk_size: int = _key(
        512, "The most tokens of one prompt in one step; a multiple of the page size. Lower it for shorter steps.",
        minimum=1,
    )
    saturating_tokens: int = _key(
        0, "Tokens of prompts that keep a worker busy for a step; 0: 32 on a CPU (256 with AMX and bfloat16), 512 on a "
        "GPU. A step that has so many takes no further prompt, because all of them would end later. Two exceptions: a "
        "short prompt joins a chunk of a long one, and two prompts share a step where four or more wait for a decode "
        "worker that shares its cores and computes no prompts. Raise it where a GPU is not busy with 512.", minimum=0
    )
    max_queued_requests: int = _key(
        256, "The most requests that wait in a burst; a request beyond that, or in a lasting overload, gets 429. "
        "Lower it for shorter waits, raise it for larger bursts.", minimum=1
    )
    priority_ageing_s: float = _key(
        10.0, "Seconds of waiting that one level of `priority` is worth: a request goes before one that is a level "
        "more urgent and came this much later. Raise it where urgency matters more than waiting; 0: first come, first "
        "served.", minimum=0
    )
    worker_queue_bound: int = _key(512, "The most requests that wait at one worker.", minimum=1)
    unacknowledged_share: float = _key(
        0.75, "Share of a prefill worker's pages in use above which it starts no prompt without pages at decode, "
        "unless it has nothing else. Raise it to compute more prompts ahead of decode.",
        minimum=0.01, maximum=1,
    )
    mixed_pool: bool = _key(
        True, "Let a decode worker compute a new prompt where that is sooner than at prefill, or as soon and nobody is "
        "there, in chunks that leave those who generate their time per token (`slo.tpot_ms`). Turn it off to keep "
        "decode steps free of prompts; decode then computes only what a lost prefill worker left undone."
    )
    mixed_prompt_tokens: int = _key(
        0, "The most tokens of a new prompt that a decode worker computes (`mixed_pool`), of those that it does not "
        "hold; 0: any number. Set it where long prompts are to stay with prefill whatever the load.", minimum=0
    )
    mixed_step_tokens: int = _key(
        0, "Tokens of a decode step up to which it takes tokens of new prompts; 0: as many as leave those who generate "
        "their time per token. Set it where steps are to stay short though `slo.tpot_ms` would allow longer ones.",
        minimum=0
    )
    share_cores: bool = _key(
        True, "Let a worker that has nothing to compute lend its CPU threads to the others of its node. Turn it off "
        "where workers must not disturb each other."
    )
    local_prefill_tokens: int = _key(
        512, "The most tokens that a decode worker computes of a prompt whose prefill worker was lost, of what that "
        "left undone; such a prompt is not paced. Lower it where that slows decode; 0: none.", minimum=0
    )
    max_step_s: float = _key(
        300.0, "Seconds after which a worker whose step has not ended counts as stuck and ends itself. Raise it where "
        "steps are that slow.", minimum=1
    )

    @property
    def mixed_pool_tokens(self) -> float:
        """The most tokens of a new prompt that a decode worker computes; endless: any, 0: none."""
        return (self.mixed_prompt_tokens or math.inf) if self.mixed_pool else 0


@dataclass(frozen=True)
class SpeculationConfig:
    """Several tokens of a sequence in one decode step, on CPUs."""

    lookup_tokens: int = _key(
        0, "The most tokens that a decode step guesses for a sequence, from where its newest tokens came before in its "
        "prompt or output; 0: none, and on GPUs there are none. They are computed beside those of the step and taken "
        "as far as they are right, so outputs are the same where results do not depend on how the work is cut. "
        "Set it where outputs repeat much of their prompts, as edits do, and few requests run at a time.",
        minimum=0, maximum=64,
    )
    draft_model: str = _key(
        "", "A smaller model with the same vocabulary, named as in `model.path`, that proposes tokens to each decode "
        "worker where `lookup_tokens` finds none; empty: none. Outputs stay the same as with `lookup_tokens`. How many "
        "it proposes follows how many are right and how long both models take. Set it where few requests run at a time "
        "and a model of a tenth of the size says much the same."
    )
    draft_tokens: int = _key(
        4, "The most tokens that `draft_model` proposes for a sequence in a decode step. Raise it where most are "
        "right.", minimum=1, maximum=16
    )
    draft_quantize: str = _key(
        "none", "As `model.quantize`, for the weights of `draft_model`; a model may so be the draft of itself.",
        choices=("none", "int8", "int4"),
    )
    draft_memory_bytes: int = _key(
        256 << 20, "Bytes of KV pages of `draft_model` at each decode worker, besides those of the model. Raise it "
        "where contexts are long: what does not fit gets no proposals.", minimum=1 << 20
    )


@dataclass(frozen=True)
class TransportConfig:
    """How pages travel and how long a grant holds."""

    name: str = _key(
        "ucx", "The transport: `ucx` (NIXL), `nccl` (torch.distributed; gloo on CPU) or `loopback` (tests).",
        choices=("ucx", "nccl", "loopback"),
    )
    interface: str = _key(
        "", "The network that carries pages: an interface that every host has (`eth1`), or a network (`10.1.0.0/16`), "
        "of which each host takes its own interface. Set it where hosts have several networks; empty: the library "
        "chooses."
    )
    lease_s: float = _key(
        10.0, "Seconds of silence after which a peer counts as lost. A write of pages may take as long once its turn "
        "on the link has come, besides the time for its bytes. Raise it where hosts or networks pause for long.",
        minimum=0.1,
    )
    grace_s: float = _key(
        2.0, "Seconds beyond the lease after which a silent writer is killed. No more is under way to a peer than its "
        "link carries in a quarter of this, so that what is cancelled ends in time.",
        minimum=0,
    )
    quarantine_cap: float = _key(
        0.25, "Share of a worker's pages that may stay in quarantine for longer than `grace_s`. Above it the worker "
        "drains and is replaced.", minimum=0.01, maximum=1
    )
    digests: bool = _key(
        True, "Whether every page is checked at decode against a digest that prefill took of it: on CPUs by a thread "
        "at the speed of memory, on GPUs by the GPU. Without, a page that a path damages gives wrong tokens. Workers "
        "that differ in it do not pair."
    )

    @property
    def heartbeat_s(self) -> float:
        """Between two looks of the supervisor at its processes, and at the load."""
        return self.lease_s / _HEARTBEATS_PER_LEASE


@dataclass(frozen=True)
class LimitsConfig:
    """What one request may ask for."""

    max_choices: int = _key(16, "The largest `n`.", minimum=1)
    max_logprobs: int = _key(20, "The most alternatives with log-probabilities for each token.", minimum=0)
    max_prompt_logprobs: int = _key(
        1 << 20, "The most log-probabilities of prompt tokens in one answer (`prompt_logprobs`, `echo` with "
        "`logprobs`): the tokens of all its prompts, times one and the alternatives, times the choices of a "
        "completion, each of which has them.", minimum=1,
    )
    most_urgent_priority: int = _key(
        0, "The lowest `priority` that a request may ask for; lower is more urgent, and the default is 0. Set it "
        "below 0 only where every client may go before all others; the file of API keys can let a tenant.",
        minimum=-(1 << 31) + 1, maximum=0,
    )
    max_body_bytes: int = _key(8 << 20, "The largest HTTP body in bytes.", minimum=1024)
    max_grammar_bytes: int = _key(
        128 << 10, "The largest schema or grammar of a request in bytes (`response_format`, `structured_outputs`).",
        minimum=64,
    )
    max_grammar_compile_s: float = _key(
        1.0, "Seconds of a processor that compiling a request's schema or grammar may take, at a router and again at "
        "its workers; one that needs more gets 400. Raise it where schemas of thousands of properties are refused.",
        minimum=0.05, maximum=60,
    )
    stream_buffer_tokens: int = _key(
        1024, "Tokens that wait for a client that reads too slowly; beyond that its request is cancelled.", minimum=1
    )
    max_attempts: int = _key(
        3, "The most attempts at one request, the first one included. Moves away from a worker that drains do not "
        "count.", minimum=1
    )
    retry_budget: float = _key(
        0.1, "Share of all requests in the cluster that may be tried again, beyond three a minute and a burst of "
        "`max_num_seqs` (at least 10; 256 where it is 0). Lower it where retries overload the rest; 0: one burst and "
        "no more.",
        minimum=0, maximum=1,
    )
    wait_for_worker_s: float = _key(
        10.0, "Seconds that a request waits where its pool has no worker and one is coming; then it gets 503.",
        minimum=0,
    )
    header_timeout_s: float = _key(10.0, "Seconds within which the head of an HTTP request must arrive.", minimum=0.1)
    body_timeout_s: float = _key(30.0, "Seconds within which the body of an HTTP request must arrive.", minimum=0.1)
    max_connections: int = _key(4096, "The most open HTTP connections; further ones are closed.", minimum=1)


@dataclass(frozen=True)
class SloConfig:
    """By when tokens are wanted. It decides who goes first among equals, and what metrics and alerts call late."""

    ttft_ms: float = _key(
        0.0, "Milliseconds from the arrival of a request to its first token; 0: 5000 on a CPU, 1000 on a GPU. The file "
        "of API keys can say otherwise for a tenant, and `slo` of a body for a request.", minimum=0
    )
    tpot_ms: float = _key(
        0.0, "Milliseconds for each further token, on average; 0: 200 on a CPU, 50 on a GPU. Decode workers compute "
        "prompts in chunks that keep it: lower it where their steps are to stay shorter.", minimum=0
    )


@dataclass(frozen=True)
class BatchesConfig:
    """Files and batches (`/v1/files`, `/v1/batches`): many requests of which nobody waits for one."""

    directory: str = _key(
        "", "Directory for uploaded files, batches and their results; empty: there are none. Routers of several hosts "
        "take turns at one queue where they share it."
    )
    max_file_bytes: int = _key(
        200 << 20, "The largest file that may be uploaded, in bytes.", minimum=1024
    )
    max_requests: int = _key(100_000, "The most requests of one batch.", minimum=1)
    share: float = _key(
        0.5, "Share of the places in decode's batches that requests of batches may take. Raise it where hardly anybody "
        "else asks; the rest is free for those who do.", minimum=0.01, maximum=1,
    )


@dataclass(frozen=True)
class HttpConfig:
    host: str = _key("127.0.0.1", "Address to listen on. Beyond loopback it needs API keys, or `allow_anonymous`.")
    port: int = _key(8000, "TCP port to listen on.", minimum=1, maximum=65535)
    api_keys_file: str = _key(
        "", "File with one API key a line, or with tenants in YAML (docs/security.md); the variable TANDEM_API_KEYS "
        "(comma-separated) adds to it. With keys, every request but /health and /ping needs one."
    )
    allow_anonymous: bool = _key(
        False, "Let the router listen beyond loopback without API keys. Turn it on only where the network keeps "
        "others out."
    )
    cors_origins: tuple[str, ...] = _key(
        (), "Origins whose web pages may call the router (CORS), such as `https://app.example`; `*`: any; empty: "
        "none."
    )


@dataclass(frozen=True)
class SecurityConfig:
    """Who may speak to whom inside the cluster."""

    tls: str = _key(
        "auto", "Mutual TLS between the cluster's processes. `auto` turns it on when a process listens beyond "
        "loopback.", choices=("auto", "on", "off")
    )
    certificates: str = _key(
        "", "Directory that `tandem certs` made, the same on every node. Required where TLS is on."
    )


@dataclass(frozen=True)
class MetricsConfig:
    enabled: bool = _key(True, "Serve `GET /metrics` (Prometheus).")
    worker_interval_s: float = _key(
        0.25,
        "The least time between two load reports of a busy worker, in seconds. Several routers hear at once of "
        "requests that come or go.",
        minimum=0.01,
    )
    vllm_names: bool = _key(
        False, "Export what means the same under vLLM's names too (`vllm:num_requests_running` and so on). Turn it on "
        "for boards, autoscalers and load generators that were made for vLLM."
    )
    step_log: str = _key(
        "", "A directory into which each worker writes what its steps compute and how long they take, the newest "
        "32 MiB of it; empty: none does. `tandem sim calibrate` reads it."
    )


@dataclass(frozen=True)
class TracingConfig:
    """Spans of requests for OpenTelemetry; needs the extra `otel`."""

    otlp_endpoint: str = _key(
        "", "URL of a collector's OTLP receiver over HTTP, such as `http://collector:4318`; empty: nothing is sent. "
        "Variables like OTEL_EXPORTER_OTLP_HEADERS are obeyed.",
    )
    sample: float = _key(
        1.0, "Share of the requests that are sent. A request whose `traceparent` says so is sent, or not, in any "
        "case. Lower it where the collector cannot keep up.", minimum=0, maximum=1,
    )


@dataclass(frozen=True)
class LoggingConfig:
    level: str = _key("info", "The lowest level that is logged.", choices=("debug", "info", "warning", "error"))
    format: str = _key(
        "auto", "Format of the log. `auto` is `console` on a terminal, and `json` elsewhere.",
        choices=("auto", "json", "console"),
    )
    directory: str = _key("", "Where a local cluster keeps its log files; empty: in Ray's session directory.")


@dataclass(frozen=True)
class Config:
    """The root of `tandem.yaml`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    pools: PoolsConfig = field(default_factory=PoolsConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    transport: TransportConfig = field(default_factory=TransportConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    slo: SloConfig = field(default_factory=SloConfig)
    batches: BatchesConfig = field(default_factory=BatchesConfig)
    http: HttpConfig = field(default_factory=HttpConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    def __post_init__(self) -> None:
        _check_relations(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """From a pickle, perhaps of a version that lacks a section: that has its defaults, as lacking keys have."""
        known = typing.get_type_hints(type(self))
        self.__dict__.update({name: section() for name, section in known.items()} | state)


def load(path: Path | None, overrides: dict[str, Any] | None = None) -> Config:
    """Read `path` (defaults alone where `None`) and lay `overrides` (dotted path → value) over it.

    Raises:
        ConfigError: unreadable file, unknown key, wrong type or impossible value; names key and remedy.
    """
    tree = {} if path is None else read_yaml(path)
    for dotted, value in (overrides or {}).items():
        _lay_over(tree, dotted, value)
    return from_dict(tree)


def from_dict(tree: dict[str, Any]) -> Config:
    """Build the configuration from plain data. Raises `ConfigError` as `load` does."""
    return build(Config, tree)


def to_dict(config: Config) -> dict[str, Any]:
    """Plain data that `from_dict` turns into an equal configuration."""
    return dataclasses.asdict(config)


def _lay_over(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    for name in parents:
        # A section whose keys are all commented out reads as nothing.
        if tree.get(name) is None:
            tree[name] = {}
        tree = tree[name]
        if not isinstance(tree, dict):
            raise ConfigError(f"{dotted}: {name} must hold keys", key=dotted)
    tree[last] = value


COLOCATED_RANGE = (
    "the decode pool follows its load, and cannot without prefill workers: what prompts ask of it is not in its "
    "figures; give decode a fixed size, or have 1 prefill worker or more"
)


def _check_engine(config: Config) -> None:
    model, pools = config.model, config.pools
    if model.engine == "torch":
        if model.time_model:
            raise ConfigError(
                "model.time_model says how long a simulated engine takes, and model.engine is torch; leave it out, or "
                "set model.engine to simulated",
                key="model.time_model",
            )
        return
    for key, value, usual, instead in (
        ("cache.dtype", config.cache.dtype, "auto", "model.kv_dtype"),
        ("model.quantize", model.quantize, "none", "model.weight_bits"),
    ):
        if value != usual:
            raise ConfigError(
                f"{key} is {value}, which a simulated engine has no use for; leave it out, and say {instead} in the "
                "time model",
                key=key,
            )
    if not model.time_model:
        raise ConfigError(
            "model.engine is simulated, and nothing says how long its steps take; name a file in model.time_model "
            "(--time-model FILE), for example scenarios/two_of_each.yaml",
            key="model.time_model",
        )
    if pools.prefill.gpus or pools.decode.gpus:
        raise ConfigError("a simulated engine takes no GPU; set pools.prefill.gpus and pools.decode.gpus to 0",
                          key="pools.prefill.gpus")
    if config.speculation.draft_model:
        raise ConfigError("nobody can propose tokens to a simulated engine, which draws them blindly; leave "
                          "speculation.draft_model out", key="speculation.draft_model")


def _check_relations(config: Config) -> None:
    """What one key alone cannot say."""
    page, scheduling = config.cache.page_size, config.scheduling
    if scheduling.chunk_size % page:
        raise ConfigError(
            f"scheduling.chunk_size is {scheduling.chunk_size}, must be a multiple of cache.page_size ({page})",
            key="scheduling.chunk_size",
        )
    if scheduling.max_num_batched_tokens < scheduling.chunk_size:
        raise ConfigError(
            f"scheduling.max_num_batched_tokens is {scheduling.max_num_batched_tokens}, must be at least "
            f"scheduling.chunk_size ({scheduling.chunk_size}), or no chunk fits a step",
            key="scheduling.max_num_batched_tokens",
        )
    if scheduling.max_num_seqs > scheduling.max_num_batched_tokens:
        raise ConfigError(
            f"scheduling.max_num_seqs is {scheduling.max_num_seqs}, more than scheduling.max_num_batched_tokens "
            f"({scheduling.max_num_batched_tokens}): a step has no token for each sequence of such a batch; lower the "
            "one, or raise the other",
            key="scheduling.max_num_seqs",
        )
    for name, value in (("disk_path", config.cache.disk_path), ("host_bytes", config.cache.host_bytes)):
        if value and not config.cache.prefix_cache:
            raise ConfigError(
                f"cache.{name} keeps pages of the prefix cache, which cache.prefix_cache turns off; turn it on, or "
                f"leave cache.{name} out",
                key=f"cache.{name}",
            )
    _check_engine(config)
    prefill = config.pools.prefill
    if prefill.least == 0 < prefill.most:
        raise ConfigError(
            f"pools.prefill follows its load up to {prefill.most} workers, and begins with none; set "
            "pools.prefill.workers to 1 or more, or leave pools.prefill.max out for a colocated cluster",
            key="pools.prefill.max",
        )
    if prefill.most == 0 and config.pools.decode.least < config.pools.decode.most:
        raise ConfigError(COLOCATED_RANGE, key="pools.decode.max")
    for role in ("prefill", "decode"):
        _check_pool(getattr(config.pools, role), f"pools.{role}")
    if config.pools.flexible and config.pools.prefill.gpus != config.pools.decode.gpus:
        raise ConfigError(
            f"pools.flexible is {config.pools.flexible}, but a prefill worker has {config.pools.prefill.gpus:g} GPUs "
            f"and a decode worker {config.pools.decode.gpus:g}: none can take the other's place; give both as many, "
            "or set pools.flexible to 0",
            key="pools.flexible",
        )
    if (endpoint := config.tracing.otlp_endpoint) and not _COLLECTOR.fullmatch(endpoint):
        raise ConfigError(
            f"tracing.otlp_endpoint is {endpoint!r}, to which nothing can be sent; write it with its scheme, as "
            "http://collector:4318",
            key="tracing.otlp_endpoint",
        )
    for origin in config.http.cors_origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"http.cors_origins: {origin!r} is no origin; write scheme, host and port alone, as browsers send "
                "them: https://app.example or http://localhost:3000, or `*` for any",
                key="http.cors_origins",
            )


def _check_pool(pool: PoolConfig, path: str) -> None:
    if round(pool.gpus, 4) != pool.gpus or (pool.gpus > 1 and pool.gpus % 1):  # as Ray counts them
        raise ConfigError(
            f"{path}.gpus is {pool.gpus:g}; give a worker a whole number of GPUs, or a part of one with at most four "
            "decimals, as 0.5",
            key=f"{path}.gpus",
        )
    if pool.max and pool.at_first > pool.max:
        name, size = ("min", pool.min) if pool.min > pool.max else ("workers", pool.workers)
        raise ConfigError(
            f"{path}.{name} is {size}, more than {path}.max ({pool.max}); raise {path}.max, or lower the other",
            key=f"{path}.{name}",
        )
    if pool.min and not pool.max and pool.min != pool.workers:
        raise ConfigError(
            f"{path}.min is {pool.min}, and {path}.max is not set; a pool follows its load between the two, and one of "
            f"fixed size has {path}.workers alone",
            key=f"{path}.min",
        )
