"""The sending process: measures a TCP stream, raw writes and handoffs to a receiver on another host."""

from __future__ import annotations

import queue
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.link.control import Controls, send_stream
from benchmarks.link.ends import LEASE_S, SendingEnd
from kvtransfer.protocol import sender_events as ev
from kvtransfer.protocol.messages import AttemptKey
from kvtransfer.transports.events import WriteCompleted
from prefill_worker.events import HandoffStats
from tandem.core.errors import TandemError, TransportError
from tandem.engine.layout import KVLayout

PAGE_SIZE = 32

#: Of an 82 M model with float32 pages, and of one of 8 B weights (as Llama 3) with bfloat16 pages.
LAYOUTS = {
    "82m": KVLayout(num_layers=12, num_kv_heads=4, head_dim=64, page_size=PAGE_SIZE, dtype="float32"),
    "8b": KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, page_size=PAGE_SIZE, dtype="bfloat16"),
}
#: Tokens after whose computation prefill seals their pages.
_CHUNK = 512


@dataclass(frozen=True)
class Measured:
    """Of one layout and length.

    Attributes:
        tcp_s, raw_s: of so many bytes as the prompt's pages have: a TCP stream, and one write of the same extents.
        handoff_s: first post to acknowledgement, all pages being there before.
        exposed_s: end of a prompt's computation to acknowledgement, its pages having been sealed at `prefill_rate`.
    """

    layout: str
    num_tokens: int
    num_bytes: int
    prefill_rate: float
    tcp_s: tuple[float, ...]
    raw_s: tuple[float, ...]
    handoff_s: tuple[float, ...]
    exposed_s: tuple[float, ...]

    def gb_per_s(self, seconds: Sequence[float]) -> float:
        """By the median; 10⁹ bytes a second."""
        return self.num_bytes / statistics.median(seconds) / 1e9

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Sender:
    """Measures over one link."""

    def __init__(self, controls: Controls, here: str, there: str, transport: str, tell: Callable[[str], None]) -> None:
        self._controls = controls
        self._here = here
        self._there = there
        self._transport = transport
        self._tell = tell
        self._end: SendingEnd
        self._receiver = ""
        self._num_attempts = 0
        controls.listen(lambda answered: self._end.answered(answered))

    def measure(self, name: str, lengths: Sequence[int], prefill_rate: float, num_runs: int) -> list[Measured]:
        """All lengths (tokens) of one layout.

        Raises:
            TandemError: a write or a handoff failed.
        """
        layout = LAYOUTS[name]
        num_pages = layout.num_pages_for(max(lengths))
        with ExitStack() as stack:
            made = (layout, num_pages, self._transport, self._here)
            self._end = stack.enter_context(SendingEnd(*made, say=self._controls.tell, confirm=self._confirm))
            receiver = self._controls.ask("open", layout, num_pages, self._end.described)
            self._receiver = receiver.agent_name
            self._end.pair(receiver)
            self._end.digest(range(num_pages))
            self._hand_off(1)  # the pair's connection is made by this one
            return [self._measure_one(name, layout, length, prefill_rate, num_runs) for length in lengths]

    def _measure_one(
        self, name: str, layout: KVLayout, num_tokens: int, prefill_rate: float, num_runs: int
    ) -> Measured:
        num_pages = layout.num_pages_for(num_tokens)
        num_bytes = num_pages * layout.page_bytes
        tcp, raw, handoff, exposed = [], [], [], []
        for run in range(num_runs):  # in turn, so that what changes on the way changes all
            self._tell(f"{name}, {num_tokens} tokens ({num_bytes / 1e6:.0f} MB): run {run + 1} of {num_runs}")
            tcp.append(self._stream(num_bytes))
            raw.append(self._write_raw(num_pages))
            handoff.append(self._hand_off(num_pages).handoff_s)
            exposed.append(self._hand_off(num_pages, prefill_rate).exposed_s)
        return Measured(
            name, num_tokens, num_bytes, prefill_rate, tuple(tcp), tuple(raw), tuple(handoff), tuple(exposed)
        )

    def _stream(self, num_bytes: int) -> float:
        port = self._controls.ask("stream", num_bytes)
        begun_s = time.perf_counter()
        send_stream((self._there, port), num_bytes)
        return time.perf_counter() - begun_s

    def _write_raw(self, num_pages: int) -> float:
        done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._controls.ask("call", "expect_raw", self._end.incarnation)
        begun_s = time.perf_counter()
        self._end.write_raw(num_pages, done)
        end = done.get()
        seconds = time.perf_counter() - begun_s
        self._controls.ask("call", "end_raw")
        if not isinstance(end, WriteCompleted):
            raise TransportError(f"a raw write failed: {end.error}")
        return seconds

    def _hand_off(self, num_pages: int, prefill_rate: float | None = None) -> HandoffStats:
        """One prompt. With a rate (tokens a second) its pages are sealed at that pace, else all are there."""
        self._num_attempts += 1
        key = AttemptKey(f"link-{self._num_attempts}", 1)
        over: queue.SimpleQueue[HandoffStats | TandemError] = queue.SimpleQueue()
        self._end.begin(key, num_pages, self._receiver, over)
        grant = self._controls.ask("call", "reserve", key, num_pages)
        self._attach(grant, renew=False)
        renew_s = time.monotonic() + LEASE_S / 3
        for pages in _chunks(num_pages) if prefill_rate else (range(num_pages),):
            if prefill_rate:
                time.sleep(len(pages) * PAGE_SIZE / prefill_rate)  # stands for the computation
            self._end.seal(key, pages)
            if time.monotonic() >= renew_s:
                self._attach(grant, renew=True)
                renew_s = time.monotonic() + LEASE_S / 3
        self._end.computed(key)
        while True:
            try:
                end = over.get(timeout=max(0.0, renew_s - time.monotonic()))
            except queue.Empty:
                self._attach(grant, renew=True)
                renew_s = time.monotonic() + LEASE_S / 3
                continue
            if isinstance(end, TandemError):
                raise end
            return end

    def _attach(self, grant: Any, *, renew: bool) -> None:
        asked_s = time.monotonic()
        answer = self._controls.ask("call", "attach", grant.grant_id, self._end.incarnation, grant.capability, renew)
        if answer.refusal is None:
            tell = self._end.renewed if renew else self._end.attached
            tell(grant, asked_s + LEASE_S)
        elif not renew:  # a renewal may cross the commit
            raise TransportError(f"the receiver refuses the grant's writer: {answer.refusal.value} {answer.detail}")

    def _confirm(self, idle: ev.ConfirmIdle) -> None:
        """What failed is reported by `_hand_off`; the receiver's arena is given up with this measurement."""


def _chunks(num_pages: int) -> list[range]:
    step = _CHUNK // PAGE_SIZE
    return [range(first, min(first + step, num_pages)) for first in range(0, num_pages, step)]
