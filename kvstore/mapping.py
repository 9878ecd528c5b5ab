"""How a process sees the pool: in place where it can, by a copy of the entry where it cannot.

Callers know one path: `PoolAccess.write(handle, kv)` and `PoolAccess.resolve(handle)`. On the store's host both go
straight to the store's own memory. From another host, and towards a device that cannot read host memory, an
entry is copied once and kept while it is in use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from .handle import KVHandle, PageLayout, StaleHandle
from .memory import PagedMemory
from .region import RegionAddress

COPIES_KEPT = 16
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LayerKV = tuple[torch.Tensor, torch.Tensor]


class StoreClient(Protocol):
    """What a node asks of a store: the store itself in one process, a proxy across processes."""

    def reserve(self, key: str, num_tokens: int, owner: str) -> Any: ...

    def commit(self, handle: KVHandle, owner: str) -> None: ...

    def release(self, owner: str) -> None: ...

    def read(self, handle: KVHandle) -> np.ndarray: ...

    def write(self, handle: KVHandle, data: np.ndarray) -> None: ...

    def describe(self) -> tuple[str, PageLayout, RegionAddress]: ...


class PagedPrefix:
    """An entry as the generation tower's `KVPrefix`, read from the pool's pages. Holds no copy."""

    def __init__(self, handle: KVHandle, pool: torch.Tensor, memory: PagedMemory) -> None:
        self.handle = handle
        self._pool = pool
        self._memory = memory
        self._pages = torch.tensor(handle.pages)

    @property
    def num_tokens(self) -> int:
        return self.handle.num_tokens

    def layer(self, index: int) -> LayerKV:
        return _tokens(self._pool[index].index_select(0, self._pages), self.num_tokens)

    def check(self) -> None:
        """Raise `StaleHandle` if the pages were given away; what was read before is void then."""
        self._memory.check(self.handle)


class CopiedPrefix:
    """An entry that was copied to this process, perhaps to a device: `[layers, pages, 2, page_size, heads, dim]`."""

    def __init__(self, handle: KVHandle, data: torch.Tensor) -> None:
        self.handle = handle
        self._data = data

    @property
    def num_tokens(self) -> int:
        return self.handle.num_tokens

    def layer(self, index: int) -> LayerKV:
        return _tokens(self._data[index], self.num_tokens)

    def check(self) -> None:
        """A copy cannot go stale: it was whole when it was made."""


def _tokens(pages: torch.Tensor, count: int) -> LayerKV:
    """`[pages, 2, page_size, heads, dim]` to K and V `[count, heads, dim]`."""
    tokens = pages.transpose(0, 1).flatten(1, 2)[:, :count]
    return tokens[0], tokens[1]


class PoolAccess:
    """One process's way to one store's pages."""

    def __init__(self, store: StoreClient, *, device: torch.device | str = "cpu", share: bool = True) -> None:
        """Attach to the store's pool, or settle for copies.

        Args:
            store: Whose pages.
            device: Where prefixes are read. Other than "cpu" they are copied there.
            share: False never maps the pool, as if the store were on another host.
        """
        self._store = store
        self._device = torch.device(device)
        self.store_id, self._layout, address = store.describe()
        self._dtype = DTYPES[self._layout.dtype]
        self._copies: OrderedDict[int, CopiedPrefix] = OrderedDict()
        self._memory: PagedMemory | None = None
        if share:
            try:
                self._memory = PagedMemory.attach(self._layout, address)
            except OSError:
                return
            self._pool = self._view(self._memory.pool)

    @property
    def kind(self) -> str:
        """`shared` when the store's own memory is read and written in place, else `copied`."""
        return "shared" if self._memory is not None else "copied"

    def write(self, handle: KVHandle, kv: Sequence[LayerKV]) -> None:
        """Fill a reserved entry with K and V `[tokens, kv_heads, head_dim]` of each layer.

        Raises:
            StaleHandle: the reservation is gone.
        """
        if self._memory is not None:
            self._memory.check(handle)
            self._fill(self._pool, handle.pages, kv)
            return
        shape = (self._layout.layers, len(handle.pages), *self._layout.shape[2:])
        entry = torch.zeros(shape, dtype=self._dtype)
        self._fill(entry, range(len(handle.pages)), kv)
        raw = entry.view(torch.uint8).numpy()
        self._store.write(handle, raw.reshape(*shape[:3], self._layout.half_page_bytes))

    def resolve(self, handle: KVHandle) -> PagedPrefix | CopiedPrefix:
        """The entry of a handle, ready to be read.

        Raises:
            StaleHandle: the handle is of another store, or its pages were given away.
        """
        if handle.store_id != self.store_id:
            raise StaleHandle(f"entry {handle.key} belongs to store {handle.store_id}, this is {self.store_id}")
        if self._memory is not None and self._device.type == "cpu":
            self._memory.check(handle)
            return PagedPrefix(handle, self._pool, self._memory)
        if handle.epoch not in self._copies:
            source = self._memory if self._memory is not None else self._store
            self._copies[handle.epoch] = CopiedPrefix(handle, self._view(source.read(handle)).to(self._device))
            while len(self._copies) > COPIES_KEPT:
                self._copies.popitem(last=False)
        self._copies.move_to_end(handle.epoch)
        return self._copies[handle.epoch]

    def _fill(self, pool: torch.Tensor, pages: Sequence[int], kv: Sequence[LayerKV]) -> None:
        size = self._layout.page_size
        for layer, tensors in enumerate(kv):
            for which, tensor in enumerate(tensors):
                for index, page in enumerate(pages):
                    part = tensor[index * size : (index + 1) * size]
                    pool[layer, page, which, : len(part)].copy_(part)

    def _view(self, raw: np.ndarray) -> torch.Tensor:
        """Bytes `[layers, pages, 2, half_page_bytes]` as `[layers, pages, 2, page_size, kv_heads, head_dim]`."""
        if not raw.flags.writeable:
            raw = raw.copy()
        layers, pages = raw.shape[:2]
        return torch.from_numpy(raw).view(self._dtype).view(layers, pages, *self._layout.shape[2:])
