"""What every node is: built from settings, warmed up, asked, closed."""

from __future__ import annotations

import gc
from typing import Any

import torch

from cosmos3_model.config import SnapshotConfig
from kvstore.mapping import PoolAccess, StoreClient

from .job import NodeSettings


class Node:
    """A room. Subclasses add the methods that the graph calls; they take a `Job` and plain data."""

    kind: str

    def __init__(self, settings: NodeSettings) -> None:
        """Load what the node needs from the snapshot.

        Raises:
            SnapshotError: the snapshot is not usable.
        """
        torch.set_num_threads(settings.threads)
        self.settings = settings
        self.snapshot = SnapshotConfig.from_folder(settings.snapshot)

    def warm_up(self) -> None:
        """Do the first, slow call of everything, so that the first request does not pay for it."""

    def attach_store(self, store: StoreClient) -> None:
        """Nodes that read or write K/V keep a way to it; to the others it means nothing."""

    def stats(self) -> dict[str, Any]:
        """Plain values about this node."""
        return {}

    def close(self) -> None:
        """Let go of the device: weights, copies and what the allocator keeps. The node is of no use afterwards."""
        self.__dict__.clear()
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


class StoreNode(Node):
    """A node that reads or writes the store's pages."""

    def __init__(self, settings: NodeSettings) -> None:
        super().__init__(settings)
        self._store: StoreClient | None = None
        self._pool: PoolAccess | None = None

    def attach_store(self, store: StoreClient) -> None:
        self._store = store
        self._pool = PoolAccess(store, device=self.settings.device, share=self.settings.share_pool)

    @property
    def store(self) -> StoreClient:
        assert self._store is not None, "attach_store comes first"
        return self._store

    @property
    def pool(self) -> PoolAccess:
        assert self._pool is not None, "attach_store comes first"
        return self._pool

    def stats(self) -> dict[str, Any]:
        return {"pool": self._pool.kind if self._pool else "none"}
