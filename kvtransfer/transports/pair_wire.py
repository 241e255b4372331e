"""What the two helper threads of one direction of the `nccl` transport agree on: headers, and how bytes are cut."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_HEADER = struct.Struct("<qqqqI")
_RANGE = struct.Struct("<qq")


@dataclass(frozen=True, slots=True)
class Header:
    """What a write is about to bring.

    Attributes:
        number: of the write in its direction; the answers' keys carry it.
        generation: of the communicator that it travels on.
        ranges: (offset, bytes) in the reader's arena.
    """

    number: int
    generation: int
    frame_bytes: int
    tag: bytes
    ranges: tuple[tuple[int, int], ...]

    def pack(self) -> bytes:
        fixed = _HEADER.pack(self.number, self.generation, self.frame_bytes, len(self.ranges), len(self.tag))
        return fixed + self.tag + b"".join(_RANGE.pack(*r) for r in self.ranges)

    @classmethod
    def unpack(cls, data: bytes) -> Header:
        number, generation, frame_bytes, num_ranges, tag_bytes = _HEADER.unpack_from(data)
        at = _HEADER.size + tag_bytes
        ranges = tuple(_RANGE.iter_unpack(data[at : at + num_ranges * _RANGE.size]))
        return cls(number, generation, frame_bytes, data[_HEADER.size : at], ranges)


def frames(ranges: Sequence[tuple[int, int]], frame_bytes: int) -> Iterator[list[tuple[int, int]]]:
    """Cut `ranges` into groups of at most `frame_bytes`; both ends cut alike."""
    frame: list[tuple[int, int]] = []
    room = frame_bytes
    for start, size in ranges:
        offset, left = start, size
        while left:
            num = min(left, room)
            frame.append((offset, num))
            offset, left, room = offset + num, left - num, room - num
            if not room:
                yield frame
                frame, room = [], frame_bytes
    if frame:
        yield frame
