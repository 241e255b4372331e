"""Hides the packages named in `HIDDEN_PACKAGES` from this process; see `tests.support.few_packages`."""

import json
import os
from importlib.machinery import PathFinder

_hidden = frozenset(json.loads(os.environ["HIDDEN_PACKAGES"]))
_find_spec = PathFinder.find_spec


def _find_few(_, name, path=None, target=None):
    return None if name.partition(".")[0] in _hidden else _find_spec(name, path, target)


PathFinder.find_spec = classmethod(_find_few)  # and not one before it: pytest asks this one itself
