"""Echoes with log-probabilities over the whole path, as evaluation harnesses ask for them, beside transformers' own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.core.model_path import resolve_model
from tests.scenarios.processes import ProcessCluster


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(
        resolve_model("embedded"), dtype=torch.float32, attn_implementation="eager"
    ).eval()


def ask(cluster: ProcessCluster, **body: Any) -> dict[str, Any]:
    response = httpx.post(f"{cluster.url}/v1/completions", json={"model": "any", **body}, timeout=60)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def expected(model: Any, ids: list[int]) -> tuple[list[float], list[bool]]:
    """Each token's log-probability but the first's, and whether it was the likeliest."""
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1], dim=-1)
    own = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return own.tolist(), (own >= logprobs.max(dim=-1).values - 1e-4).tolist()


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_log_probabilities_are_transformers_own_whoever_computes_the_prompt(
    cluster: ProcessCluster, model: Any, max_tokens: int
) -> None:
    """Prompts as token ids, several in a body and many at once: some are handed off, some are computed at decode. The
    second round finds them in the prefix caches."""
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("embedded"))
    texts = [("Once upon a time there was a " + "very " * n + "small cat. ") * (1 + n % 6) for n in range(12)]
    prompts = [tokenizer(text).input_ids for text in texts]
    fields: dict[str, Any] = {"max_tokens": max_tokens, "echo": True, "logprobs": 1, "temperature": 0}
    for _ in range(2):
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda n: ask(cluster, prompt=prompts[n : n + 2], **fields), range(0, 12, 2)))
        choices = [choice for answer in answers for choice in answer["choices"]]
        assert len(choices) == len(prompts)
        for choice, ids in zip(choices, prompts, strict=True):
            found = choice["logprobs"]["token_logprobs"]
            wanted, is_greedy = expected(model, ids)
            assert found[0] is None
            assert found[1 : len(ids)] == pytest.approx(wanted, abs=1e-4)
            assert len(found) == len(ids) + max_tokens
            tops = choice["logprobs"]["top_logprobs"][1 : len(ids)]
            is_top = [own >= max(top.values()) - 1e-4 for own, top in zip(found[1 : len(ids)], tops, strict=True)]
            assert is_top == is_greedy
        assert sum(answer["usage"]["completion_tokens"] for answer in answers) == len(prompts) * max_tokens
    cluster.wait_idle()
