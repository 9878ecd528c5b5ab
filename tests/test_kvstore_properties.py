"""Random sequences of everything that can happen to a store; it adds up after each."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.handle import EntryPending, KVHandle, PageLayout, StaleHandle, StoreFull
from kvstore.local import LocalStore

LAYOUT = PageLayout(layers=1, pages=8, page_size=2, kv_heads=1, head_dim=2, dtype="float32")
KEYS = st.sampled_from("abcdef")
OWNERS = st.sampled_from(["r1", "r2", "r3"])
TOKENS = {key: 1 + 2 * index for index, key in enumerate("abcdef")}


class StoreMachine(RuleBasedStateMachine):
    """The model: who holds what, and what each entry's pages were filled with."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.store = LocalStore(LAYOUT, lease_seconds=10, clock=lambda: self.now)
        self.held: dict[str, dict[str, KVHandle]] = {owner: {} for owner in ("r1", "r2", "r3")}
        self.writing: dict[str, str] = {}
        self.seen: list[KVHandle] = []

    @rule(key=KEYS, owner=OWNERS)
    def reserve(self, key: str, owner: str) -> None:
        free = self.store.pool.num_free
        try:
            reservation = self.store.reserve(key, TOKENS[key], owner)
        except EntryPending:
            assert self.writing[key] != owner
            return
        except StoreFull:
            assert LAYOUT.pages_for(TOKENS[key]) > free
            return
        handle = reservation.handle
        assert handle.num_tokens == TOKENS[key]
        assert reservation.hit == (handle in self.seen)
        self.held[owner][key] = handle
        if not reservation.hit:
            self.writing[key] = owner
            self.store.write(handle, self.store.memory.read(handle) * 0 + handle.epoch % 251)

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.writing)))
        owner = self.writing.pop(key)
        handle = self.held[owner][key]
        self.store.commit(handle, owner)
        self.seen.append(handle)

    @precondition(lambda self: self.seen)
    @rule(data=st.data(), owner=OWNERS)
    def lease(self, data: st.DataObject, owner: str) -> None:
        handle = data.draw(st.sampled_from(self.seen))
        try:
            self.store.lease(handle, owner)
        except StaleHandle:
            assert all(handle not in held.values() for held in self.held.values())
            return
        self.held[owner][handle.key] = handle

    @rule(owner=OWNERS)
    def release(self, owner: str) -> None:
        self.store.release(owner)
        self.forget(owner)

    @rule(key=KEYS)
    def evict(self, key: str) -> None:
        evicted = self.store.evict(key)
        assert not (evicted and any(key in held for held in self.held.values()))

    @rule(owners=st.sets(OWNERS))
    def owners_die(self, owners: set[str]) -> None:
        """Everybody else renews, the dead do not, and time passes."""
        self.now += 9
        self.store.renew(sorted({"r1", "r2", "r3"} - owners))
        self.now += 2
        dead = self.store.expire()
        assert set(dead) <= owners - set(self.writing.values())
        assert all(owner in dead or owner in self.writing.values() or not self.held[owner] for owner in owners)
        for owner in dead:
            self.forget(owner)
        # Those that were writing get longer, and then lose what they wrote.
        self.now += 51
        self.store.renew(sorted({"r1", "r2", "r3"} - owners))
        for owner in self.store.expire():
            assert owner in owners
            self.forget(owner)

    def forget(self, owner: str) -> None:
        self.held[owner].clear()
        self.writing = {key: writer for key, writer in self.writing.items() if writer != owner}

    @invariant()
    def adds_up(self) -> None:
        assert self.store.check_integrity()
        stats = self.store.stats()
        assert stats["pages_in_use"] + stats["pages_cached"] + stats["pages_free"] == LAYOUT.pages
        assert stats["leases"] == sum(len(held) for held in self.held.values())
        assert stats["owners"] == sum(bool(held) for held in self.held.values())

    @invariant()
    def what_is_held_is_intact(self) -> None:
        for held in self.held.values():
            for handle in held.values():
                assert (self.store.memory.read(handle) == handle.epoch % 251).all()


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
