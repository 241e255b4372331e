"""Retains computed prompts: their pages can be found again, and their first tokens are remembered.

The pages of a computed prompt are entered into the pool's cache; the partial last page gets a key that only its request
finds. Pages that a sequence or a write holds are in use; after that they can be evicted like all cached pages. So when
decode is lost, another attempt of the request hands off the same pages. It computes nothing, unless their memory was
needed meanwhile. Runs on the runner thread.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from tandem.core.layer_groups import LayerGroups
from tandem.core.page_keys import PageKeys
from tandem.core.pages import PagePool, private_page_keys
from tandem.core.sampling import SampledToken, SamplingParams
from tandem.worker.sequence import Sequence

# Requests that are remembered at a time; the oldest go first.
_MAX_RETAINED = 4096


@dataclass(frozen=True, slots=True)
class RetainedPrompt:
    """Of one request: what was sampled after its prompt, and how its pages are told from others."""

    session: int  # of the router that wants it
    params: SamplingParams
    last_key: bytes  # of the last page; chained, so it names the whole prompt
    private_keys: tuple[bytes, ...]  # of the pages that only this request finds
    first_tokens: dict[int, SampledToken]  # by choice


@dataclass(frozen=True, slots=True)
class Recalled:
    """What an earlier attempt has left for a new one."""

    first_tokens: dict[int, SampledToken]  # by choice
    keys: list[bytes]  # of all pages of the prompt


class RetainedPrompts:
    """Retained prompts by request id, at most `bound` of them, and no more private keys than the pool has pages.

    Args:
        shares: whether full pages are entered for all requests to find (the prefix cache is on).
        groups: of layers, by what they see. Of a prompt only the pages are retained that an output sees.
    """

    def __init__(
        self,
        pool: PagePool,
        salt: bytes,
        *,
        shares: bool,
        groups: LayerGroups | None = None,
        bound: int = _MAX_RETAINED,
    ) -> None:
        self._pool = pool
        self._salt = salt
        self._groups = groups or LayerGroups(pool.page_size)
        self._shares = shares
        self._bound = bound
        self._by_request: OrderedDict[str, RetainedPrompt] = OrderedDict()
        # Invariant: the private keys of all retained prompts together.
        self.num_private_keys = 0

    def __len__(self) -> int:
        return len(self._by_request)

    def retain(self, session: int, sequence: Sequence, first_tokens: dict[int, SampledToken]) -> None:
        """Remember a prompt that is computed and still has its pages."""
        request_id = sequence.request_id
        self.drop(request_id)  # an earlier attempt's, or another request's that had this id
        keys, num_shared = self._keys_of(sequence)
        groups, num_hidden = self._groups, sequence.num_hidden
        pages = groups.listed(sequence.pages, sequence.windowed, num_hidden)
        for page, key in zip(pages, groups.listed_keys(keys, num_hidden), strict=True):
            self._pool.publish(page, key)
        private = tuple(groups.listed_keys(keys[num_shared:], num_hidden, num_shared))
        self._by_request[request_id] = RetainedPrompt(session, sequence.params, keys[-1], private, dict(first_tokens))
        self.num_private_keys += len(private)
        # With more private keys than pages, some of the oldest were evicted already.
        while len(self._by_request) > self._bound or self.num_private_keys > self._pool.num_pages:
            self.drop(next(iter(self._by_request)))

    def recall(self, sequence: Sequence) -> Recalled | None:
        """What an earlier attempt of the same request has left; `sequence` gets the keys of its full pages."""
        retained = self._by_request.get(sequence.request_id)
        if retained is None or retained.params != sequence.params:
            return None
        keys, _ = self._keys_of(sequence)
        if keys[-1] != retained.last_key:  # the id of another request, used again
            return None
        sequence.keys = PageKeys(keys[: sequence.num_prompt // self._pool.page_size])
        return Recalled(dict(retained.first_tokens), keys)

    def give_pages(self, sequence: Sequence, recalled: Recalled) -> bool:
        """Give `sequence` all pages of its prompt that an output sees, if they are there: nothing is to compute."""
        num_hidden = self._groups.num_hidden(sequence.num_prompt)
        keys = self._groups.listed_keys(recalled.keys, num_hidden)
        if self._pool.match(keys) < len(keys):
            return False
        pages = self._pool.acquire(keys)
        sequence.pages, sequence.windowed = self._groups.tables(pages, num_hidden, len(recalled.keys))
        sequence.num_hidden = num_hidden
        sequence.num_computed = sequence.num_cached = sequence.num_prompt
        sequence.num_published = len(sequence.keys)
        return True

    def _keys_of(self, sequence: Sequence) -> tuple[list[bytes], int]:
        """One key a page of the prompt, and how many of them others may find too."""
        page_size, num_prompt = self._pool.page_size, sequence.num_prompt
        shared = PageKeys()
        if self._shares:
            sequence.extend_keys(page_size, self._salt, num_prompt)
            shared = sequence.keys[: num_prompt // page_size]
        prompt = sequence.token_ids[:num_prompt]
        return private_page_keys(prompt, page_size, self._salt, sequence.request_id, shared), len(shared)

    def drop(self, request_id: str) -> None:
        """The request has ended: what nobody else can find is of no use any more."""
        retained = self._by_request.pop(request_id, None)
        if retained is not None:
            self.num_private_keys -= len(retained.private_keys)
            self._pool.discard(retained.private_keys)

    def drop_session(self, session: int) -> None:
        """The router that wanted them is gone."""
        for request_id in [r for r, retained in self._by_request.items() if retained.session == session]:
            self.drop(request_id)
