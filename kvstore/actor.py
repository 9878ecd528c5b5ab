"""The Ray actor around `LocalStore`, and the client that nodes hold. Waiting lives here, not in the store."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterable
from typing import Any

import numpy as np
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayTaskError

from .handle import EntryPending, KVHandle, PageLayout, StoreError, StoreFull, StoreLost
from .local import LocalStore
from .region import RegionAddress
from .store import Reservation

SWEEP_SECONDS = 1.0


@ray.remote(max_restarts=0)
class KVStoreActor:
    """One store, alone in a process. Its methods never block the loop; `reserve` waits without holding it."""

    def __init__(self, layout: PageLayout, lease_seconds: float) -> None:
        self._store = LocalStore(layout, lease_seconds=lease_seconds)
        self._changed = asyncio.Condition()
        self._sweeper: asyncio.Task[None] | None = None

    async def reserve(self, key: str, num_tokens: int, owner: str, timeout: float) -> Reservation:
        """`KVStore.reserve`, waiting at most `timeout` seconds for room or for another writer to finish."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while True:
            try:
                return self._store.reserve(key, num_tokens, owner)
            except (StoreFull, EntryPending) as error:
                if self._store.layout.pages_for(num_tokens) > self._store.pool.num_pages:
                    raise
                left = deadline - loop.time()
                if left <= 0:
                    raise StoreFull(f"no room after {timeout:g} s: {error}") from None
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left), self._changed:
                        await self._changed.wait()

    async def commit(self, handle: KVHandle, owner: str) -> None:
        self._store.commit(handle, owner)
        await self._notify()

    async def lease(self, handle: KVHandle, owner: str) -> None:
        self._store.lease(handle, owner)

    async def release(self, owner: str) -> None:
        self._store.release(owner)
        await self._notify()

    async def renew(self, owners: list[str]) -> list[str]:
        return self._store.renew(owners)

    async def evict(self, key: str) -> bool:
        return self._store.evict(key)

    async def describe(self) -> tuple[str, PageLayout, RegionAddress]:
        """Also the sign that the store is ready; starts the sweep for dead owners."""
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().create_task(self._sweep())
        return self._store.describe()

    async def read(self, handle: KVHandle) -> np.ndarray:
        return self._store.read(handle)

    async def write(self, handle: KVHandle, data: np.ndarray) -> None:
        self._store.write(handle, data)

    async def stats(self) -> dict[str, Any]:
        return self._store.stats() | {"pid": os.getpid()}

    async def check_integrity(self) -> bool:
        return self._store.check_integrity()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            if self._store.expire():
                await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


class RayStoreClient:
    """A store actor as a `StoreClient`, for code that runs in a compute thread. Every call has an end."""

    def __init__(self, actor: Any, *, reserve_timeout: float = 30.0, call_timeout: float = 30.0) -> None:
        self._actor = actor
        self._reserve_timeout = reserve_timeout
        self._call_timeout = call_timeout

    def reserve(self, key: str, num_tokens: int, owner: str) -> Reservation:
        ref = self._actor.reserve.remote(key, num_tokens, owner, self._reserve_timeout)
        return self._get(ref, self._reserve_timeout + self._call_timeout)

    def commit(self, handle: KVHandle, owner: str) -> None:
        self._get(self._actor.commit.remote(handle, owner))

    def lease(self, handle: KVHandle, owner: str) -> None:
        self._get(self._actor.lease.remote(handle, owner))

    def release(self, owner: str) -> None:
        self._get(self._actor.release.remote(owner))

    def renew(self, owners: Iterable[str]) -> list[str]:
        return self._get(self._actor.renew.remote(list(owners)))

    def describe(self) -> tuple[str, PageLayout, RegionAddress]:
        return self._get(self._actor.describe.remote())

    def read(self, handle: KVHandle) -> np.ndarray:
        return self._get(self._actor.read.remote(handle))

    def write(self, handle: KVHandle, data: np.ndarray) -> None:
        self._get(self._actor.write.remote(handle, data))

    def stats(self) -> dict[str, Any]:
        return self._get(self._actor.stats.remote())

    def check_integrity(self) -> bool:
        return self._get(self._actor.check_integrity.remote())

    def _get(self, ref: Any, timeout: float | None = None) -> Any:
        try:
            return ray.get(ref, timeout=timeout or self._call_timeout)
        except (ActorDiedError, ActorUnavailableError, GetTimeoutError) as error:
            raise StoreLost(f"the K/V store does not answer ({type(error).__name__})") from None
        except RayTaskError as error:
            if isinstance(error.cause, StoreError):
                raise error.cause from None
            raise
