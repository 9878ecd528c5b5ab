"""The bytes behind the page numbers, in a region that other processes can map.

Plain bytes: what they mean as tensors is known where they are computed with (`mapping.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .handle import KVHandle, PageLayout, StaleHandle
from .region import RegionAddress, SharedRegion

ALIGNMENT = 4096


class PagedMemory:
    """Page owners, then the pool.

    Attributes:
        epochs: `[pages]` int64, the entry that each page belongs to, 0 for none. Only the store writes it.
        pool: `[layers, pages, 2, half_page_bytes]` uint8.
    """

    def __init__(self, layout: PageLayout, region: SharedRegion) -> None:
        self.layout = layout
        self.region = region
        self.epochs = np.frombuffer(region.buffer, np.int64, layout.pages)
        flat = np.frombuffer(region.buffer, np.uint8, layout.pool_bytes, offset=_pool_offset(layout))
        self.pool = flat.reshape(layout.layers, layout.pages, 2, layout.half_page_bytes)

    @classmethod
    def create(cls, layout: PageLayout) -> PagedMemory:
        return cls(layout, SharedRegion.create(_pool_offset(layout) + layout.pool_bytes))

    @classmethod
    def attach(cls, layout: PageLayout, address: RegionAddress) -> PagedMemory:
        """Raises `OSError` where the region cannot be mapped (`SharedRegion.attach`)."""
        return cls(layout, SharedRegion.attach(address))

    def mark(self, pages: Iterable[int], epoch: int) -> None:
        """Note whose the pages are from now on."""
        self.epochs[list(pages)] = epoch

    def check(self, handle: KVHandle) -> None:
        """Raise `StaleHandle` unless every page of the handle still belongs to its entry."""
        if not (self.epochs[list(handle.pages)] == handle.epoch).all():
            raise StaleHandle(f"pages of entry {handle.key} (epoch {handle.epoch}) were given to another entry")

    def read(self, handle: KVHandle) -> np.ndarray:
        """A copy of the entry, `[layers, entry pages, 2, half_page_bytes]`."""
        data = self.pool[:, list(handle.pages)]
        self.check(handle)
        return data

    def write(self, handle: KVHandle, data: np.ndarray) -> None:
        """Fill the entry from what `read` would return."""
        self.check(handle)
        self.pool[:, list(handle.pages)] = data


def _pool_offset(layout: PageLayout) -> int:
    return -(-layout.pages * 8 // ALIGNMENT) * ALIGNMENT
