"""The element types that weights and KV may have."""

from __future__ import annotations

#: Bytes of one element, by the name that checkpoints and the configuration use.
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
