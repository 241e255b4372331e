"""The API key that a command of ours shows to a server: that of the environment."""

from __future__ import annotations

import os

#: The first of these that is set holds it.
KEY_VARIABLES = ("TANDEM_API_KEY", "OPENAI_API_KEY")


def api_key() -> str:
    """The key, or empty where none is set."""
    return next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), "")
