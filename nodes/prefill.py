"""Token ids to a handle of frozen K/V: the understanding tower, run once per text that the store does not know."""

from __future__ import annotations

from typing import Any

import torch

from cosmos3_model.attention import DensePrefix
from cosmos3_model.sampling import NonFiniteError
from cosmos3_model.transformer import load_understanding
from kvstore.handle import KVHandle, PageLayout, fingerprint

from .base import StoreNode
from .job import Job, NodeSettings


def page_layout(snapshot: Any, *, pages: int, page_size: int, dtype: str) -> PageLayout:
    """The pool that K/V of this checkpoint goes into."""
    config = snapshot.transformer
    return PageLayout(config.num_hidden_layers, pages, page_size, config.num_key_value_heads, config.head_dim, dtype)


class PrefillNode(StoreNode):
    kind = "prefill"

    def __init__(self, settings: NodeSettings) -> None:
        super().__init__(settings)
        self._tower = load_understanding(
            self.snapshot, dtype=settings.torch_dtype, device=settings.device, attention=settings.attention
        )
        self._counters = {"prefilled_tokens": 0, "prefilled_prompts": 0, "store_hits": 0}

    def warm_up(self) -> None:
        self._tower(torch.zeros(8, dtype=torch.long, device=self.settings.device))

    def prefill(self, job: Job, ids: list[list[int]]) -> list[KVHandle]:
        """One committed, leased handle per branch. A text that the store holds already is not run again.

        Called again for the same request, after a crash, it goes on with what that request had reserved.

        Raises:
            StoreFull: no room for the text within the store's waiting time.
            StoreLost: the store is gone; a new one must be attached first.
            NonFiniteError: the tower made NaN or infinity.
        """
        job.check_deadline("prefill")
        return [self._entry(job.request_id, branch) for branch in ids]

    def _entry(self, owner: str, ids: list[int]) -> KVHandle:
        key = fingerprint(self.snapshot.fingerprint, "understanding", self.settings.dtype, ids)
        reservation = self.store.reserve(key, len(ids), owner)
        if reservation.hit:
            self._counters["store_hits"] += 1
            return reservation.handle
        try:
            prefix = self._tower(torch.tensor(ids, device=self.settings.device))
            _check_finite(prefix)
            self.pool.write(reservation.handle, prefix.layers)
            self.store.commit(reservation.handle, owner)
        except Exception:
            self.store.release(owner)
            raise
        self._counters["prefilled_tokens"] += len(ids)
        self._counters["prefilled_prompts"] += 1
        return reservation.handle

    def stats(self) -> dict[str, Any]:
        return super().stats() | self._counters


def _check_finite(prefix: DensePrefix) -> None:
    for index, (k, v) in enumerate(prefix.layers):
        if not bool(torch.isfinite(k).all() & torch.isfinite(v).all()):
            raise NonFiniteError(f"K/V of layer {index} is not finite")
