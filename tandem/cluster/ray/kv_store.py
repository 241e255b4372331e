"""What a cluster keeps in Ray's control store as long as it lives: for its next supervisor, and for who looks for one.

One JSON object, written by the supervisor alone. Every call blocks.
"""

from __future__ import annotations

import json
from typing import Any

from ray.experimental import internal_kv

from tandem.cluster.spec import NAMESPACE, SupervisorFace
from tandem.core.config import SecurityConfig

_KEY = b"supervisor"


def recall() -> dict[str, Any]:
    """All that is kept; empty when there is nothing."""
    kept = internal_kv._internal_kv_get(_KEY, namespace=NAMESPACE)
    return json.loads(kept) if kept else {}


def remember(**changed: Any) -> None:
    """Keep these, plain data, beside the others. Calls must not overlap."""
    kept = json.dumps({**recall(), **changed}).encode()
    internal_kv._internal_kv_put(_KEY, kept, overwrite=True, namespace=NAMESPACE)


def forget() -> None:
    """All of it."""
    internal_kv._internal_kv_del(_KEY, namespace=NAMESPACE)


def face_of(kept: dict[str, Any]) -> SupervisorFace | None:
    """Of the supervisor that listened last, which may have ended; `None`: none has."""
    face = kept.get("face")
    return SupervisorFace(**{**face, "security": SecurityConfig(**face["security"])}) if face else None
