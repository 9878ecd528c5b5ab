"""The store as an actor: waiting for room and for writers, the sweep for dead owners, and an end to every call."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from kvstore.actor import KVStoreActor, RayStoreClient
from kvstore.handle import PageLayout, StaleHandle, StoreFull, StoreLost

LAYOUT = PageLayout(layers=1, pages=4, page_size=2, kv_heads=1, head_dim=2, dtype="float32")


@pytest.fixture
def actor(pipeline: Any) -> Iterator[Any]:
    """A small store of its own, on the session's Ray."""
    made: Any = KVStoreActor
    actor = made.options(num_cpus=0).remote(LAYOUT, 0.6)
    yield actor
    ray.kill(actor)


@pytest.fixture
def store(actor: Any) -> RayStoreClient:
    client = RayStoreClient(actor, reserve_timeout=5.0)
    client.describe()
    return client


def later(seconds: float, action: Any) -> None:
    threading.Timer(seconds, action).start()


def renewing(store: RayStoreClient, *owners: str) -> threading.Event:
    """Keep leases alive until the event is set."""
    stop = threading.Event()

    def renew() -> None:
        while not stop.wait(0.15):
            store.renew(owners)

    threading.Thread(target=renew, daemon=True).start()
    return stop


def test_a_full_store_is_waited_for(store: RayStoreClient) -> None:
    stop = renewing(store, "a")
    store.commit(store.reserve("k", 8, "a").handle, "a")
    later(0.8, lambda: store.release("a"))
    started = time.monotonic()
    assert store.reserve("other", 2, "b").hit is False
    assert 0.5 < time.monotonic() - started < 4
    stop.set()


def test_the_wait_has_an_end(actor: Any, store: RayStoreClient) -> None:
    stop = renewing(store, "a")
    store.commit(store.reserve("k", 8, "a").handle, "a")
    with pytest.raises(StoreFull, match=r"no room after 0.4 s: 1 pages of 2 tokens are needed, 0 of 4"):
        RayStoreClient(actor, reserve_timeout=0.4).reserve("other", 2, "b")
    stop.set()


def test_what_can_never_fit_is_not_waited_for(store: RayStoreClient) -> None:
    started = time.monotonic()
    with pytest.raises(StoreFull, match="5 pages"):
        store.reserve("k", 10, "a")
    assert time.monotonic() - started < 2


def test_an_entry_that_another_writes_is_waited_for_and_then_shared(store: RayStoreClient) -> None:
    stop = renewing(store, "a", "b")
    handle = store.reserve("k", 4, "a").handle
    later(0.8, lambda: store.commit(handle, "a"))
    reservation = store.reserve("k", 4, "b")
    assert reservation.hit
    assert reservation.handle == handle
    stop.set()


def test_a_writer_that_gives_up_lets_the_next_one_write(store: RayStoreClient) -> None:
    store.reserve("k", 4, "a")
    later(0.5, lambda: store.release("a"))
    assert store.reserve("k", 4, "b").hit is False


def test_the_pages_of_a_dead_owner_come_back(store: RayStoreClient) -> None:
    store.commit(store.reserve("k", 8, "dead").handle, "dead")
    assert store.stats()["pages_in_use"] == 4
    deadline = time.monotonic() + 10
    while store.stats()["pages_in_use"]:
        assert time.monotonic() < deadline, "the lease of an owner that renews nothing has no end"
        time.sleep(0.1)
    assert store.stats()["expired_owners"] == 1
    assert store.check_integrity()


def test_errors_come_through_with_their_names(actor: Any, store: RayStoreClient) -> None:
    handle = store.reserve("k", 4, "a").handle
    store.release("a")
    with pytest.raises(StaleHandle, match="entry k"):
        store.commit(handle, "a")
    ray.kill(actor)
    deadline = time.monotonic() + 10
    with pytest.raises(StoreLost, match="does not answer"):
        while time.monotonic() < deadline:  # a kill takes a moment
            store.describe()
