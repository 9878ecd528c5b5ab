"""How other processes see the pool: in place, without a copy, and never somebody else's pages."""

from __future__ import annotations

import multiprocessing
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from kvstore.handle import PageLayout, StaleHandle
from kvstore.local import LocalStore
from kvstore.mapping import LayerKV, PoolAccess
from kvstore.memory import PagedMemory
from kvstore.region import RegionAddress, SharedRegion

LAYOUT = PageLayout(layers=2, pages=10, page_size=4, kv_heads=2, head_dim=8, dtype="bfloat16")
TOKENS = 7
MIB = 1 << 20


def random_kv(tokens: int = TOKENS) -> list[LayerKV]:
    return [tuple(torch.randn(2, tokens, 2, 8).bfloat16().unbind()) for _ in range(LAYOUT.layers)]  # type: ignore[misc]


def put(store: LocalStore, access: PoolAccess, kv: list[LayerKV], key: str = "k", owner: str = "a") -> Any:
    handle = store.reserve(key, TOKENS, owner).handle
    access.write(handle, kv)
    store.commit(handle, owner)
    return handle


@pytest.mark.parametrize("writer_shares", [True, False])
@pytest.mark.parametrize("reader_shares", [True, False])
def test_what_is_written_is_read_bit_for_bit(writer_shares: bool, reader_shares: bool) -> None:
    store = LocalStore(LAYOUT)
    kv = random_kv()
    handle = put(store, PoolAccess(store, share=writer_shares), kv)
    reader = PoolAccess(store, share=reader_shares)
    assert reader.kind == ("shared" if reader_shares else "copied")
    prefix = reader.resolve(handle)
    assert prefix.num_tokens == TOKENS
    for layer, (k, v) in enumerate(kv):
        read_k, read_v = prefix.layer(layer)
        assert torch.equal(read_k, k)
        assert torch.equal(read_v, v)


def test_a_copy_is_made_once_for_an_entry() -> None:
    store = LocalStore(LAYOUT)
    handle = put(store, PoolAccess(store), random_kv())
    reader = PoolAccess(store, share=False)
    assert reader.resolve(handle) is reader.resolve(handle)


@pytest.mark.parametrize("share", [True, False])
def test_a_handle_of_an_evicted_entry_is_refused(share: bool) -> None:
    store = LocalStore(LAYOUT)
    handle = put(store, PoolAccess(store), random_kv())
    reader = PoolAccess(store, share=share)
    store.release("a")
    store.evict("k")
    with pytest.raises(StaleHandle):
        reader.resolve(handle)


def test_pages_that_are_given_away_under_a_reader_are_noticed() -> None:
    store = LocalStore(LAYOUT)
    access = PoolAccess(store)
    prefix = access.resolve(put(store, access, random_kv()))
    prefix.check()
    store.release("a")
    store.evict("k")
    for index in range(5):  # until the free list comes round to the same pages
        put(store, access, random_kv(), key=f"other {index}", owner="b")
    with pytest.raises(StaleHandle, match="given to another entry"):
        prefix.check()


def test_a_handle_of_another_store_is_refused() -> None:
    one, other = LocalStore(LAYOUT), LocalStore(LAYOUT)
    handle = put(one, PoolAccess(one), random_kv())
    put(other, PoolAccess(other), random_kv())
    with pytest.raises(StaleHandle, match="belongs to store"):
        PoolAccess(other).resolve(handle)


def test_a_region_on_another_host_or_of_a_dead_process_is_copied_instead() -> None:
    store = LocalStore(LAYOUT)
    handle = put(store, PoolAccess(store), random_kv())
    real = store.memory.region.address
    for address in (
        RegionAddress("elsewhere", real.pid, real.fd, real.nbytes),
        RegionAddress(real.host, real.pid, 9999, real.nbytes),
    ):
        with pytest.raises(OSError):
            SharedRegion.attach(address)
        store.describe = lambda address=address: (store.store_id, LAYOUT, address)  # type: ignore[method-assign]
        access = PoolAccess(store)
        assert access.kind == "copied"
        assert access.resolve(handle).num_tokens == TOKENS


def _read_in_child(layout: PageLayout, address: RegionAddress, pipe: Any) -> None:
    memory = PagedMemory.attach(layout, address)
    total = int(memory.pool.sum(dtype="int64"))  # touches every page
    pipe.send((total, *_mapping_kib()))
    pipe.recv()
    memory.pool[0, 0, 0, :4] = 42
    pipe.send(bytes(memory.pool[0, 1, 0, :4]))
    pipe.close()


def _mapping_kib() -> tuple[int, int, int]:
    """Rss, Pss and private memory of this process's view of the pool, in KiB, as the kernel counts them."""
    text = Path("/proc/self/smaps").read_text()
    block = re.search(r"memfd:cosmoray-pool.*?(?=\n[0-9a-f]+-[0-9a-f]+ |\Z)", text, re.S)
    assert block is not None
    values = {name: int(kib) for name, kib in re.findall(r"(\w+):\s+(\d+) kB", block.group())}
    return values["Rss"], values["Pss"], values["Private_Clean"] + values["Private_Dirty"]


def test_two_processes_see_one_buffer_and_the_reader_has_no_copy() -> None:
    layout = PageLayout(layers=4, pages=64, page_size=64, kv_heads=8, head_dim=128, dtype="float32")
    memory = PagedMemory.create(layout)
    memory.pool[:] = 1
    size = layout.pool_bytes // 1024
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=_read_in_child, args=(layout, memory.region.address, there))
    child.start()
    assert here.poll(60)
    total, rss, pss, private = here.recv()
    print(f"pool {size} KiB; reader maps {rss} KiB, proportional {pss} KiB, private {private} KiB")
    assert total == layout.pool_bytes
    assert rss >= size
    assert private < 64
    assert pss <= 0.55 * size
    memory.pool[0, 1, 0, :4] = 99
    here.send("go")
    assert here.poll(60)
    assert here.recv() == bytes([99] * 4), "the reader does not see what was written after it attached"
    child.join(60)
    assert (memory.pool[0, 0, 0, :4] == 42).all(), "what the reader writes is not seen here"


def test_a_region_leaves_nothing_behind() -> None:
    before = set(Path("/dev/shm").iterdir())
    region = SharedRegion.create(MIB)
    assert set(Path("/dev/shm").iterdir()) == before
    attached = SharedRegion.attach(region.address)
    attached.buffer[0] = 1
    assert region.buffer[0] == 1
