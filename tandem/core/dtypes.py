"""The element types that weights and KV may have."""

from __future__ import annotations

#: Bytes of one element, by the name that checkpoints and the configuration use.
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

#: What `cache.dtype` may say: `auto` is the type that the model is computed in.
KV_DTYPES = ("auto", "bfloat16")
