"""`python -m router`, but nobody is known to hold a prompt's beginning: it places by load alone.

Workers keep their caches, and so a turn may still find its beginning by chance. No configuration does this, as nobody
would want it but to compare.
"""

from __future__ import annotations

import sys
from typing import Any

from router.__main__ import main
from router.policy.prefix import HeldPrefix
from router.workers.known_pages import KnownPages
from tandem.core.identity import WorkerKey


def held_by_nobody(*_: Any) -> HeldPrefix[WorkerKey]:
    """Whatever is asked."""
    return HeldPrefix()


if __name__ == "__main__":
    KnownPages.prefix = held_by_nobody  # type: ignore[method-assign, assignment]
    sys.exit(main())
