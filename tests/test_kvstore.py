"""The store's logic: pages, entries, leases, handles."""

from __future__ import annotations

import pytest

from kvstore.handle import EntryPending, KVHandle, PageLayout, StaleHandle, StoreFull, fingerprint
from kvstore.pool import PagePool
from kvstore.store import KVStore

LAYOUT = PageLayout(layers=2, pages=10, page_size=4, kv_heads=2, head_dim=8, dtype="float32")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> KVStore:
    return KVStore(LAYOUT, lease_seconds=10, clock=clock)


def fill(store: KVStore, key: str, tokens: int = 4, owner: str = "a") -> KVHandle:
    handle = store.reserve(key, tokens, owner).handle
    store.commit(handle, owner)
    return handle


def test_pool_counts_references() -> None:
    pool = PagePool(3)
    pages = pool.allocate(2)
    pool.retain(pages)
    assert pool.release(pages) == []
    assert pool.release(pages) == list(pages)
    assert pool.num_free == 3
    assert pool.check_integrity()


def test_pool_refuses_what_does_not_add_up() -> None:
    pool = PagePool(2)
    page = pool.allocate(1)
    pool.release(page)
    with pytest.raises(AssertionError):
        pool.release(page)
    with pytest.raises(AssertionError):
        pool.retain(page)
    with pytest.raises(AssertionError):
        pool.allocate(3)
    pool._free.append(0)
    with pytest.raises(AssertionError, match="twice"):
        pool.check_integrity()


def test_equal_text_is_a_hit_and_shares_pages(store: KVStore) -> None:
    first = fill(store, "negative", 7, "a")
    again = store.reserve("negative", 7, "b")
    assert again.hit
    assert again.handle == first
    assert store.stats()["pages_in_use"] == 2
    assert (store.stats()["hits"], store.stats()["misses"]) == (1, 1)
    assert store.check_integrity()


def test_entry_stays_cached_after_its_last_lease(store: KVStore) -> None:
    fill(store, "k", 8, "a")
    store.release("a")
    stats = store.stats()
    assert (stats["pages_in_use"], stats["pages_cached"], stats["leases"]) == (0, 2, 0)
    assert store.reserve("k", 8, "b").hit


def test_the_least_recently_used_entry_goes_first(store: KVStore) -> None:
    for key in ("old", "used", "new"):
        fill(store, key, 12, "a")
    store.release("a")
    store.reserve("old", 12, "b")  # old is now the most recent, and leased
    store.release("b")
    fill(store, "wanted", 12, "c")
    assert store.reserve("old", 12, "d").hit
    assert store.reserve("new", 12, "d").hit
    assert store.stats()["evictions"] == 1
    with pytest.raises(StoreFull):
        store.reserve("used", 12, "d")


def test_a_leased_entry_is_never_evicted(store: KVStore) -> None:
    handle = fill(store, "k", 40, "a")
    with pytest.raises(StoreFull, match="1 pages of 4 tokens are needed, 0 of 10"):
        store.reserve("other", 1, "b")
    assert not store.evict("k")
    store.check(handle)


def test_a_failed_reservation_evicts_nothing(store: KVStore) -> None:
    fill(store, "cached", 4, "a")
    store.release("a")
    fill(store, "leased", 24, "b")
    with pytest.raises(StoreFull):
        store.reserve("large", 20, "c")
    assert store.reserve("cached", 4, "d").hit


def test_an_entry_that_is_being_written_is_not_handed_out(store: KVStore) -> None:
    handle = store.reserve("k", 4, "a").handle
    with pytest.raises(EntryPending):
        store.reserve("k", 4, "b")
    with pytest.raises(StaleHandle, match="not committed"):
        store.lease(handle, "b")
    with pytest.raises(StaleHandle):
        store.commit(handle, "b")
    assert store.reserve("k", 4, "a").hit is False  # the writer itself, after a crash, goes on
    store.commit(handle, "a")
    assert store.reserve("k", 4, "b").hit


def test_a_writer_that_dies_loses_its_reservation(store: KVStore, clock: Clock) -> None:
    """Not before a worker that still writes for it must have finished."""
    handle = store.reserve("k", 4, "a").handle
    clock.now = 59.0
    assert store.expire() == []
    clock.now = 60.0
    assert store.expire() == ["a"]
    with pytest.raises(StaleHandle):
        store.commit(handle, "a")
    assert store.reserve("k", 4, "b").hit is False
    assert store.check_integrity()


def test_leases_end_unless_renewed(store: KVStore, clock: Clock) -> None:
    fill(store, "k", 4, "dead")
    store.lease(store.reserve("k", 4, "alive").handle, "alive")
    clock.now = 9.0
    assert store.renew(["alive", "unknown"]) == ["unknown"]
    clock.now = 12.0
    assert store.expire() == ["dead"]
    assert store.stats()["leases"] == 1
    clock.now = 19.0
    assert store.expire() == ["alive"]
    assert store.stats()["pages_in_use"] == 0


def test_stale_handles_have_a_name(store: KVStore, clock: Clock) -> None:
    handle = fill(store, "k", 4, "a")
    store.release("a")
    assert store.evict("k")
    with pytest.raises(StaleHandle, match="entry k"):
        store.lease(handle, "b")
    again = fill(store, "k", 4, "b")
    assert again.epoch != handle.epoch
    with pytest.raises(StaleHandle):
        store.check(handle)
    with pytest.raises(StaleHandle):
        KVStore(LAYOUT).check(again)


def test_handles_travel_as_msgpack(store: KVStore) -> None:
    handle = fill(store, "k", 7, "a")
    assert KVHandle.from_bytes(handle.to_bytes()) == handle
    assert len(handle.to_bytes()) < 512
    for broken in (b"", b"\x00", b"not a handle", handle.to_bytes()[:-3]):
        with pytest.raises(ValueError, match="not a KV handle"):
            KVHandle.from_bytes(broken)


def test_fingerprints_differ_in_each_part() -> None:
    parts = ("checkpoint", "tower", "float32", [1, 2, 3])
    keys = {fingerprint(*parts)}
    for index, other in enumerate(("x", "x", "bfloat16", [1, 2])):
        changed = list(parts)
        changed[index] = other
        keys.add(fingerprint(*changed))
    assert len(keys) == 5
