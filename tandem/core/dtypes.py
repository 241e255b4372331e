"""The element types that weights and KV may have."""

from __future__ import annotations

#: Bytes of one element, by the name that checkpoints and the configuration use.
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

#: What pages of K and V may hold.
PAGE_DTYPES = (*DTYPE_BYTES, "int8")
#: What `cache.dtype` may say: `auto` is bfloat16 where that is multiplied, else the type that the model is computed in.
KV_DTYPES = ("auto", "float32", "bfloat16", "int8")

#: Of the scale, float32, that is behind the whole numbers of each head of a token's K and of its V.
KV_SCALE_BYTES = 4


def kv_head_bytes(dtype: str, head_dim: int) -> int:
    """Bytes of one head of K, or of V, of one token, in pages of this type. Raises `KeyError` for an unknown one."""
    return head_dim + KV_SCALE_BYTES if dtype == "int8" else head_dim * DTYPE_BYTES[dtype]
