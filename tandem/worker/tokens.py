"""A sampled token as it travels."""

from __future__ import annotations

from kvtransfer.protocol.messages import AttemptKey
from tandem.core.sampling import SampledToken
from tandem.rpc.v1 import common_pb2 as pb
from tandem.worker.sequence import FinishReason
from tandem.worker.wire import FINISH_REASONS


def token_event(key: AttemptKey, choice: int, index: int, token: SampledToken, ended: FinishReason | None) -> pb.Token:
    """The `index`th token of a choice; `ended` is set on its last one."""
    return pb.Token(
        request_id=key.request_id,
        attempt=key.attempt,
        choice=choice,
        index=index,
        token_id=token.token_id,
        finish_reason=FINISH_REASONS[ended],
        logprob=token.logprob or 0.0,
        top_logprobs=[pb.TokenLogprob(token_id=i, logprob=p) for i, p in token.top_logprobs],
    )
