"""What crosses between nodes in place of K/V: small frozen values that msgpack can carry."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgpack

# By name and size only: the store never computes, and its process does without torch.
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


class StoreError(RuntimeError):
    """Base of all that can go wrong between a store and those who use it."""


class StoreFull(StoreError):
    """No room for an entry: every page is leased, or the entry is larger than the pool."""


class EntryPending(StoreError):
    """Somebody else is writing this very entry at the moment; it is worth waiting for."""


class StaleHandle(StoreError):
    """A handle whose entry is gone: another store, an evicted entry, or pages that were given to another."""


class StoreLost(StoreError):
    """The store's process does not answer any more."""


@dataclass(frozen=True)
class PageLayout:
    """The shape of the pool: `[layers, pages, 2, page_size, kv_heads, head_dim]` of `dtype`.

    One page holds `page_size` tokens of one layer's K (index 0) and V (index 1); an entry has the same page
    numbers in every layer. FlashInfer reads this layout as NHD.
    """

    layers: int
    pages: int
    page_size: int
    kv_heads: int
    head_dim: int
    dtype: str

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        return (self.layers, self.pages, 2, self.page_size, self.kv_heads, self.head_dim)

    @property
    def half_page_bytes(self) -> int:
        """Bytes of the K, or of the V, of one page in one layer."""
        return self.page_size * self.kv_heads * self.head_dim * ITEMSIZE[self.dtype]

    @property
    def pool_bytes(self) -> int:
        return self.layers * self.pages * 2 * self.half_page_bytes

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)


@dataclass(frozen=True)
class KVHandle:
    """Names one frozen entry of one store.

    Attributes:
        key: Fingerprint of checkpoint, tower, dtype and token ids (`fingerprint`).
        num_tokens: Tokens of text.
        pages: Page numbers, in token order; the last may be partly filled.
        layout: Of the pool that the pages belong to.
        store_id: Of the store; a new store, even for the same pool, has another.
        epoch: Counts the entries of a store. Page owners are marked with it, so a page that was given to another
            entry is recognised by whoever still holds this handle.
    """

    key: str
    num_tokens: int
    pages: tuple[int, ...]
    layout: PageLayout
    store_id: str
    epoch: int

    def to_bytes(self) -> bytes:
        return msgpack.packb(asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> KVHandle:
        """Raises `ValueError` for bytes that are no handle."""
        try:
            values: dict[str, Any] = msgpack.unpackb(data)
            pages = tuple(values.pop("pages"))
            return cls(pages=pages, layout=PageLayout(**values.pop("layout")), **values)
        except (TypeError, KeyError, AttributeError, ValueError, msgpack.UnpackException) as error:
            raise ValueError(f"not a KV handle: {error}") from None


def fingerprint(checkpoint: str, tower: str, dtype: str, token_ids: Sequence[int]) -> str:
    """The key of an entry: equal text under equal weights in equal precision has equal K/V."""
    digest = hashlib.sha256(msgpack.packb([checkpoint, tower, dtype, list(token_ids)]))
    return digest.hexdigest()[:40]
