"""Log-probabilities of given tokens, as torch's own log-softmax has them."""

from __future__ import annotations

import torch

from tandem.core.errors import InternalError
from tandem.core.prompt_scores import TokenScore
from tandem.engine.scorer import score_rows


def test_each_token_has_its_log_probability_its_rank_and_the_likeliest() -> None:
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(0))
    token_ids = [(7 * row) % 300 for row in range(50)]
    scored = score_rows(logits, token_ids, 4)
    assert isinstance(scored, list)
    logprobs = torch.log_softmax(logits, dim=-1)
    for row, (token_id, score) in enumerate(zip(token_ids, scored, strict=True)):
        order = logprobs[row].argsort(descending=True).tolist()
        assert score.logprob == float(logprobs[row, token_id])
        assert order[score.rank - 1] == token_id
        assert [i for i, _ in score.top_logprobs] == order[:4]
        assert [p for _, p in score.top_logprobs] == logprobs[row][order[:4]].tolist()


def test_no_more_likeliest_than_the_vocabulary_has_and_none_where_none_are_wanted() -> None:
    logits = torch.tensor([[0.0, 1.0]])
    scored = score_rows(logits, [1], 9), score_rows(logits, [1], 0)
    assert [[len(score.top_logprobs) for score in of_one if isinstance(score, TokenScore)] for of_one in scored] == [
        [2], [0]
    ]  # fmt: skip


def test_a_row_that_is_no_number_is_an_error() -> None:
    logits = torch.zeros(3, 5)
    logits[1, 2] = float("nan")
    assert isinstance(score_rows(logits, [0, 0, 0], 1), InternalError)
    assert isinstance(score_rows(torch.zeros(3, 5), [0, 0, 0], 1), list)
