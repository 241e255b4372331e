"""The server that is to be measured: is it there, does it let us in, does it know the model?"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.bench.load.drive import PATH, answer_error, record_of
from tandem.bench.load.http_client import BROKEN, TIMED_OUT, UNREACHABLE, LoadClient, Outcome
from tandem.bench.load.workload import Job, body_of
from tandem.core.client_key import KEY_VARIABLES, api_key
from tandem.core.errors import ConfigError, TandemError

_OK, _UNAUTHORIZED, _FORBIDDEN, _NOT_FOUND = 200, 401, 403, 404
_LIST_S = 20.0


@dataclass(frozen=True)
class ServedModel:
    """What the server says of its model."""

    name: str
    max_model_len: int | None  # tokens of prompt and output; `None`: it does not say
    server: str  # its `Server` header


#: The path and the body of a small request to a model of this name.
FirstRequest = Callable[[str], tuple[str, bytes]]


def one_token(vocabulary: Sequence[int], *, ignore_eos: bool) -> FirstRequest:
    """One token after a prompt of one."""
    job = Job(0, tuple(vocabulary[:1]), 1)
    return lambda model: (PATH, body_of(job, model, ignore_eos=ignore_eos))


async def connected(
    client: LoadClient, url: str, model: str | None, *, first: FirstRequest | None = None
) -> ServedModel:
    """Ask for the models, and send the `first` request where there is one.

    `model` is the first that is served where it is `None`.

    Raises:
        ConfigError: nobody answers at `url`, it wants another API key, or does not serve `model`.
        TandemError: it does not answer as a completion server does.
    """
    answer = await _in_time(client, client.message("GET", "/v1/models"), _LIST_S)
    if answer.status == TIMED_OUT:
        raise ConfigError(f"{url}/v1/models: {answer.why}; is it busy, or another server? See --url", key="--url")
    _check_access(answer, url)
    served = _listing(answer)
    if model is None and not served:
        raise ConfigError(f"{url}/v1/models answers {answer.status} and names no model: give --model", key="--model")
    name = model or str(served[0]["id"])
    if first is not None:
        await _try_one(client, url, name, served, first)
    entry = next((entry for entry in served if entry.get("id") == name), {})
    return ServedModel(name, entry.get("max_model_len"), answer.server)


async def _try_one(
    client: LoadClient, url: str, model: str, served: Sequence[dict[str, Any]], first: FirstRequest
) -> None:
    answer = await _in_time(client, client.message("POST", *first(model)), client.timeout_s)
    if answer.status == TIMED_OUT:
        raise ConfigError(
            f"{url}: {answer.why} to a first request for one token; give it longer with --timeout", key="--timeout"
        )
    _check_access(answer, url)
    if answer.status == _NOT_FOUND:
        names = ", ".join(str(entry.get("id")) for entry in served)
        raise ConfigError(f"{url} answers: {answer_error(answer)}; it serves: {names or 'nothing'}", key="--model")
    record = record_of(Job(0, (), 1), answer, began_s=answer.sent_s)
    if not record.is_good:
        raise TandemError(f"a first request to {url} failed ({record.failure}): {record.message}")


async def _in_time(client: LoadClient, message: bytes, limit_s: float | None) -> Outcome:
    """One answer; a request that takes longer than `limit_s`, or than the client waits, is broken off, `TIMED_OUT`."""
    asking = asyncio.create_task(client.request(message))
    await asyncio.wait([asking], timeout=limit_s)
    is_late = not asking.done()
    await client.wait_none_under_way(0)
    outcome = await asking
    if (is_late and outcome.status == BROKEN) or outcome.status == TIMED_OUT:
        waited_s = min(given_s for given_s in (limit_s, client.timeout_s) if given_s is not None)
        outcome.status, outcome.why = TIMED_OUT, f"no answer within {waited_s:g} s"
    return outcome


def _check_access(answer: Outcome, url: str) -> None:
    if answer.status == UNREACHABLE:
        raise ConfigError(f"nobody answers at {url}: {answer.why}; name a running server with --url", key="--url")
    if answer.status < 0:
        raise ConfigError(f"{url} gives no whole answer: {answer.why}", key="--url")
    if answer.status in (_UNAUTHORIZED, _FORBIDDEN):
        which = "takes another API key than that in" if api_key() else "wants an API key; put it into"
        raise ConfigError(f"{url} {which} {' or '.join(KEY_VARIABLES)}: {answer_error(answer)}", key=KEY_VARIABLES[0])


def _listing(answer: Outcome) -> list[dict[str, Any]]:
    """The entries of `/v1/models`; none where the server has no such page."""
    if answer.status != _OK:
        return []
    try:
        return [entry for entry in json.loads(answer.body)["data"] if isinstance(entry, dict)]
    except (ValueError, KeyError, TypeError):
        return []
