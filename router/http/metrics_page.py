"""What `GET /metrics` says: the figures of every router that shares this port, whichever of them is asked."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from router.workers.other_routers import OtherRouters
from tandem.core.metrics import RouterMetrics

_KIND = "metrics"
"""Of the question of one router to another."""
_FAMILY = re.compile(rb"(?m)^(?=# HELP )")
_ANSWERS = """\
# HELP tandem_router_answers Whether the figures of this router, one of those that share the port, are here
# TYPE tandem_router_answers gauge
"""


class MetricsPage:
    """The exposition of one router, with those of the others that share its port."""

    def __init__(
        self, metrics: RouterMetrics, settle: Callable[[], object], name: str, others: OtherRouters
    ) -> None:
        """`settle`: called before they are read."""
        self._metrics, self._settle, self._name, self._others = metrics, settle, name, others
        others.on_question(_KIND, lambda _: self._own())

    def _own(self) -> bytes:
        """In the event loop, like all that counts."""
        self._settle()
        return self._metrics.exposition(self._name)

    async def text(self) -> bytes:
        if not self._name:
            return self._own()
        told: Mapping[str, bytes | None] = {self._name: self._own(), **await self._others.ask(_KIND, of_port=True)}
        texts = [text for text in told.values() if text is not None]
        answers = (f'tandem_router_answers{{router="{name}"}} {int(text is not None)}\n' for name, text in told.items())
        return merged([(_ANSWERS + "".join(answers)).encode(), *texts])


def merged(texts: Iterable[bytes]) -> bytes:
    """Several expositions as one: each family stands once, with the samples of all."""
    families: dict[bytes, list[bytes]] = {}
    for text in texts:
        for family in _FAMILY.split(text):
            if not family:
                continue
            help_line, type_line, samples = family.split(b"\n", 2)
            families.setdefault(help_line + b"\n" + type_line + b"\n", []).append(samples)
    return b"".join(head + b"".join(samples) for head, samples in families.items())
