"""An event of one handoff, beside many that are open at the same prefill worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvtransfer.digest import no_digests
from kvtransfer.extents import ArenaShape
from kvtransfer.layout import LayoutId
from kvtransfer.protocol import sender_events as ev
from kvtransfer.protocol.attempts import SenderLimits
from kvtransfer.protocol.messages import AttemptKey
from prefill_worker.sender_driver import SenderDriver
from tandem.core.clock import MonotonicClock

_LIMITS = SenderLimits(
    lease_margin_s=1.0,
    write_timeout_s=10.0,
    resend_s=1.0,
    answer_timeout_s=10.0,
    grace_s=1.0,
    quarantine_cap_pages=64,
)
_LAYOUT = LayoutId("0" * 64, "float32", num_layers=1, num_kv_heads=1, head_dim=8, page_size=32)


class _Unheard:
    """Takes what the driver tells its worker."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def event(num_open: int) -> Callable[[], object]:
    """What hands one event to the driver: time has passed for one of `num_open` attempts."""
    told: Any = _Unheard()
    driver = SenderDriver(
        incarnation="prefill-0#1",
        layout=_LAYOUT,
        shape=ArenaShape(1, 64, _LAYOUT.extent_bytes),
        take_digests=no_digests,
        limits=_LIMITS,
        callbacks=told,
        write=lambda *_, **__: None,
        peer=lambda _: None,
        clock=MonotonicClock(),
    )
    for number in range(num_open):
        driver.open(AttemptKey(f"r{number}", 1), 1, "decode-0#1")
    key = AttemptKey("r0", 1)
    return lambda: driver.happened(key, ev.Tick())
