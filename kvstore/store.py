"""The store's logic, with no process, no clock of its own and no waiting in it.

An entry is reserved, written by whoever reserved it, and committed; from then on it is frozen. Requests lease
entries by name of owner (a request id). An entry without a lease stays as a cached one, and is evicted, the
least recently used first, when pages are wanted. An owner that does not renew its leases loses them.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from .handle import EntryPending, KVHandle, PageLayout, StaleHandle, StoreFull
from .pool import PagePool

# Leases that an owner with an unfinished reservation may let pass.
WRITER_GRACE = 6


@dataclass(frozen=True)
class Reservation:
    """Answer to `reserve`: the entry, leased; `hit` says that it is there already and must not be written."""

    handle: KVHandle
    hit: bool


@dataclass
class _Entry:
    handle: KVHandle
    writer: str | None  # owner that is writing it; None once committed
    last_used: int
    owners: set[str] = field(default_factory=set)


class KVStore:
    """Entries, leases and pages of one pool."""

    def __init__(
        self,
        layout: PageLayout,
        *,
        lease_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        on_pages: Callable[[Iterable[int], int], None] | None = None,
    ) -> None:
        """An empty store over a pool of `layout`.

        Args:
            layout: Of the pool.
            lease_seconds: After this long without `renew` an owner is taken for dead.
            clock: Seconds, monotonic.
            on_pages: Told which pages belong to which epoch from now on, 0 for none, so that readers can see it.
        """
        self.layout = layout
        self.store_id = uuid.uuid4().hex
        self.pool = PagePool(layout.pages)
        self._entries: dict[str, _Entry] = {}
        self._deadlines: dict[str, float] = {}
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._on_pages = on_pages or (lambda pages, epoch: None)
        self._epoch = 0
        self._tick = 0
        self._counters = {"hits": 0, "misses": 0, "evictions": 0, "expired_owners": 0}

    def reserve(self, key: str, num_tokens: int, owner: str) -> Reservation:
        """Lease the entry `key` to `owner`, making room for it if it is not there.

        Raises:
            EntryPending: another owner is writing it; try again when the store has changed.
            StoreFull: it does not fit, even with every unleased entry evicted. Nothing was evicted for it.
        """
        entry = self._entries.get(key)
        if entry is not None:
            if entry.writer not in (None, owner):
                raise EntryPending(f"entry {key} is being written by {entry.writer}")
            self._counters["hits"] += entry.writer is None
            self._lease(entry, owner)
            return Reservation(entry.handle, hit=entry.writer is None)
        pages = self.layout.pages_for(num_tokens)
        self._make_room(pages)
        self._counters["misses"] += 1
        self._epoch += 1
        handle = KVHandle(key, num_tokens, self.pool.allocate(pages), self.layout, self.store_id, self._epoch)
        self._on_pages(handle.pages, handle.epoch)
        entry = _Entry(handle, writer=owner, last_used=self._tick)
        self._entries[key] = entry
        self._lease(entry, owner)
        return Reservation(handle, hit=False)

    def commit(self, handle: KVHandle, owner: str) -> None:
        """Freeze an entry that `owner` has written in full.

        Raises:
            StaleHandle: the reservation is gone, or is another's.
        """
        entry = self._find(handle)
        if entry.writer != owner:
            raise StaleHandle(f"entry {handle.key} is not being written by {owner}")
        entry.writer = None

    def lease(self, handle: KVHandle, owner: str) -> None:
        """Let `owner` read a committed entry until it releases or stops renewing.

        Raises:
            StaleHandle: the entry is gone.
        """
        entry = self._find(handle)
        if entry.writer is not None:
            raise StaleHandle(f"entry {handle.key} is not committed")
        self._lease(entry, owner)

    def release(self, owner: str) -> None:
        """End every lease of `owner`; entries that it was still writing are dropped. Unknown owners are fine."""
        self._deadlines.pop(owner, None)
        for key, entry in list(self._entries.items()):
            if owner not in entry.owners:
                continue
            entry.owners.remove(owner)
            self._free(entry.handle)
            if entry.writer == owner:
                del self._entries[key]
                self._free(entry.handle)

    def renew(self, owners: Iterable[str]) -> list[str]:
        """Push the end of the owners' leases out; returns those that hold none (any more)."""
        now = self._clock()
        unknown = []
        for owner in owners:
            if owner in self._deadlines:
                self._deadlines[owner] = now + self._lease_seconds
            else:
                unknown.append(owner)
        return unknown

    def expire(self) -> list[str]:
        """Release the owners whose leases have ended, and return them.

        An owner that is writing is given longer: its driver may be slow to renew while a prefill worker still copies
        into its pages, and those must not be another's by then.
        """
        now = self._clock()
        writers = {entry.writer for entry in self._entries.values()}
        grace = (WRITER_GRACE - 1) * self._lease_seconds
        dead = [
            owner for owner, deadline in self._deadlines.items() if now >= deadline + (grace if owner in writers else 0)
        ]
        for owner in dead:
            self.release(owner)
        self._counters["expired_owners"] += len(dead)
        return dead

    def evict(self, key: str) -> bool:
        """Drop a committed entry that nobody leases; False if there is none such."""
        entry = self._entries.get(key)
        if entry is None or entry.owners:
            return False
        del self._entries[key]
        self._free(entry.handle)
        self._counters["evictions"] += 1
        return True

    def check(self, handle: KVHandle) -> None:
        """Raise `StaleHandle` unless the handle's entry is here and committed."""
        if self._find(handle).writer is not None:
            raise StaleHandle(f"entry {handle.key} is not committed")

    def stats(self) -> dict[str, Any]:
        """Counts of now and since the start. `pages_in_use` are leased ones; cached ones are free for the taking."""
        leased = sum(len(entry.handle.pages) for entry in self._entries.values() if entry.owners)
        return {
            "store_id": self.store_id,
            "entries": len(self._entries),
            "pages_total": self.pool.num_pages,
            "pages_free": self.pool.num_free,
            "pages_in_use": leased,
            "pages_cached": self.pool.num_used - leased,
            "leases": sum(len(entry.owners) for entry in self._entries.values()),
            "owners": len(self._deadlines),
            **self._counters,
        }

    def check_integrity(self) -> bool:
        """Every page is free or belongs to exactly one entry, with one reference for it and one a lease.

        Raises:
            AssertionError: naming what does not add up.
        """
        self.pool.check_integrity()
        seen: set[int] = set()
        holders: set[str] = set()
        for key, entry in self._entries.items():
            assert key == entry.handle.key
            assert len(entry.handle.pages) == self.layout.pages_for(entry.handle.num_tokens)
            assert seen.isdisjoint(entry.handle.pages), f"a page of {key} belongs to another entry too"
            assert entry.writer is None or entry.writer in entry.owners, f"{key} is written by an owner with no lease"
            for page in entry.handle.pages:
                assert self.pool.references(page) == 1 + len(entry.owners), f"page {page} of {key} is miscounted"
            seen.update(entry.handle.pages)
            holders |= entry.owners
        assert len(seen) == self.pool.num_used, f"{self.pool.num_used - len(seen)} used pages belong to no entry"
        assert holders == set(self._deadlines), "owners with a deadline and owners with a lease differ"
        return True

    def _lease(self, entry: _Entry, owner: str) -> None:
        self._tick += 1
        entry.last_used = self._tick
        self._deadlines[owner] = self._clock() + self._lease_seconds
        if owner not in entry.owners:
            entry.owners.add(owner)
            self.pool.retain(entry.handle.pages)

    def _find(self, handle: KVHandle) -> _Entry:
        entry = self._entries.get(handle.key)
        if handle.store_id != self.store_id or entry is None or entry.handle.epoch != handle.epoch:
            raise StaleHandle(f"entry {handle.key} (epoch {handle.epoch}) is not in this store any more")
        return entry

    def _make_room(self, pages: int) -> None:
        idle = sorted((e for e in self._entries.values() if not e.owners), key=lambda e: e.last_used)
        reclaimable = self.pool.num_free + sum(len(e.handle.pages) for e in idle)
        if pages > reclaimable:
            raise StoreFull(
                f"{pages} pages of {self.layout.page_size} tokens are needed, {reclaimable} of "
                f"{self.pool.num_pages} are free or can be evicted"
            )
        for entry in idle:
            if self.pool.can_allocate(pages):
                return
            self.evict(entry.handle.key)

    def _free(self, handle: KVHandle) -> None:
        freed = self.pool.release(handle.pages)
        if freed:
            self._on_pages(freed, 0)
