"""Compiles grammars that others have written, on a stack that none of them can exhaust."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from tandem.core.errors import InternalError, InvalidRequestError
from tandem.core.grammar import CompiledGrammar

if TYPE_CHECKING:
    import llguidance

_T = TypeVar("_T")

# What compiling a grammar may take of the stack, in bytes; of its text each byte takes 500 at most, as far as is known.
_STACK_PER_BYTE, _LEAST_STACK = 4096, 16 << 20


def compile_grammar(text: str, tokens: llguidance.LLTokenizer) -> CompiledGrammar:
    """
    Raises:
        InvalidRequestError: it is no grammar, is too complex or too long, or nothing follows it.
        InternalError: no thread can be started here.
    """
    return _on_deep_stack(lambda: CompiledGrammar(text, tokens), _STACK_PER_BYTE * len(text.encode()))


#: Held while it is set how much stack the threads have that start: that is the process's, and not one thread's.
_starting = threading.Lock()


def _on_deep_stack(call: Callable[[], _T], num_bytes: int) -> _T:
    """What `call` returns or raises, in a thread with so much stack.

    llguidance follows rules and references that lead to others by calls within calls. Where the stack ended before a
    chain of them does, it would be the process that ends. Memory of a stack is had only once it is used.

    Raises:
        InvalidRequestError: there is not as much.
        InternalError: there is not even a little.
    """
    made: Future[_T] = Future()

    def run() -> None:
        try:
            made.set_result(call())
        except BaseException as error:  # noqa: BLE001 - handed on
            made.set_exception(error)

    num_mib = max(num_bytes, _LEAST_STACK) >> 20
    with _starting:
        before = threading.stack_size(num_mib << 20)
        try:
            threading.Thread(target=run, name="grammar", daemon=True).start()
        except RuntimeError as error:
            if num_bytes <= _LEAST_STACK:
                raise InternalError(f"a grammar cannot be compiled: {error}") from error
            raise InvalidRequestError("the grammar is too long to be compiled here") from error
        finally:
            threading.stack_size(before)
    return made.result()
