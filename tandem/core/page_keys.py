"""Keys of one text's pages in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from struct import Struct
from typing import overload

KEY_BYTES = hashlib.sha256().digest_size
_each = Struct(f"{KEY_BYTES}s").iter_unpack


class PageKeys(Sequence[bytes]):
    """Keys as `tandem.core.pages.page_keys` makes them, behind one another in one piece of memory that grows in place.

    The garbage collector walks lists of keys, and a key that is a list's is walked to: this it passes over, as it does
    token ids.
    """

    __slots__ = ("_packed",)

    def __init__(self, keys: Iterable[bytes] = ()) -> None:
        self._packed: bytearray = keys._packed[:] if isinstance(keys, PageKeys) else bytearray(b"".join(keys))
        if len(self._packed) % KEY_BYTES:
            raise ValueError(f"{len(self._packed)} bytes are no keys of {KEY_BYTES} bytes")

    def extend(self, keys: Iterable[bytes]) -> None:
        self._packed += PageKeys(keys)._packed

    def __len__(self) -> int:
        return len(self._packed) // KEY_BYTES

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> PageKeys: ...

    def __getitem__(self, index: int | slice) -> bytes | PageKeys:
        if isinstance(index, slice):
            begin, end, step = index.indices(len(self))
            if step != 1:
                raise ValueError("keys are taken as they lie")
            part = PageKeys()
            part._packed = self._packed[begin * KEY_BYTES : end * KEY_BYTES]
            return part
        place = index if index >= 0 else index + len(self)
        if not 0 <= place < len(self):
            raise IndexError(f"no key {index} among {len(self)}")
        return bytes(self._packed[place * KEY_BYTES : (place + 1) * KEY_BYTES])

    def __iter__(self) -> Iterator[bytes]:
        # Of a copy: the memory cannot grow while it is read.
        return (key for (key,) in _each(bytes(self._packed)))

    def __eq__(self, other: object) -> bool:
        return self._packed == other._packed if isinstance(other, PageKeys) else NotImplemented

    __hash__ = None  # type: ignore[assignment] # it grows

    def __repr__(self) -> str:
        return f"<{len(self)} keys>"
