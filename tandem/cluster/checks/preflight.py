"""Everything about the machine and the model that can be wrong is found here, before anything starts.

`tandem serve` runs all checks and stops at the first that fails; `tandem doctor` shows them all. A failed check is a
`ConfigError` that names the key and the remedy.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import tandem
from kvtransfer.interface import find_interface
from router.http.auth import ApiKeys, check_exposure, digests_of_variable
from tandem.cluster.checks.certificates import check_certificates
from tandem.cluster.checks.draft import check_draft, draft_bytes, weight_bytes
from tandem.cluster.checks.finding import Finding
from tandem.cluster.checks.host import Host, human_bytes
from tandem.cluster.checks.nixl_build import missing_build, torch_cuda
from tandem.cluster.checks.port import check_port
from tandem.cluster.checks.tiers import check_tiers
from tandem.core.clock import MonotonicClock
from tandem.core.config import (
    BatchesConfig,
    CacheConfig,
    Config,
    HttpConfig,
    LoggingConfig,
    MetricsConfig,
    ModelConfig,
    PoolConfig,
    SecurityConfig,
    SpeculationConfig,
)
from tandem.core.errors import ConfigError, TandemError
from tandem.core.identity import WORKER_ROLES, Role
from tandem.core.layer_groups import KeptPages, kept_pages
from tandem.core.model_path import ModelFacts, read_facts, resolve_model, shown_name
from tandem.core.pooling import read_pooling
from tandem.core.time_model import SIMULATED_TOKEN_BYTES, TimeModel, read_time_model
from tandem.core.version import DISTRIBUTION, TOP_LEVEL_NAMES, version
from tandem.core.windows import GPU_BLOCK_TOKENS
from tandem.core.writable import check_writable_directory
from tandem.engine.quantized.scheme import read_scheme
from tandem.rpc.security import is_loopback

WORKER_OVERHEAD_BYTES = 600 << 20
"""What a worker process takes beside weights and pages: interpreter, torch, Ray, activations."""

_EXPORTER_MODULE = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
_Section = TypeVar("_Section", ModelConfig, MetricsConfig, LoggingConfig, BatchesConfig)

_TRANSPORT_MODULES = {"ucx": ("nixl_cu12", "nixl-cu12"), "nccl": ("torch", "torch")}


@dataclass(frozen=True)
class Plan:
    """What the checks derived."""

    config: Config  # with its served names filled in, and paths as other processes of this host need them
    facts: ModelFacts
    weights_dtype: str  # in memory
    kv_bytes: dict[Role, int]  # each worker's share of the host
    num_threads: dict[Role, int]  # the same of its cores
    key_digests: frozenset[bytes] = field(repr=False)  # of the API keys in this environment

    @property
    def model_name(self) -> str:
        """One that requests may use."""
        return shown_name(self.config.model.served_names, self.facts.name)

    @property
    def needs_key(self) -> bool:
        """Whether requests need an API key."""
        return bool(self.key_digests or self.config.http.api_keys_file)


class Preflight:
    """The checks for one configuration on one host. `local`: all workers run on this host."""

    def __init__(self, config: Config, host: Host, *, local: bool = True) -> None:
        self.config, self.host, self.local = config, host, local

    def checks(self) -> list[tuple[str, Callable[[], Finding]]]:
        here = [("memory", self.check_memory), ("gpus", self.check_gpus), ("token", self.check_token)]
        return [
            ("packages", self.check_packages),
            ("port", lambda: check_port(self.config.http)),
            ("api keys", self.check_api_keys),
            ("transport", self.check_transport),
            ("network", self.check_network),
            ("directories", self.check_directories),
            ("tracing", self.check_tracing),
            ("certificates", lambda: check_certificates(self._security, local=self.local)),
            ("model", self.check_model),
            ("pages", self.check_cache_dtype),
            ("context", self.check_context),
            ("page tiers", self.check_tiers),
            ("draft model", self.check_draft),
            *(here if self.local else []),
        ]

    def findings(self) -> list[Finding]:
        """Every check's finding, failed ones included."""
        found: list[Finding] = []
        for name, check in self.checks():
            try:
                finding = check()
            except TandemError as error:
                detail, _, remedy = error.message.partition("; ")
                finding = Finding(name, "fail", detail, remedy)
            # Without a model several checks fail for the same reason: it is told once.
            if finding.detail not in [earlier.detail for earlier in found]:
                found.append(finding)
        return found

    def plan(self) -> Plan:
        """Run every check.

        Raises:
            ConfigError: the first that failed.
            ModelLoadError: there is no usable model.
        """
        for _, check in self.checks():
            check()
        names = self.config.model.served_names or (self.facts.name,)
        model = dataclasses.replace(self._model, served_names=names)
        return Plan(
            config=dataclasses.replace(
                self.config,
                model=model,
                security=self._security,
                http=self._http,
                cache=self._cache,
                metrics=self._metrics,
                logging=self._logging,
                batches=self._batches,
                speculation=self._speculation,
            ),
            facts=self.facts,
            weights_dtype=self._stored_dtype,
            kv_bytes={role: self._kv_bytes(role) for role in self._pools},
            num_threads={role: pool.threads or self._equal_share() for role, pool in self._pools.items()},
            key_digests=digests_of_variable(os.environ),
        )

    # --- the checks ----------------------------------------------------------------------------------------------

    def check_packages(self) -> Finding:
        """Nobody else owns our top-level names, and what would be imported is ours."""
        owners = _owners()
        home = Path(tandem.__file__).resolve().parent.parent
        for name in TOP_LEVEL_NAMES:
            others = sorted(set(owners.get(name, ())) - {DISTRIBUTION})
            if others:
                raise ConfigError(
                    f"the distribution {others[0]} owns the package {name}, which is Tandem's; "
                    f"pip uninstall {others[0]}, or install {DISTRIBUTION} into an environment of its own",
                    key=name,
                )
            spec = importlib.util.find_spec(name)
            origin = Path(spec.origin).resolve() if spec and spec.origin else None
            if origin is None or origin.parent.parent != home:
                raise ConfigError(
                    f"the package {name} comes from {origin or 'nowhere'}, not from Tandem in {home}; "
                    "take that path out of PYTHONPATH or start in another directory",
                    key=name,
                )
        detail = f"{DISTRIBUTION} {version()}, Python {sys.version.split()[0]}, {home}"
        if version().startswith("0+"):
            return Finding("packages", "warn", f"{detail}: a checkout that is not installed", "pip install -e .")
        return Finding("packages", "ok", detail)

    def check_api_keys(self) -> Finding:
        """The router does not serve everybody unless it was told so, and its keys can be read.

        It runs on this host, also in a joined Ray: it reads the same file, and gets the variable's keys from here.
        """
        http, digests = self._http, digests_of_variable(os.environ)
        check_exposure(http, http.host, digests)
        if ApiKeys(http, digests, MonotonicClock()).are_required:
            return Finding("api keys", "ok", "every request but /health needs one")
        if not is_loopback(http.host):
            return Finding(
                "api keys", "warn", f"whoever reaches {http.host} is served (http.allow_anonymous)",
                "name a file in http.api_keys_file",
            )  # fmt: skip
        return Finding("api keys", "ok", "none; the router listens on loopback only")

    def check_transport(self) -> Finding:
        name = self.config.transport.name
        if name not in _TRANSPORT_MODULES:
            raise ConfigError(
                f"transport.name is {name}, which works only within one process; choose ucx or nccl",
                key="transport.name",
            )
        module, package = _TRANSPORT_MODULES[name]
        if importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"transport.name is {name}, but its library {package} is not installed; "
                f"pip install {package}, or set transport.name to another",
                key="transport.name",
            )
        detail = f"{name} by {package} {metadata.version(package)}"
        if name == "ucx" and self._on_gpu and (build := missing_build(torch_cuda(), _is_installed)):
            return Finding(
                "transport",
                "warn",
                f"{detail}, but torch is built for CUDA {build.cuda}, and pages on GPUs need {build.package}",
                f"pip install 'tandem-serving[{build.extra}]' on the hosts with GPUs",
            )
        return Finding("transport", "ok", detail)

    def check_network(self) -> Finding:
        """Which network carries pages. Where the workers are elsewhere, this host need not have it."""
        wanted = self.config.transport.interface
        if not wanted:
            return Finding("network", "ok", "pages take the way that the transport chooses")
        try:
            return Finding("network", "ok", f"pages go by {find_interface(wanted)} on this host")
        except ConfigError as error:
            if self.local:
                raise
            return Finding("network", "warn", error.message, "the hosts of the workers need it")

    def check_directories(self) -> Finding:
        """What logs, batches and step logs are written to: made by the processes that write there."""
        places = {"logging.directory": self._logging.directory, "batches.directory": self._batches.directory}
        places["metrics.step_log"] = self._metrics.step_log
        named = {key: Path(place) for key, place in places.items() if place}
        if self.local:
            for key, path in named.items():
                check_writable_directory(path, key)
        return Finding("directories", "ok", ", ".join(map(str, named.values())) or "none but Ray's own")

    def check_tracing(self) -> Finding:
        """Whether the router of this host can send spans."""
        endpoint = self.config.tracing.otlp_endpoint
        if not endpoint:
            return Finding("tracing", "ok", "off")
        try:
            has_exporter = importlib.util.find_spec(_EXPORTER_MODULE) is not None
        except ModuleNotFoundError:  # a package above it
            has_exporter = False
        if not has_exporter:
            raise ConfigError(
                f"tracing.otlp_endpoint is {endpoint}, but the packages that send there are not installed; "
                "pip install 'tandem-serving[otel]', or leave it out",
                key="tracing.otlp_endpoint",
            )
        return Finding("tracing", "ok", f"{self.config.tracing.sample:.0%} of the requests, to {endpoint}")

    def check_model(self) -> Finding:
        facts, dtype = self.facts, self.dtype
        if (time_model := self._time_model) is not None:
            for role in WORKER_ROLES:
                if len(time_model.pool(role).groups) > 1:
                    raise ConfigError(
                        f"{self.config.model.time_model} has {role.value} workers of several types "
                        f"({role.value}.others), and those of a cluster are alike; leave them out, or run the file by "
                        "`tandem sim run`",
                        key="model.time_model",
                    )
            detail = f"{facts.name}: {facts.architecture}, simulated as {self.config.model.time_model} says"
            return Finding("model", "warn", detail, "leave model.engine out for true answers")
        if facts.quantization is not None:
            read_scheme(facts.quantization)
            if self._on_gpu:
                raise ConfigError(
                    f"{facts.name} comes quantised, which is served on CPUs only; take its plain weights, or no GPUs",
                    key="model.path",
                )
            # Other hosts may have what this one has not; their workers look again.
            may_be_short = self.config.model.dtype == "bfloat16" and (self._multiplies_bfloat16 or not self.local)
            if self.config.model.dtype not in ("auto", "float32") and not may_be_short:
                said = (
                    f"{facts.name} comes quantised, and is computed in float32, or in bfloat16 on CPUs that multiply "
                    "that (AVX512_BF16); leave model.dtype out"
                )
                raise ConfigError(said, key="model.dtype")
        if not self.config.pools.prefill.at_first and read_pooling(facts.directory) is not None:
            raise ConfigError(
                f"{facts.name} gives vectors, which prefill workers alone make; start at least one (--prefill 1)",
                key="pools.prefill.workers",
            )
        weights = human_bytes(self.weight_bytes)
        detail = f"{facts.name}: {facts.architecture}, {dtype}, weights {weights}, {facts.directory}"
        return Finding("model", "ok", detail)

    def check_cache_dtype(self) -> Finding:
        """GPUs keep K and V as they compute them, mixed models as a whole, and behind a window a block more."""
        asked = self.config.cache.dtype
        if self._time_model is not None:
            return Finding("pages", "ok", "simulated")
        if (self._on_gpu or asked == "float32") and asked not in ("auto", self.dtype):
            where = "on GPUs " if self._on_gpu else ""
            raise ConfigError(
                f"cache.dtype is {asked}, but {where}pages have the type that is computed in, {self.dtype}; leave "
                "cache.dtype out, or set model.dtype",
                key="cache.dtype",
            )
        if self._on_gpu and self._num_cpu_workers:
            self._check_cpus_pair_with_gpus()
        per_token = self.facts.kv_bytes_per_token(self.kv_dtype)
        size = f", {human_bytes(per_token)} a token" if per_token is not None else ""
        return Finding("pages", "ok", f"K and V in {self.kv_dtype}{size}")

    def _check_cpus_pair_with_gpus(self) -> None:
        """Both keep the same tokens of a text, else they cannot exchange pages."""
        on_cpu, on_gpu = self._kept_pages(on_cpu=True), self._kept_pages(on_cpu=False)
        if on_cpu == on_gpu:
            return
        name = self.facts.name
        if on_cpu.is_mixed:
            raise ConfigError(
                f"some layers of {name} see a window: what they do not see any more workers on CPUs give "
                "back, and workers on GPUs keep, so they cannot exchange pages; set cache.mixed_windows to false",
                key="cache.mixed_windows",
            )
        window = self.facts.windows.window
        raise ConfigError(
            f"the layers of {name} see a window of {window} tokens: workers on CPUs keep these of a text, and workers "
            f"on GPUs up to {GPU_BLOCK_TOKENS} more, so they cannot exchange pages; give all workers GPUs or none, or "
            f"set cache.max_context to at most {window}",
            key="pools.prefill.gpus",
        )

    def check_context(self) -> Finding:
        cache, limit = self.config.cache, self.facts.max_positions
        if limit is not None and cache.max_context > limit:
            raise ConfigError(
                f"cache.max_context is {cache.max_context}, but {self.facts.name} was made for {limit} tokens; "
                f"set it to at most {limit}, or to 0 for the model's own limit",
                key="cache.max_context",
            )
        context = cache.max_context or limit
        if context is not None and cache.page_size > context:
            raise ConfigError(
                f"cache.page_size is {cache.page_size}, more than the whole context of {context} tokens; "
                "set it to 32 or so",
                key="cache.page_size",
            )
        if limit is None:
            return Finding("context", "warn", "config.json names no limit", "set cache.max_context")
        return Finding("context", "ok", f"{context} tokens in pages of {cache.page_size}")

    def check_tiers(self) -> Finding:
        num_workers = sum(pool.most for pool in self._pools.values())
        cache = self.config.cache
        if (cache.disk_path or cache.host_bytes) and self._num_cpu_workers and self._is_mixed:
            detail = f"none on CPUs: some layers of {self.facts.name} see a window, and have pages of their own"
            return Finding("page tiers", "warn", detail, "set cache.mixed_windows to false, or keep no copies")
        return check_tiers(cache, num_workers, self.host, local=self.local)

    def check_draft(self) -> Finding:
        return check_draft(self.config, self.facts.directory, on_gpu=bool(self.config.pools.decode.gpus))

    def check_gpus(self) -> Finding:
        wanted = sum(pool.gpus * pool.most for pool in self._pools.values())
        if wanted > self.host.num_gpus:
            raise ConfigError(
                f"pools.prefill.gpus and pools.decode.gpus ask for {wanted:g} GPUs, this host has "
                f"{self.host.num_gpus}; set them to 0 for CPU, or start fewer workers",
                key="pools.prefill.gpus",
            )
        return Finding("gpus", "ok", f"{wanted:g} of {self.host.num_gpus} used; {self.host.num_cores} cores")

    def check_memory(self) -> Finding:
        """Weights, pages and process of every CPU worker fit what is free, and one request fits the pages."""
        workers, free = self._num_cpu_workers, self.host.available_bytes
        if workers == 0:
            return Finding("memory", "ok", f"{human_bytes(free)} free; pages live on the GPUs")
        fixed = self.fixed_bytes(self._num_on_cpu)
        if self._time_model is not None:
            fixed += sum(pool.most * self._kv_bytes(role) for role, pool in self._pools.items())
        if fixed > free:
            raise ConfigError(
                f"{workers} workers need {human_bytes(fixed)} for {self._fixed_words}, {human_bytes(free)} are free; "
                "start fewer workers (--prefill, --decode), free memory, or choose a smaller model",
                key="pools",
            )
        if self._time_model is not None:
            self._check_one_request_is_simulated(self._time_model)
            return Finding("memory", "ok", f"{human_bytes(free)} free; {workers} simulated workers")
        pages = self._kv_bytes(Role.DECODE if not self._pools[Role.DECODE].gpus else Role.PREFILL)
        if fixed + workers * pages > free:
            most = max(0, (free - fixed) // workers)
            raise ConfigError(
                f"cache.memory_bytes is {pages} ({human_bytes(pages)}) for each of {workers} workers; with "
                f"{human_bytes(fixed)} for {self._fixed_words} that is more than the {human_bytes(free)} that are "
                f"free; set it to at most {most}, or to 0 to let cache.memory_share decide",
                key="cache.memory_bytes",
            )
        self._check_one_request_fits(pages)
        detail = f"{human_bytes(free)} free; {workers} workers with {human_bytes(pages)} of pages each"
        if per_token := self.facts.kv_bytes_per_token(self.kv_dtype):
            detail += f", room for {self._room(pages, per_token)} in {self.kv_dtype}"
        return Finding("memory", "ok", detail)

    def check_token(self) -> Finding:
        """A Ray of our own listens on all addresses of the host; what keeps others out is its token."""
        if os.environ.get("RAY_AUTH_MODE", "token").lower() == "token":
            return Finding("token", "ok", "Ray lets nobody in without its token")
        detail, remedy = "RAY_AUTH_MODE is not token: Ray lets in whoever reaches its ports", "unset RAY_AUTH_MODE"
        if is_loopback(self.config.http.host):
            return Finding("token", "warn", detail, remedy)
        raise ConfigError(f"{detail}, and http.host is {self.config.http.host}; {remedy}", key="http.host")

    def _check_one_request_fits(self, pages: int) -> None:
        per_token = self.facts.kv_bytes_per_token(self.kv_dtype)
        context = self._max_context
        if not per_token or context is None:
            return  # the worker knows the model's shape and checks again
        kept, chunk_size = self._kept_pages(on_cpu=True), self.config.scheduling.chunk_size
        page_bytes = int(kept.page_bytes(per_token))
        needed = kept.groups.most_pages(context, chunk_size) * page_bytes
        if needed > pages:
            key = "cache.memory_bytes" if self.config.cache.memory_bytes else "cache.memory_share"
            most = kept.groups.most_tokens(pages // page_bytes, chunk_size)
            raise ConfigError(
                f"{key} gives each worker {human_bytes(pages)} of pages, one request of {context} tokens needs "
                f"{human_bytes(needed)}; raise it, or set cache.max_context to at most {most}",
                key=key,
            )

    def _room(self, pages: int, token_bytes: int) -> str:
        """For how many tokens there is room in so many bytes of pages."""
        kept = self._kept_pages(on_cpu=True)
        num_pages = pages // int(kept.page_bytes(token_bytes))
        most = f"{kept.groups.most_tokens(num_pages, self.config.scheduling.chunk_size):,}"
        if not kept.is_mixed:
            return f"{most} tokens"
        return f"one text of {most} tokens, or {kept.num_slots(num_pages):,} tokens of texts within the window"

    @property
    def _max_context(self) -> int | None:
        return self.config.cache.max_context or self.facts.max_positions

    def _kept_pages(self, *, on_cpu: bool) -> KeptPages:
        """Which pages a worker keeps of a text."""
        cache, max_context = self.config.cache, self._max_context or math.inf
        if (model := self._time_model) is not None:
            return model.kept_pages(cache.page_size, mixed=cache.mixed_windows, max_context=max_context)
        return kept_pages(
            self.facts.windows,
            self.facts.num_layers or 1,
            cache.page_size,
            on_cpu=on_cpu,
            mixed=cache.mixed_windows,
            max_context=max_context,
        )

    @property
    def _is_mixed(self) -> bool:
        """Whether workers on CPUs have pages for each kind of layers."""
        return self._kept_pages(on_cpu=True).is_mixed

    def _check_one_request_is_simulated(self, time_model: TimeModel) -> None:
        context, chunk_size = self._max_context, self.config.scheduling.chunk_size
        if context is None:
            return
        rooms = {role: time_model.tokens(time_model.pool(role)) for role in WORKER_ROLES}
        role = min(WORKER_ROLES, key=lambda role: rooms[role])
        kept = self._kept_pages(on_cpu=True)
        num_pages = kept.num_pages(rooms[role])
        if kept.groups.most_pages(context, chunk_size) > num_pages:
            room = kept.groups.most_tokens(num_pages, chunk_size)
            raise ConfigError(
                f"{self.config.model.time_model} gives a {role.value} worker room for {room} tokens, and one request "
                f"may have {context}; raise {role.value}.tokens there, or set cache.max_context to at most {room}",
                key="model.time_model",
            )

    # --- what they are made from ---------------------------------------------------------------------------------

    @cached_property
    def facts(self) -> ModelFacts:
        path = self.config.model.path
        return read_facts(path, resolve_model(path, with_weights=self._time_model is None))

    @property
    def kv_dtype(self) -> str:
        """Of K and V in the pages."""
        if self.config.cache.dtype != "auto":
            return self.config.cache.dtype
        return "bfloat16" if self._multiplies_bfloat16 else self.dtype

    @property
    def _multiplies_bfloat16(self) -> bool:
        """As `loader.choose_types` finds it, on a CPU like this host's."""
        model, own = self.config.model, self.facts.tensors_dtype
        can = self.host.multiplies_bfloat16 and model.kernels != "torch"
        is_asked = model.dtype == "bfloat16" or (model.dtype == "auto" and own == self.facts.dtype == "bfloat16")
        return can and is_asked and not self._on_gpu

    @property
    def dtype(self) -> str:
        """Of what is computed."""
        chosen = self.config.model.dtype
        if self._on_gpu:
            return (self.facts.dtype or "float32") if chosen == "auto" else chosen
        if chosen == "bfloat16" and self._multiplies_bfloat16:  # whose sums are float32 all the same
            return "float32"
        return chosen if chosen in ("float16", "bfloat16") else "float32"

    @property
    def _stored_dtype(self) -> str:
        """Of weights in memory."""
        chosen = self.config.model.dtype
        if self._on_gpu:
            return self.dtype
        return chosen if chosen in ("float16", "bfloat16") else self.facts.tensors_dtype

    @property
    def _on_gpu(self) -> bool:
        return any(pool.gpus for pool in self._pools.values())

    @property
    def _security(self) -> SecurityConfig:
        """With the path of the certificates as other processes of this host need it."""
        security = self.config.security
        if not security.certificates:
            return security
        path = Path(security.certificates).expanduser()
        return dataclasses.replace(security, certificates=str(path.absolute() if self.local else path))

    @property
    def _http(self) -> HttpConfig:
        """With the path of the API keys as the router needs it, which is on this host."""
        http = self.config.http
        if not http.api_keys_file:
            return http
        return dataclasses.replace(http, api_keys_file=str(Path(http.api_keys_file).expanduser().absolute()))

    @property
    def _model(self) -> ModelConfig:
        """With the path of the time model as workers of this host need it."""
        return self._placed(self.config.model, "time_model", "model.time_model")

    @property
    def _metrics(self) -> MetricsConfig:
        """With the directory of step logs as workers of this host need it."""
        return self._placed(self.config.metrics, "step_log", "metrics.step_log")

    @property
    def _logging(self) -> LoggingConfig:
        """With the directory of logs as all processes, and `tandem logs`, need it."""
        return self._placed(self.config.logging, "directory", "logging.directory")

    @property
    def _batches(self) -> BatchesConfig:
        """With their directory as routers need it."""
        return self._placed(self.config.batches, "directory", "batches.directory")

    def _placed(self, section: _Section, name: str, key: str) -> _Section:
        """The section with its path `name`, if it has one, as the processes that use it need it."""
        if not (place := getattr(section, name)):
            return section
        changed: dict[str, Any] = {name: self._on_each_node(place, key)}
        return dataclasses.replace(section, **changed)

    def _on_each_node(self, place: str, key: str) -> str:
        """A path as the cluster's processes need it, whose working directories differ. Raises `ConfigError`."""
        path = Path(place).expanduser()
        if not self.local and not path.is_absolute():
            raise ConfigError(f"{key} is {path}; give an absolute path, the same on every node", key=key)
        return str(path.absolute())

    @property
    def _cache(self) -> CacheConfig:
        """With the directory for pages as workers of this host need it."""
        cache = self.config.cache
        if not cache.disk_path:
            return cache
        path = Path(cache.disk_path).expanduser()
        return dataclasses.replace(cache, disk_path=str(path.absolute() if self.local else path))

    @property
    def _speculation(self) -> SpeculationConfig:
        """With the draft model as workers of this host find it."""
        wanted = self.config.speculation
        if not wanted.draft_model or not self.local:
            return wanted
        return dataclasses.replace(wanted, draft_model=str(resolve_model(wanted.draft_model)))

    @property
    def _pools(self) -> dict[Role, PoolConfig]:
        return {role: getattr(self.config.pools, role) for role in WORKER_ROLES}

    @property
    def _num_on_cpu(self) -> dict[Role, int]:
        return {role: pool.most for role, pool in self._pools.items() if not pool.gpus}

    @property
    def _num_cpu_workers(self) -> int:
        return sum(self._num_on_cpu.values())

    @cached_property
    def _time_model(self) -> TimeModel | None:
        """Of a simulated engine. Raises `ConfigError`."""
        model = self.config.model
        return read_time_model(Path(model.time_model).expanduser()) if model.engine == "simulated" else None

    @cached_property
    def weight_bytes(self) -> int:
        if self._time_model is not None:
            return 0
        return weight_bytes(self.facts, self._stored_dtype, self.config.model.quantize)

    @cached_property
    def _draft_bytes(self) -> int:
        return draft_bytes(self.config)

    def fixed_bytes(self, num_workers: Mapping[Role, int]) -> int:
        """What so many workers take of their host's memory beside their pages."""
        each = self.weight_bytes + WORKER_OVERHEAD_BYTES + self._host_bytes
        return sum(num_workers.values()) * each + num_workers.get(Role.DECODE, 0) * self._draft_bytes

    @property
    def _fixed_words(self) -> str:
        return "weights, cache.host_bytes and processes" if self._host_bytes else "weights and processes"

    @property
    def _host_bytes(self) -> int:
        """Of copies of pages, that each worker on a CPU keeps."""
        host_bytes = self.config.cache.host_bytes
        return 0 if host_bytes and self._is_mixed else host_bytes  # a mixed model has no copies

    def _kv_bytes(self, role: Role) -> int:
        """Bytes of pages for one worker; 0: its own node decides (GPU memory, or other hosts)."""
        if self._time_model is not None:
            kept = self._kept_pages(on_cpu=True)
            tokens = self._time_model.tokens(self._time_model.pool(role))
            return kept.num_pages(tokens) * kept.groups.page_size * SIMULATED_TOKEN_BYTES
        cache, pool = self.config.cache, self._pools[role]
        if cache.memory_bytes or pool.gpus or not self.local:
            return cache.memory_bytes
        fixed = self.fixed_bytes(self._num_on_cpu)
        return share_of_memory(self.config, self.host.available_bytes, fixed, self._num_cpu_workers)

    def _equal_share(self) -> int:
        if not self.local:
            return 0
        return max(1, self.host.num_cores // sum(pool.most for pool in self._pools.values()))


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@cache
def _owners() -> Mapping[str, Sequence[str]]:
    """Which distributions each package is of. To go through the files of all of them takes half a second."""
    return metadata.packages_distributions()


def share_of_memory(config: Config, available_bytes: int, fixed_bytes: int, num_workers: int) -> int:
    """Bytes of KV pages for one of `num_workers` equal CPU workers of a host.

    `fixed_bytes` of all together are taken off first; `cache.memory_share` of the rest is divided,
    `cache.max_memory_bytes` is the most that one gets.
    """
    rest = max(0, available_bytes - fixed_bytes)
    share = int(config.cache.memory_share * rest) // num_workers
    return min(share, config.cache.max_memory_bytes) if config.cache.max_memory_bytes else share


def share_of_gpu(config: Config, total_bytes: int, free_bytes: int, weight_bytes: int, gpus: float) -> int:
    """Bytes of KV pages for a worker that has `gpus` of a GPU; 0 or less where its weights fill that part.

    Several workers share one GPU when each asks for less than one; of a part that is its own a worker gets as much
    whether the others have begun or not. The weights come before the pages.
    """
    return int((min(free_bytes, total_bytes * gpus) - weight_bytes) * config.cache.memory_share)


def check_room(config: Config, host: Host, kv_bytes: dict[Role, int], num_added: dict[Role, int]) -> None:
    """Whether `host` has memory for `num_added` more workers of each role. Routers, which hold no pages, always fit.

    Raises:
        ConfigError: it has not; says how many fit.
    """
    added = {role: count for role, count in num_added.items() if kv_bytes.get(role)}
    pages = sum(count * kv_bytes[role] for role, count in added.items())
    needed = Preflight(config, host).fixed_bytes(added) + pages
    if needed > host.available_bytes:
        raise ConfigError(
            f"{sum(num_added.values())} more workers need {human_bytes(needed)}, "
            f"{human_bytes(host.available_bytes)} are free; scale to fewer, "
            "or start again with a smaller cache.memory_bytes",
            key="cache.memory_bytes",
        )
