"""A store and its memory in one process: what the store actor holds, and what tests use without Ray."""

from __future__ import annotations

from typing import Any

import numpy as np

from .handle import KVHandle, PageLayout
from .memory import PagedMemory
from .region import RegionAddress
from .store import KVStore


class LocalStore(KVStore):
    """`KVStore` over memory that it owns; implements `mapping.StoreClient`."""

    def __init__(self, layout: PageLayout, **options: Any) -> None:
        self.memory = PagedMemory.create(layout)
        super().__init__(layout, on_pages=self.memory.mark, **options)

    def describe(self) -> tuple[str, PageLayout, RegionAddress]:
        """Id, layout and address of the pool: what another process needs to map it."""
        return self.store_id, self.layout, self.memory.region.address

    def read(self, handle: KVHandle) -> np.ndarray:
        """A copy of a committed entry, `[layers, entry pages, 2, half_page_bytes]` uint8."""
        self.check(handle)
        return self.memory.read(handle)

    def write(self, handle: KVHandle, data: np.ndarray) -> None:
        """Fill a reserved entry on behalf of a writer that cannot map the pool; `data` as `read` returns it."""
        self.memory.write(handle, data)
