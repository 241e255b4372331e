"""Text of generated pages."""

from __future__ import annotations

import textwrap


def wrapped(text: str) -> list[str]:
    """Lines of a paragraph, as the other documents have them."""
    return textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False)
