"""The one allocation that holds all KV pages of a worker."""

from __future__ import annotations

from typing import Any

import torch

from tandem.core.errors import ConfigError
from tandem.engine.huge_pages import map_memory, populate
from tandem.engine.kv_numbers import STORED, encode
from tandem.engine.layout import KVLayout

TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class KVArena:
    """All KV pages: one contiguous tensor `[layer][page][K|V][slot][kv_head][head_dim]`.

    A head is as `kv_numbers` has it. The tensor is allocated once and never moves, so that a transport can register it
    once. On the CPU it starts on a page boundary and takes physical memory only where it has been written. Who owns
    which page is not known here.

    Raises `ConfigError` when the memory cannot be had.
    """

    def __init__(self, layout: KVLayout, num_pages: int, device: str | torch.device = "cpu") -> None:
        if num_pages < 1:
            raise ConfigError(f"a KV arena needs at least one page, got {num_pages}")
        self.layout = layout
        self.num_pages = num_pages
        self.device = torch.device(device)
        self.num_bytes = num_pages * layout.page_bytes
        try:
            self._bytes = _allocate(self.num_bytes, self.device)
        except (OSError, ValueError, OverflowError, RuntimeError) as error:
            raise ConfigError(
                f"cannot allocate {self.num_bytes} bytes for {num_pages} KV pages on {self.device}: {error}"
            ) from error
        shape = (layout.num_layers, num_pages, 2, layout.page_size, layout.num_kv_heads, -1)
        self.tensor = self._bytes.view(STORED[layout.dtype]).view(shape)
        # Views made once: the attention asks for them for every layer of every step.
        self._layers = tuple(self.tensor.unbind(0))
        self._keys = tuple(layer[:, 0] for layer in self._layers)
        self._values = tuple(layer[:, 1] for layer in self._layers)
        self._host_bytes = memoryview(_buffer(self._bytes)) if self.device.type == "cpu" else None

    @property
    def base_address(self) -> int:
        """Address of the first byte (a device address on CUDA)."""
        return int(self._bytes.data_ptr())

    def extent_offset(self, layer: int, page: int) -> int:
        """Return the bytes from `base_address` to the extent of `page` in `layer`."""
        if not (0 <= layer < self.layout.num_layers and 0 <= page < self.num_pages):
            raise IndexError(
                f"extent ({layer}, {page}) is outside of {self.layout.num_layers} layers x {self.num_pages} pages"
            )
        return (layer * self.num_pages + page) * self.layout.extent_bytes

    def extent_view(self, layer: int, page: int) -> memoryview:
        """Return the bytes of one extent in host memory.

        On the CPU the arena's own, writable, without a copy; of a device's memory a copy, made behind the work that
        is queued on its current stream.
        """
        begin = self.extent_offset(layer, page)
        end = begin + self.layout.extent_bytes
        if self._host_bytes is None:
            return memoryview(_buffer(self._bytes[begin:end].cpu()))
        return self._host_bytes[begin:end]

    def read_page(self, page: int, into: memoryview) -> None:
        """Copy the bytes of `page` in all layers, `[layer][K|V][slot][kv_head][head_dim]`, to host memory.

        `into` has `layout.page_bytes`. Nothing waits but the calling thread; of a device's memory behind the work that
        is queued on its current stream.
        """
        self._copy(self._page_in(into), self._page_bytes(page))

    def write_page(self, page: int, data: memoryview) -> None:
        """The reverse of `read_page`. The bytes are there when it returns."""
        self._copy(self._page_bytes(page), self._page_in(data))

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self._host_bytes is not None:
            _buffer(target)[...] = _buffer(source)  # without Python's lock, and without torch's threads
        else:
            target.copy_(source)
            torch.cuda.current_stream(self.device).synchronize()

    def _page_bytes(self, page: int) -> torch.Tensor:
        """`[layer][extent_bytes]`, without a copy."""
        self.extent_offset(0, page)
        return self._bytes.view(self.layout.num_layers, self.num_pages, self.layout.extent_bytes)[:, page]

    def _page_in(self, memory: memoryview) -> torch.Tensor:
        """A page in host memory as the arena's are seen."""
        return torch.frombuffer(memory, dtype=torch.uint8).view(self.layout.num_layers, self.layout.extent_bytes)

    def write(
        self, layer: int, place: tuple[torch.Tensor, torch.Tensor], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Write K and V of some tokens, `[T, kv_heads, head_dim]` each, to their pages and slots, `[T]` each."""
        self._keys[layer].index_put_(place, encode(key, self.layout.dtype))
        self._values[layer].index_put_(place, encode(value, self.layout.dtype))

    def fill(self, layer: int, content: torch.Tensor) -> None:
        """Write all of a layer, `[page][K|V][slot][kv_head][head_dim]`, or what can be expanded to that."""
        layout = self.layout
        shape = (self.num_pages, 2, layout.page_size, layout.num_kv_heads, layout.head_dim)
        self._layers[layer].copy_(encode(content.to(self.device).expand(shape), layout.dtype))

    def copy_page(self, source: int, target: int) -> None:
        """Copy the page `source` over the page `target` in all layers (copy on write)."""
        self.extent_offset(0, source)
        self.extent_offset(0, target)
        self.tensor[:, target].copy_(self.tensor[:, source])

    def populate(self, first_page: int, end_page: int) -> None:
        """Make the pages `[first_page, end_page)` of all layers resident, on the CPU; see `huge_pages.populate`."""
        for layer in self._layers:
            populate(layer[first_page:end_page])

    def preallocate(self) -> None:
        """Make all pages resident, on the CPU; a device's memory is from the start.

        Raises:
            ConfigError: there is no such memory, or the operating system cannot do that (Linux before 5.14).
        """
        if self._host_bytes is None:
            return
        try:
            populate(self._bytes)
        except OSError as error:
            raise ConfigError(
                f"cannot make {self._bytes.nbytes} bytes of KV pages resident: {error.strerror}; lower "
                "cache.memory_bytes, or turn cache.preallocate off"
            ) from error

    def layer(self, layer: int) -> torch.Tensor:
        """Return the pages of one layer, `[page][K|V][slot][kv_head][head_dim]`, without a copy."""
        return self._layers[layer]

    def keys(self, layer: int) -> torch.Tensor:
        """Return the keys of one layer, `[page][slot][kv_head][head_dim]`, without a copy."""
        return self._keys[layer]

    def values(self, layer: int) -> torch.Tensor:
        """Return the values of one layer, `[page][slot][kv_head][head_dim]`, without a copy."""
        return self._values[layer]


def host_memory(num_bytes: int, device: torch.device) -> memoryview:
    """Bytes in host memory for copies of pages of `device`; pinned where that is a GPU.

    Raises `ConfigError` when the memory cannot be had.
    """
    try:
        if device.type == "cuda":
            return memoryview(_buffer(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)))
        return memoryview(_buffer(map_memory(num_bytes)))
    except (OSError, ValueError, OverflowError, RuntimeError) as error:
        raise ConfigError(f"cannot allocate {num_bytes} bytes of host memory for pages: {error}") from error


def _buffer(memory: torch.Tensor) -> Any:
    """Return an object with the buffer interface over `memory`; numpy's types hide before 3.12 that arrays have it."""
    return memory.numpy()


def _allocate(num_bytes: int, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    return map_memory(num_bytes)
