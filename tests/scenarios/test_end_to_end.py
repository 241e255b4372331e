"""The whole path over HTTP: real processes, real pages over UCX, texts that are known beforehand."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.simulated.waterfalls import judged, parts_of
from tandem.bench.load.trace_entry import TraceEntry
from tandem.bench.load.workload import plain_vocabulary
from tandem.bench.session import Session, Shape, Target, Workload
from tandem.core.config import EMBEDDED_MODEL
from tandem.core.model_path import resolve_model
from tandem.core.tokenizer import Tokenizer
from tests.scenarios.client import complete, events, stream
from tests.scenarios.processes import ProcessCluster, running

STORIES = Path(__file__).resolve().parents[3] / "shared" / "data" / "stories260K"
REFERENCE = resolve_model("embedded") / "reference.json"
SERVED = {"model": {"served_names": ["*"]}}


@pytest.fixture(scope="module")
def two_by_two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    """2P2D with a short lease, all requests may be tried again; one process of each kind is started as users start it.
    Leave it idle and whole."""
    config = {**SERVED, "transport": {"lease_s": 3.0}, "limits": {"retry_budget": 1.0}}
    with running(tmp_path_factory.mktemp("2p2d"), 2, 2, config=config, anew=True) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def handing_off(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    """1P1D in which every prompt is handed off, also a lone one."""
    config = {**SERVED, "scheduling": {"mixed_pool": False}}
    with running(tmp_path_factory.mktemp("handing-off"), config=config) as cluster:
        yield cluster
        cluster.wait_idle()


@pytest.fixture(scope="module")
def oracle() -> Any:
    """The embedded model in transformers itself: float32, eager attention."""
    model = AutoModelForCausalLM.from_pretrained(
        resolve_model("embedded"), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("embedded"))

    def generate(prompt: str, num_tokens: int) -> list[int]:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            out = model.generate(ids, max_new_tokens=num_tokens, do_sample=False, eos_token_id=None)
        return list(out[0, ids.shape[1] :].tolist())

    return generate


def references() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(REFERENCE.read_text())["entries"]
    return found


@pytest.mark.parametrize("case", references(), ids=lambda case: f"{len(case['prompt_token_ids'])}-tokens")
@pytest.mark.parametrize("ask", [complete, stream], ids=["whole", "streamed"])
def test_the_embedded_model_gives_its_reference_text(
    handing_off: ProcessCluster, case: dict[str, Any], ask: Any
) -> None:
    before = handing_off.metric("tandem_handoff_seconds_count")
    answer = ask(handing_off.url, case["prompt_token_ids"], max_tokens=96)
    assert handing_off.metric("tandem_handoff_seconds_count") == before + (len(case["token_ids"]) > 1)
    assert answer.token_ids == [case["token_ids"]]
    assert answer.texts == [case["text"]]
    assert answer.finish_reasons == [case["finish_reason"]]


@pytest.mark.parametrize("case", [c for c in references() if "messages" in c], ids=["story", "recall"])
def test_a_chat_gives_its_reference_text(handing_off: ProcessCluster, case: dict[str, Any]) -> None:
    with OpenAI(base_url=f"{handing_off.url}/v1", api_key="unused") as client:
        whole = client.chat.completions.create(model="any", messages=case["messages"], max_tokens=96, temperature=0)
        pieces = client.chat.completions.create(
            model="any", messages=case["messages"], max_tokens=96, temperature=0, stream=True
        )
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert whole.choices[0].message.content == text == case["text"]
    assert whole.choices[0].finish_reason == case["finish_reason"]
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(case["prompt_token_ids"])


@pytest.mark.faults
@pytest.mark.skipif(not STORIES.exists(), reason=f"{STORIES} is not there")
def test_a_published_model_gives_its_published_text(tmp_path: Path) -> None:
    reference = json.loads((STORIES / "greedy_reference.json").read_text())
    expected = reference["greedy_ids"]
    with running(tmp_path, model=str(STORIES), config=SERVED) as cluster:
        for ask in (complete, stream):
            answer = ask(cluster.url, [1], max_tokens=len(expected))
            assert answer.token_ids == [expected]
            assert answer.texts[0].strip() == reference["text"].strip()
        cluster.wait_idle()


def test_pages_travel_by_torch_distributed_too(tmp_path: Path) -> None:
    """`nccl`, in its gloo form on the CPU, carries the same pages."""
    handed_off = {"scheduling": {"mixed_pool": False}, "transport": {"name": "nccl"}}
    with running(tmp_path, config={**SERVED, **handed_off}) as cluster:
        for case in references():
            answer = stream(cluster.url, case["prompt_token_ids"], max_tokens=96)
            assert answer.token_ids == [case["token_ids"]]
        assert cluster.metric("tandem_handoff_seconds_count") >= len(references()) - 1
        cluster.wait_idle()


def test_many_at_once_each_get_what_transformers_gives(cluster: ProcessCluster, oracle: Any) -> None:
    """Ragged batches on both sides, prompts of one to many pages, handed off or computed at decode."""

    def num_computed() -> tuple[float, float]:
        local = cluster.metric("tandem_local_prefills_total", reason="mixed_pool")
        return local, cluster.metric("tandem_handoff_seconds_count")

    local_before, handed_off_before = num_computed()
    prompts = [("Once upon a time there was a " + "very " * n + "small cat. ") * (1 + n % 7) for n in range(16)]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda p: stream(cluster.url, p, max_tokens=24, ignore_eos=True), prompts))
    wrong = [n for n, p in enumerate(prompts) if answers[n].token_ids[0] != oracle(p, 24)]
    assert wrong == []
    assert len({tuple(a.token_ids[0]) for a in answers}) > 4, "prompts of no effect would pass for anything"
    cluster.wait_idle()
    local, handed_off = num_computed()
    assert local > local_before
    assert handed_off > handed_off_before
    assert (local - local_before) + (handed_off - handed_off_before) == len(prompts)


SEEDED = {"temperature": 1.0, "top_p": 0.9, "seed": 11, "presence_penalty": 0.5, "max_tokens": 40, "ignore_eos": True}


def test_a_seeded_request_is_the_same_on_1p1d_and_on_2p2d(cluster: ProcessCluster, two_by_two: ProcessCluster) -> None:
    prompt = "Tom and Mia went to the park. "
    one = complete(cluster.url, prompt, n=3, **SEEDED)
    with ThreadPoolExecutor(6) as pool:
        many = list(pool.map(lambda _: stream(two_by_two.url, prompt, n=3, **SEEDED), range(6)))
    assert all(answer.token_ids == one.token_ids for answer in many)
    assert len({tuple(ids) for ids in one.token_ids}) == 3, "choices must differ"
    other = complete(cluster.url, prompt, n=3, **{**SEEDED, "seed": 12})
    assert other.token_ids != one.token_ids
    two_by_two.wait_idle()


def test_work_is_spread_over_both_pools(two_by_two: ProcessCluster) -> None:
    with ThreadPoolExecutor(12) as pool:
        prompts = [f"Number {n}. " * 30 for n in range(12)]
        list(pool.map(lambda p: complete(two_by_two.url, p, max_tokens=30, ignore_eos=True), prompts))
    pages = two_by_two.pages()
    assert all(counts["cached"] > 0 for counts in pages.values()), pages
    two_by_two.wait_idle()


def test_log_probabilities_agree_with_the_model(cluster: ProcessCluster, oracle: Any) -> None:
    body = {"model": "*", "prompt": "The dog", "max_tokens": 5, "temperature": 0, "logprobs": 3}
    choice = httpx.post(f"{cluster.url}/v1/completions", json=body).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert len(logprobs["token_logprobs"]) == 5
    for chosen, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert chosen == pytest.approx(max(top.values()), abs=1e-6), "greedy takes the likeliest"
        assert len(top) == 3


def test_a_stop_string_ends_the_text_before_it(cluster: ProcessCluster) -> None:
    plain = complete(cluster.url, "Once upon a time", max_tokens=40, ignore_eos=True)
    stop = plain.texts[0][20:26]
    answer = complete(cluster.url, "Once upon a time", max_tokens=40, stop=[stop], ignore_eos=True)
    assert answer.texts[0] == plain.texts[0][: plain.texts[0].index(stop)]
    assert answer.finish_reasons == ["stop"]


def test_a_choice_at_a_stop_string_is_generated_no_further_and_the_other_is_whole(cluster: ProcessCluster) -> None:
    asked: dict[str, Any] = {"max_tokens": 400, "n": 2, "seed": 7, "temperature": 1.0, "ignore_eos": True}
    plain = complete(cluster.url, "Once upon a time", **asked)
    stop = next(text for at in range(20, 200) if (text := plain.texts[0][at : at + 12]) not in plain.texts[1])
    cluster.wait_idle()
    before = cluster.metric("tandem_decode_tokens_total")
    answer = complete(cluster.url, "Once upon a time", stop=[stop], **asked)
    assert answer.texts == [plain.texts[0][: plain.texts[0].index(stop)], plain.texts[1]]
    assert answer.finish_reasons == ["stop", "length"]
    cluster.wait_idle()
    assert cluster.metric("tandem_decode_tokens_total") - before < 1.5 * 400


def test_one_token_needs_no_handoff(cluster: ProcessCluster) -> None:
    before = cluster.metric("tandem_handoff_seconds_count")
    answer = complete(cluster.url, "A short prompt that nobody else uses. " * 4, max_tokens=1)
    assert answer.finish_reasons == ["length"]
    assert len(answer.token_ids[0]) == 1
    cluster.wait_idle()
    assert cluster.metric("tandem_handoff_seconds_count") == before


def test_a_client_that_goes_away_frees_everything_within_a_second(cluster: ProcessCluster) -> None:
    for event in events(cluster.url, "Once upon a time", max_tokens=1500, ignore_eos=True):
        assert event is not None
        if event["choices"][0]["token_ids"]:
            break  # leaving the loop closes the connection
    cluster.wait_idle(timeout_s=3.0)


def test_a_whole_request_is_cancelled_too(cluster: ProcessCluster) -> None:
    body = {"model": "*", "prompt": "Once", "max_tokens": 1500, "ignore_eos": True}
    before = cluster.metric("tandem_decode_tokens_total")
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=0.4)
    cluster.wait_idle(timeout_s=3.0)
    assert cluster.metric("tandem_decode_tokens_total") < before + 1500


def test_preemption_changes_no_token(tmp_path: Path, cluster: ProcessCluster) -> None:
    """Six long answers on a decode worker that holds four of them."""
    prompts = [f"Story {n}: once upon a time" for n in range(6)]
    fields = {"max_tokens": 200, "ignore_eos": True}
    expected = [complete(cluster.url, p, **fields).token_ids for p in prompts]
    page_bytes = cluster.status()["decode"][0]["layout"]
    size = 2 * 4 * page_bytes["num_layers"] * page_bytes["num_kv_heads"] * page_bytes["head_dim"]
    tight = {**SERVED, "cache": {"page_size": 32, "prefix_cache": False}}
    with running(tmp_path, 1, 0, config=tight) as small:
        small.start_worker("decode", 0, "--kv-bytes", str(size * 32 * 28)).wait_ready()
        small.publish()
        small.wait_healthy()
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda p: stream(small.url, p, **fields), prompts))
        assert small.metric("tandem_preemptions_total") > 0
        assert [a.token_ids for a in answers] == expected
        small.wait_idle()


@pytest.mark.faults  # test_served_cache_dtype.py has workers with pages of another type
def test_workers_of_different_layouts_are_never_paired(tmp_path: Path) -> None:
    with running(tmp_path, 1, 0, config=SERVED) as odd:
        other = tmp_path / "other.yaml"
        other.write_text("cache:\n  page_size: 64\n")
        odd.start_worker("decode", 0, "--config", str(other)).wait_ready()
        odd.publish()
        odd.wait_for(lambda: odd.status()["decode"], "the decode worker")
        answer = httpx.post(f"{odd.url}/v1/completions", json={"model": "*", "prompt": "x"}, timeout=20)
        assert answer.status_code == 503
        assert "page_size" in answer.text, "the answer says what differs"


@pytest.mark.faults
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_killed_worker_ends_no_request_wrongly(
    cluster: ProcessCluster, two_by_two: ProcessCluster, role: str
) -> None:
    """Killed in the middle of eight streams on 2P2D: all go on with the very tokens of an undisturbed run."""
    prompts = [f"Tale {n} of {role}: " + "the bird sang. " * (3 * n) for n in range(8)]
    fields = {"max_tokens": 150, "ignore_eos": True, "temperature": 0.8, "seed": 6}
    expected = [complete(cluster.url, p, **fields).token_ids for p in prompts]
    started = threading.Semaphore(0)

    def ask(prompt: str) -> tuple[list[int], bool]:
        ids: list[int] = []
        done = False
        for event in events(two_by_two.url, prompt, **fields):
            if event is None:
                done = True
                continue
            assert "error" not in event, event
            ids += event["choices"][0]["token_ids"] or []
            started.release()
        return ids, done

    with ThreadPoolExecutor(8) as pool:
        running_requests = [pool.submit(ask, p) for p in prompts]
        for _ in range(24):
            assert started.acquire(timeout=30)
        two_by_two.workers[f"{role}-0"].end()
        answers = [r.result(timeout=60) for r in running_requests]
    assert [[ids] for ids, _ in answers] == expected
    assert all(done for _, done in answers)
    two_by_two.wait_idle()
    # It comes back under a new incarnation, and takes part again.
    two_by_two.start_worker(role, 0).wait_ready()
    two_by_two.publish()
    two_by_two.wait_for(lambda: all(w["state"] == "ready" for w in two_by_two.status()[role]), "the new incarnation")
    assert complete(two_by_two.url, prompts[0], **fields).token_ids == expected[0]


#: Parts of a request's way; each is one by itself, and they lie side by side.
PARTS = {"waits for router", "read", "tokenise", "queue", "waits for prefill", "prefill", "handoff", "decode", "send"}


async def test_where_the_time_of_each_request_went_adds_up(cluster: ProcessCluster) -> None:
    """Of a burst of 24 requests, 16 at a time, most of which wait: named parts without a gap, and no more than 2 % of
    what each client waited without a name, however busy this machine is."""
    vocabulary = plain_vocabulary(Tokenizer.from_dir(resolve_model(EMBEDDED_MODEL)))
    session = Session(Target(cluster.url), Workload([TraceEntry(32, 32)] * 24, vocabulary, num_warm_up=1))
    await session.open()
    load = await session.measure(Shape(concurrency=16))
    assert [record.failure for record in load.records] == [None] * 24
    parts = await parts_of(cluster.url, load.records)
    assert judged(parts).num == 24
    for _, told in parts:
        assert {span["name"] for span in told["spans"]} <= PARTS
        age_s = told["age_s"]
        assert all(0.0 <= work["begin_s"] <= work["end_s"] <= 1.01 * age_s for work in told["work"]), told["work"]


def test_idle_processes_cost_nothing(cluster: ProcessCluster) -> None:
    """Under 2 % of a core each over three seconds, right after work."""
    complete(cluster.url, "Once upon a time", max_tokens=20)
    cluster.wait_idle()
    processes = [psutil.Process(p.pid) for p in [cluster.router, *cluster.workers.values()]]
    before = [sum(p.cpu_times()[:2]) for p in processes]
    threading.Event().wait(3.0)  # the measurement itself
    used = [sum(p.cpu_times()[:2]) - b for p, b in zip(processes, before, strict=True)]
    assert max(used) < 3.0 * 0.02 * 2, used
