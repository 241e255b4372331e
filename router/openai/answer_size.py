"""How much an answer shows beside its text: log-probabilities and token ids. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from router.openai.refusal import refuse
from router.openai.schema import ParsedRequest
from router.request.request import Request, Usage
from tandem.core.config import LimitsConfig


def scored_entries(parsed: ParsedRequest, num_tokens: int) -> int:
    """The log-probabilities that an answer has of prompts of so many tokens: each choice of a completion has them."""
    return num_tokens * (parsed.num_scored + 1) * _num_shown(parsed)


def answer_entries(parsed: ParsedRequest, usages: Sequence[Usage]) -> int:
    """All that a whole answer has."""
    if parsed.pools:
        return len(usages) * parsed.vector_size
    num_prompt = sum(usage.num_prompt_tokens for usage in usages)
    num_output = sum(usage.num_output_tokens for usage in usages)
    of_prompt = scored_entries(parsed, num_prompt)
    if parsed.echo or parsed.return_token_ids:
        of_prompt += num_prompt * _num_shown(parsed)
    return of_prompt + num_output * (parsed.sampling.num_logprobs + 1 + parsed.return_token_ids)


def check_scored(parsed: ParsedRequest, requests: Sequence[Request], limits: LimitsConfig) -> None:
    """Refuse prompts whose log-probabilities would make an answer too large. Raises `InvalidRequestError`."""
    num_tokens = sum(len(request.prompt_ids) for request in requests)
    if (num_entries := scored_entries(parsed, num_tokens)) > limits.max_prompt_logprobs:
        choices = f" in each of {_num_shown(parsed)} choices" if _num_shown(parsed) > 1 else ""
        refuse(
            "prompt_logprobs" if parsed.num_prompt_logprobs >= 0 else "logprobs",
            f"of {num_tokens} prompt tokens with {parsed.num_scored + 1} for each{choices} are {num_entries}; at most "
            f"{limits.max_prompt_logprobs} are given at once (limits.max_prompt_logprobs): send fewer or shorter "
            "prompts, or ask for fewer",
        )


def _num_shown(parsed: ParsedRequest) -> int:
    return parsed.num_shown if parsed.kind == "completion" else 1
