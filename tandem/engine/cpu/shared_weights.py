"""One copy of a model's weights in memory for all workers of a host that serve it on CPUs.

The first one writes them to memory that has no name in any file system, seals it, so that nobody can ever change it,
and notes in a register which process has it open as which file. The others find it through `/proc`, compare it with
what they have loaded, and use it instead. The kernel frees it with the last of them, however that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from tandem.engine.huge_pages import HUGE_PAGE_BYTES, LINE_BYTES, collapse

_log = logging.getLogger(__name__)

# fcntl(2); Python 3.11 has no names for them.
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEAL_SHRINK, _SEAL_GROW, _SEAL_WRITE = 2, 4, 8
_SEALS = _SEAL_SHRINK | _SEAL_GROW | _SEAL_WRITE
_MFD_NOEXEC_SEAL = 8
_AT_ONCE = 64 << 20
# So long a worker waits for another one that copies or compares.
_PATIENCE_S = 60.0
_NODES = Path("/sys/devices/system/node")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of a model, without gaps, and what puts another one with the same numbers in its place. It is asked for
    each time: who kept it would keep its memory."""

    get: Callable[[], torch.Tensor]
    put: Callable[[torch.Tensor], None]


class WeightRegister:
    """Who has which weights open.

    Args:
        path: a file; the same for all workers of a host that may share, made by the first.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def share(self, name: str, weights: Sequence[Weight]) -> Shared | None:
        """Replace all `weights` by what other processes have of that name, or by what others can have from now on.

        `None`: they stay as they are, or some of them do; the log says why. What comes back is to be held as long as
        others may join.
        """
        key = hashlib.sha256(name.encode())
        for weight in weights:
            key.update(f"\n{weight.get().dtype} {tuple(weight.get().shape)}".encode())
        key.update(f"\n{_memory_nodes()}".encode())
        try:
            with self._locked() as register:
                lines = register.read().decode(errors="replace").splitlines()
                shared = self._find(key.hexdigest(), weights, lines) or _make(key.hexdigest(), weights)
                _note(register, lines, shared)
        except OSError as error:
            _log.warning("the weights are not shared with other workers of this host: %s", error)
            return None
        # By each of them: the maker may end before it is through.
        threading.Thread(target=collapse, args=(shared.memory,), name="collapse-weights", daemon=True).start()
        return shared

    @contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        """The register, while nobody else reads or writes it.

        Raises:
            OSError: it cannot be had, or somebody else has it for too long.
        """
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with open(file, "r+b") as register:
            if not _lock(register, _PATIENCE_S):
                raise TimeoutError(f"another worker has {self._path} for longer than {_PATIENCE_S:g} s")
            yield register

    def _find(self, key: str, weights: Sequence[Weight], lines: list[str]) -> Shared | None:
        for line in lines:
            shared = _open(key, line)
            if shared is None:
                continue
            if _are_equal(weights, shared.memory):
                shared.is_own = False
                _put(weights, shared.memory)
                return shared
            _log.warning("process %s has other weights of the same model: they are not shared", line.split()[0])
        return None


def _lock(register: BinaryIO, patience_s: float) -> bool:
    """Whether it could be had in time. It is held until `register` is closed.

    Waiting in the kernel knows no end, where the holder was stopped, so a thread does it. That has a descriptor of its
    own of the same open file: whether it comes too late or not, what it gets is let go with the last of the two.

    Raises:
        OSError: the kernel has no lock for it.
    """
    file, over, errors = os.dup(register.fileno()), threading.Event(), list[OSError]()

    def wait() -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            errors.append(error)
        finally:
            os.close(file)
            over.set()

    threading.Thread(target=wait, name="lock-weights", daemon=True).start()
    is_over = over.wait(patience_s)
    if errors:
        raise errors[0]
    return is_over


def _note(register: BinaryIO, lines: list[str], shared: Shared) -> None:
    """Add it; leave those out that have ended. A torn line costs a copy in memory, and nothing else."""
    alive = dict.fromkeys([*(line for line in lines if _found("", line)), f"{os.getpid()} {shared.file}"])
    try:
        register.seek(0)
        register.write("".join(f"{line}\n" for line in alive).encode())
        register.truncate()
        register.flush()
    except OSError as error:
        _log.warning("later workers of this host will not find the weights: %s", error)


class Shared:
    """Sealed memory, which is mapped here, huge pages and all, as long as a tensor lies in it.

    Attributes:
        file: open as long as this is.
        memory: all of it, uint8; to be read only.
        is_own: it was made here.
    """

    def __init__(self, file: int) -> None:
        self.file = file
        self.is_own = True
        weakref.finalize(self, os.close, file).atexit = False
        self.memory = _map(file)

    def describe(self) -> str:
        """For the log."""
        return f"; {len(self.memory)} bytes of weights are shared, {'made here' if self.is_own else 'found'}"


def _memory_nodes() -> list[str]:
    """Of the memory that is near to this process: workers that are far from each other do not share."""
    own = os.sched_getaffinity(0)
    found = []
    with contextlib.suppress(OSError):  # a kernel that knows of one
        for node in sorted(_NODES.glob("node[0-9]*")):
            if own & _cpus_of((node / "cpulist").read_text()):
                found.append(node.name)
    return found


def _cpus_of(text: str) -> set[int]:
    """`0-3,8` as numbers."""
    ranges = [part.split("-") for part in text.strip().split(",") if part]
    return {cpu for first, *last in ranges for cpu in range(int(first), int((last or [first])[0]) + 1)}


def _name_of(key: str) -> str:
    return f"tandem-weights-{key}"


def _found(key: str, line: str) -> str:
    """Where a line of the register says that these weights are, if they are; without a `key` any. Else empty."""
    with contextlib.suppress(OSError, ValueError):
        pid, file = map(int, line.split())
        there = f"/proc/{pid}/fd/{file}"
        # A process that has ended leaves its number to others: the name says what it is.
        if os.readlink(there).startswith(f"/memfd:{_name_of(key)}"):
            return there
    return ""


def _open(key: str, line: str) -> Shared | None:
    """What the line names, if that is whole, and this user's."""
    there = _found(key, line)
    if there:
        with contextlib.suppress(OSError):  # it has just ended
            file = os.open(there, os.O_RDONLY | os.O_CLOEXEC)
            if fcntl.fcntl(file, _F_GET_SEALS) & _SEALS == _SEALS and os.fstat(file).st_uid == os.getuid():
                return Shared(file)
            os.close(file)
    return None


def _make(key: str, weights: Sequence[Weight]) -> Shared:
    """Memory with these weights, which lie there from now on. Each leaves its old place as it has its new one.

    Raises:
        OSError: there is no memory for them, or the kernel is older than Linux 3.17.
    """
    file = _create(_name_of(key))
    try:
        num_bytes = _num_bytes(weights)
        os.ftruncate(file, max(1, num_bytes))
        shared = Shared(os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_CLOEXEC))
        for weight, place in _places(weights, shared.memory):
            begin = place.data_ptr() - shared.memory.data_ptr()
            _write(file, weight.get(), begin)
            weight.put(place)
        fcntl.fcntl(file, _F_ADD_SEALS, _SEALS)
    finally:
        os.close(file)
    return shared


def _create(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)  # hardened hosts want that
    except OSError as error:
        if error.errno != errno.EINVAL:  # Linux before 6.3
            raise
        return os.memfd_create(name, flags)


def _write(file: int, tensor: torch.Tensor, begin: int) -> None:
    rest: memoryview = _as_bytes(tensor).numpy().data
    while rest:
        num = os.pwrite(file, rest[:_AT_ONCE], begin)
        rest, begin = rest[num:], begin + num


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _num_bytes(weights: Sequence[Weight]) -> int:
    return sum(_padded(weight.get().nbytes) for weight in weights)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // LINE_BYTES) * LINE_BYTES


def _places(weights: Sequence[Weight], memory: torch.Tensor) -> Iterator[tuple[Weight, torch.Tensor]]:
    begin = 0
    for weight in weights:
        dtype, shape, num_bytes = weight.get().dtype, weight.get().shape, weight.get().nbytes
        yield weight, memory[begin : begin + num_bytes].view(dtype).view(shape)
        begin += _padded(num_bytes)


def _are_equal(weights: Sequence[Weight], memory: torch.Tensor) -> bool:
    if len(memory) != max(1, _num_bytes(weights)):
        return False
    return all(torch.equal(_as_bytes(weight.get()), _as_bytes(place)) for weight, place in _places(weights, memory))


def _put(weights: Sequence[Weight], memory: torch.Tensor) -> None:
    for weight, place in _places(weights, memory):
        weight.put(place)


class _Mapping:
    """Memory of a file at a multiple of a huge page, as numpy takes it; unmapped with the last array in it."""

    def __init__(self, file: int) -> None:
        num_bytes = os.fstat(file).st_size
        spare = _libc.mmap(None, num_bytes + HUGE_PAGE_BYTES, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        _check(spare)
        begin = -(-spare // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        fixed = 0x10
        _check(_libc.mmap(begin, num_bytes, mmap.PROT_READ, mmap.MAP_SHARED | fixed, file, 0))
        # Not at the end of the process: a thread may still compute with it.
        weakref.finalize(self, _libc.munmap, spare, num_bytes + HUGE_PAGE_BYTES).atexit = False
        # Said to be writable, as torch warns of what is not; a write is a fatal signal.
        self.__array_interface__: dict[str, Any] = {
            "data": (begin, False), "shape": (num_bytes,), "typestr": "|u1", "version": 3,
        }  # fmt: skip


def _check(address: int) -> None:
    if address == ctypes.c_void_p(-1).value:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def _map(file: int) -> torch.Tensor:
    return torch.from_numpy(np.asarray(_Mapping(file)))
