"""Machine code made by Numba and kept on disk for other processes; what several want at once, one compiles.

It lies in the user's directory of caches, under a name made of the sources' text: so a package that Ray unpacks anew
for each of its sessions, a second virtual environment or another checkout finds what was compiled of the same text.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba import types
from numba.core import codegen, config
from numba.core.caching import CompileResultCacheImpl, FunctionCache, InTreeCacheLocator
from numba.core.ccallback import CFunc
from numba.core.registry import cpu_target

_log = logging.getLogger(__name__)

#: Calls the code with `[first, end)` and the address of its arguments.
_PIECE_OF_WORK = ((types.intp, types.intp, types.intp), types.void)

_UNUSED_S = 30 * 24 * 3600

# Numba frees the code with its object, and others know the address only.
_held: list[CFunc] = []

# For Intel's CPUs LLVM makes vectors of half of AVX-512's registers of plain loops, since on the first of them whole
# ones slowed the clock. Kernels here multiply with whole ones all the time, so that is lost already.
_WHOLE_REGISTERS = "-prefer-256-bit"


def _prefer_whole_registers() -> None:
    """Where there are such, and no user said what to compile for. It holds for all that this process compiles."""
    if config.CPU_FEATURES is None and config.CPU_NAME is None:
        features = codegen.get_host_cpu_features()
        if "+avx512f" in features.split(","):
            config.CPU_FEATURES = f"{features},{_WHOLE_REGISTERS}"


_prefer_whole_registers()


def target_features() -> frozenset[str]:
    """What Numba compiles for, in LLVM's words."""
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return frozenset(features.split(","))


def compile_function(function: Callable[..., Any]) -> Any:
    """A function that Python calls, as Numba's dispatcher; it runs without the GIL. Compiled on first use."""
    compiled: Any = numba.njit(function, nogil=True, error_model="numpy")
    _keep(compiled)
    return compiled


#: Makes a function a part of those that call it. Numba copies its text into theirs, and for each copy all that this has
#: become by then: where functions that do so call one another, compiling takes many times what the machine code takes.
inlined = numba.njit(nogil=True, inline="always")
#: A function that others call, for large parts.
called = numba.njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)


def compile_piece(function: Callable[[Any, Any, Any], None], *, fast_math: bool) -> int:
    """Address of the C function `function(first, end, arguments)`, all words, for good.

    Args:
        fast_math: whether LLVM may reorder sums; NaN and infinity keep their meaning.
    """
    options = {"error_model": "numpy", "fastmath": {"reassoc", "contract", "nsz", "arcp"} if fast_math else False}
    compiled = CFunc(function, _PIECE_OF_WORK, {}, options)
    _keep(compiled)
    compiled.compile()
    _held.append(compiled)
    address: int = compiled.address  # type: ignore[assignment]
    return address


class _ByText(InTreeCacheLocator):  # type: ignore[misc]
    """The directory of machine code that was made of the sources' present text, wherever they lie."""

    def __init__(self, function: Callable[..., Any], file: str) -> None:
        super().__init__(function, file)
        self._cache_path = str(kept_code())

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> _ByText | None:
        found: _ByText | None = super().from_function(py_func, py_file) if kept_code() else None
        return found


class _BesideSources(InTreeCacheLocator):  # type: ignore[misc]
    """For users who have no directory of caches that they may write to."""

    def get_source_stamp(self) -> tuple[Any, str]:
        # Numba's own stamp covers the function's file only; most of a kernel's code comes from other files.
        return super().get_source_stamp(), _digest_of_sources()


class _Places(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (_ByText, _BesideSources)


class _SharedCache(FunctionCache):  # type: ignore[misc]
    """Numba's, for the workers of a host that start together on a fresh install: who finds a function missing compiles
    it, and the others wait for that instead of doing the same beside it."""

    _impl_class = _Places

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._lock_file = Path(self._cache_path, f"{self._impl.filename_base}.lock")
        self._lock: int | None = None  # held while this process compiles

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        found = super().load_overload(sig, target_context)
        if found is None and self._lock_up():
            found = super().load_overload(sig, target_context)  # by who held the lock
            if found is not None:
                self.unlock()
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        finally:
            self.unlock()

    def _lock_up(self) -> bool:
        """Whether there was something to wait for, and it is this process's turn now. The lock of a process that ends
        goes with it."""
        if self._lock is not None:
            return False
        self._impl.locator.ensure_cache_path()
        self._lock = os.open(self._lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError as error:  # a file system without locks: processes that start together compile beside each other
            _log.warning("%s cannot be locked: %s", self._lock_file, error)
        except BaseException:
            self.unlock()
            raise
        return True

    def unlock(self) -> None:
        """It is compiled, or will not be."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _keep(compiled: Any) -> None:
    try:
        cache = _SharedCache(compiled.__wrapped__)
    except RuntimeError as error:  # no directory to write to: every process compiles anew
        _log.warning("compiled kernels cannot be cached: %s", error)
        return
    compiled._cache = cache
    compile_it = compiled._compiler.compile

    def compile_or_unlock(*arguments: Any) -> Any:
        try:
            return compile_it(*arguments)
        except BaseException:  # also what interrupts it: nothing will be saved, and others are not to wait for that
            cache.unlock()
            raise

    compiled._compiler.compile = compile_or_unlock


@functools.cache
def kept_code() -> Path | None:
    """Where machine code of this text lies, marked as used now; `None` where this user can have no such place, or
    others may write there. What no process has used for a month goes."""
    root = config.CACHE_DIR or os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(root):  # nobody's home is known
        return None
    directory = Path(root, "tandem", "kernels", _digest_of_sources()[:16])
    try:
        Path(root, "tandem").mkdir(parents=True, exist_ok=True)  # other commands have theirs there, too
        for place in (directory.parent, directory):
            place.mkdir(mode=0o700, exist_ok=True)
            found = place.stat()
            if found.st_uid != os.getuid() or found.st_mode & 0o022:  # what lies there is run
                _log.warning("no compiled kernels are kept in %s, where others may write", place)
                return None
        os.utime(directory)
        for other in directory.parent.iterdir():
            if other.stat().st_mtime < time.time() - _UNUSED_S:
                shutil.rmtree(other, ignore_errors=True)
    except OSError as error:
        _log.debug("no compiled kernels in %s: %s", directory, error)
    return directory


@functools.cache
def _digest_of_sources() -> str:
    """Of all files that kernels may be put together from."""
    sources = sorted(Path(__file__).parent.parent.rglob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
