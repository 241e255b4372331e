"""What the router's tests share: a checkpoint without weights, a router with its scripted workers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai

from router.server import RouterServer
from tandem.core import config as configuration
from tandem.core.tokenizer import _byte_of_char
from tests.support.scripted_pool import ScriptedPool
from tests.support.scripted_worker import WAIT_S, ScriptedDecode, ScriptedPrefill, ScriptedWorker
from tests.support.waiting import wait_until


@dataclass
class Site:
    """One router with its workers."""

    url: str
    pool: ScriptedPool
    prefill: ScriptedPrefill
    decode: ScriptedDecode
    server: RouterServer

    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30, **options)

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=30)

    def add(self, *workers: ScriptedWorker) -> None:
        """Let workers join, and wait until the router has met them."""
        self.pool.add(*workers)
        for worker in workers:
            self.until_shown(worker.info.worker_id, state="ready")

    def drain(self, worker: ScriptedWorker) -> None:
        """The supervisor lets it leave in order."""
        self.pool.states[worker.info.worker_id] = "draining"
        self.pool.push()

    def kill(self, *workers: ScriptedWorker) -> None:
        """Their processes end, and the supervisor sees it."""
        for worker in workers:
            worker.kill()
        self.seen_to_end(*workers)

    def seen_to_end(self, *workers: ScriptedWorker) -> None:
        """The supervisor tells that these processes have ended, of which each has an incarnation of its own."""
        self.pool.ended += [worker.info.incarnation for worker in workers]
        self.given_up(*workers)

    def given_up(self, *workers: ScriptedWorker) -> None:
        """The supervisor has decided to kill these processes, and has not seen their ends."""
        self.pool.states.update({worker.info.worker_id: "failed" for worker in workers})
        self.pool.push()

    def reach_again(self, worker: ScriptedDecode) -> None:
        """The same process, which had only been out of reach."""
        place = self.pool.workers.index(worker)
        self.pool.workers[place] = ScriptedDecode(
            worker.info.worker_id, incarnation=worker.info.incarnation, port=worker.port
        )

    def post(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        with self.http() as client:
            return client.post(path, json={"model": "toy", **body})

    def wait_ready(self, status: int = 200) -> None:
        with self.http() as client:
            wait_until(lambda: client.get("/health").status_code, "/health", WAIT_S, wanted=lambda seen: seen == status)

    def until_metric(self, name: str, value: float) -> None:
        """Until a sample, by its name and labels, has this value."""
        wait_until(lambda: self.metrics().get(name), f"{name} {value:g}", WAIT_S, wanted=lambda seen: seen == value)

    def until_shown(self, worker_id: str, **facts: object) -> None:
        """Until the cluster's page says this of a worker."""

        def shown() -> dict[str, Any]:
            pools = cluster(self)
            return next((w for pool in ("prefill", "decode") for w in pools[pool] if w["id"] == worker_id), {})

        wait_until(shown, f"{worker_id} with {facts}", WAIT_S, wanted=lambda worker: facts.items() <= worker.items())

    def metrics(self, key: str = "none") -> dict[str, float]:
        """Every sample by its name and labels, as in the exposition. `key`: of the API, where one is needed."""
        with self.http(headers={"Authorization": f"Bearer {key}"}) as client:
            lines = client.get("/metrics").text.splitlines()
        return {key: float(value) for key, value in (ln.rsplit(" ", 1) for ln in lines if not ln.startswith("#"))}


@contextlib.contextmanager
def opened_site(
    checkpoint: Path,
    overrides: dict[str, Any] | None = None,
    *,
    with_workers: bool = True,
    told: bool = True,
    max_context: int = 256,
    key_digests: frozenset[bytes] = frozenset(),
) -> Iterator[Site]:
    """A router with `overrides` of the configuration (dotted names) and a pair of workers, for a `with` block. One that
    is not `told` has heard of no membership yet."""
    # Handoffs are scripted here, whatever waits at prefill; test_http_mixed.py has the mixed pool.
    base = {"model.served_names": ["toy", "toy/alias"], "transport.lease_s": 1.0, "scheduling.mixed_pool": False}
    config = configuration.load(None, {**base, **(overrides or {})})
    server = RouterServer(config, model_dir=checkpoint, key_digests=key_digests)
    info = server.start()
    pool = ScriptedPool(info.control_address)
    site = Site(info.http_url, pool, ScriptedPrefill("prefill-0"), ScriptedDecode("decode-0"), server)
    for worker in (site.prefill, site.decode):
        worker.info.max_context = max_context
    try:
        if with_workers:
            pool.add(site.prefill, site.decode)
            site.wait_ready()
        elif told:
            pool.push()
        yield site
    finally:
        site.server.stop(drain_s=0.2)
        site.pool.close()


def in_background(site: Site, **body: Any) -> Any:
    """A completion that is under way; `.result()` is its response."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(lambda: site.post(**{"prompt": "x", "max_tokens": 5, **body}))
    pool.shutdown(wait=False)
    return future


def frames(response: httpx.Response) -> list[Any]:
    return [json.loads(f[6:]) for f in response.text.split("\n\n") if f.startswith("data: {")]


def cluster(site: Site) -> Any:
    with site.http() as client:
        return client.get("/v1/cluster").json()


BOS, EOS = 300, 0


CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def write_checkpoint(
    directory: Path, *, context: int = 256, template: str = CHAT_TEMPLATE, specials: Sequence[str] = ()
) -> Path:
    """A checkpoint without weights: a token for each byte (NUL is 299), `</s>`, `<s>`, and a chat template.

    `specials` are more special tokens, from 301 on.
    """
    directory.mkdir(parents=True, exist_ok=True)
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    more = {text: BOS + 1 + number for number, text in enumerate(specials)}
    vocab = {char: byte or 299 for char, byte in _byte_of_char().items()}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": text, **special} for text, i in {"</s>": EOS, "<s>": BOS, **more}.items()
        ],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab | {"</s>": EOS, "<s>": BOS} | more, "merges": []},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": template})
    )
    (directory / "config.json").write_text(json.dumps({"vocab_size": 512, "max_position_embeddings": context}))
    return directory
