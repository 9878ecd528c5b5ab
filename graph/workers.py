"""The actors of a pipeline: started, picked, watched, replaced. The executor asks for one and gives it back."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    NodeDiedError,
    RayTaskError,
    WorkerCrashedError,
)

from cosmos3_model.config import SnapshotConfig
from kvstore import actor as store_actor
from nodes import actor as node_actor
from nodes.prefill import page_layout

from .placement import Placement

logger = logging.getLogger("cosmoray")
DEAD = (ActorDiedError, ActorUnavailableError, WorkerCrashedError, NodeDiedError)
# Ray's decorator puts methods on a class that type checkers cannot see.
KVStoreActor: Any = store_actor.KVStoreActor
NodeActor: Any = node_actor.NodeActor
HEARTBEAT_SECONDS = 2.0
RESTARTS_BEFORE_FAILURE = 3
CLOSE_SECONDS = 5.0


class PipelineError(RuntimeError):
    """The pipeline cannot do its work; the message says which part of it and why."""


@dataclass(eq=False)
class Replica:
    """One node actor and what the driver knows of it."""

    kind: str
    actor: Any
    in_flight: int = 0
    alive: bool = True


class Workers:
    """All actors of one pipeline. Lives on one event loop; none of its methods blocks it."""

    def __init__(self, snapshot: SnapshotConfig, placement: Placement, kinds: set[str]) -> None:
        self._snapshot = snapshot
        self._placement = placement
        self._kinds = sorted(kinds)
        self._replicas: dict[str, list[Replica]] = {kind: [] for kind in self._kinds}
        self._changed = asyncio.Condition()
        self._store_lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failures: dict[str, str] = {}
        self.store: Any = None
        self.store_generation = 0
        self.leases: set[str] = set()
        self.replaced = 0

    async def start(self, on_ready: Callable[[str], None] = lambda name: None) -> None:
        """Start the store and every replica at once; `on_ready` hears the name of each that is ready.

        Raises:
            SnapshotError: an actor could not use the snapshot.
            PipelineError: an actor did not become ready.
        """

        async def start_one(kind: str) -> None:
            await self._start_replica(kind, store)
            on_ready(kind)

        try:
            async with asyncio.TaskGroup() as group:
                # The nodes are told of the store only once they have loaded, so that it does not hold them up.
                store = group.create_task(self._start_store())
                for kind in self._kinds:
                    for _ in range(self._placement.node(kind).replicas):
                        group.create_task(start_one(kind))
        except BaseExceptionGroup as group_error:
            raise group_error.exceptions[0] from None
        self._spawn(self._every(HEARTBEAT_SECONDS, self._heartbeat))
        self._spawn(self._every(self._placement.store.lease_seconds / 4, self._renew))

    async def close(self) -> None:
        """Let every node free its device, then end all actors."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        live = self.all()
        await asyncio.gather(*(_quietly(replica.actor.close.remote(), CLOSE_SECONDS) for replica in live))
        for replica in live:
            ray.kill(replica.actor)
        if self.store is not None:
            ray.kill(self.store)

    @asynccontextmanager
    async def acquire(self, kind: str) -> AsyncIterator[Replica]:
        """The live replica of that kind with the least to do; waits while one is being replaced.

        Raises:
            PipelineError: there is none, and none could be started.
        """
        async with self._changed:
            while not (live := [replica for replica in self._replicas[kind] if replica.alive]):
                if kind in self._failures:
                    raise PipelineError(f"no {kind} node is left: {self._failures[kind]}")
                await self._changed.wait()
            replica = min(live, key=lambda replica: replica.in_flight)
            replica.in_flight += 1
        try:
            yield replica
        finally:
            replica.in_flight -= 1

    def replicas(self, kind: str) -> list[Replica]:
        """The live replicas of a kind."""
        return [replica for replica in self._replicas[kind] if replica.alive]

    def all(self) -> list[Replica]:
        """The live replicas of every kind."""
        return [replica for kind in self._kinds for replica in self.replicas(kind)]

    async def report_dead(self, replica: Replica, reason: str) -> None:
        """Take a replica out and start another in its place, in the background."""
        if not replica.alive:
            return
        replica.alive = False
        logger.warning("%s node died (%s); starting another", replica.kind, reason)
        self._replicas[replica.kind].remove(replica)
        with contextlib.suppress(Exception):
            ray.kill(replica.actor)
        self._spawn(self._replace(replica.kind))

    async def recover_store(self, generation: int) -> None:
        """Make sure that a store other than the lost one of `generation` is up and known to every node."""
        async with self._store_lock:
            if generation != self.store_generation or await self._store_answers():
                return
            logger.warning("the K/V store died; starting another, texts are prefilled again")
            with contextlib.suppress(Exception):
                ray.kill(self.store)  # it may only hang
            await self._start_store()
            live = self.all()
            attached = (replica.actor.attach_store.remote(self.store) for replica in live)
            for replica, outcome in zip(live, await asyncio.gather(*attached, return_exceptions=True), strict=True):
                if isinstance(outcome, DEAD):
                    await self.report_dead(replica, type(outcome).__name__)

    async def _start_store(self) -> None:
        store = self._placement.store
        layout = page_layout(
            self._snapshot,
            pages=-(-store.pool_tokens // store.page_size),
            page_size=store.page_size,
            dtype=self._placement.node("prefill").resolved_dtype,
        )
        actor = KVStoreActor.options(num_cpus=0).remote(layout, store.lease_seconds)
        await self._ready("kvstore", actor.describe.remote())
        self.store = actor
        self.store_generation += 1

    async def _start_replica(self, kind: str, store: asyncio.Task[None] | None = None) -> None:
        node = self._placement.node(kind)
        options = {"num_cpus": node.num_cpus, "num_gpus": node.num_gpus}
        actor = NodeActor.options(**options).remote(kind, node.settings(self._snapshot.root))
        try:
            await self._ready(kind, actor.load.remote())
            if store is not None:
                await store
            generation = 0
            while generation != self.store_generation:
                generation = self.store_generation
                await self._ready(kind, actor.attach_store.remote(self.store))
        except BaseException:
            ray.kill(actor)
            raise
        async with self._changed:
            self._failures.pop(kind, None)
            self._replicas[kind].append(Replica(kind, actor))
            self._changed.notify_all()

    async def _ready(self, name: str, ref: Any) -> Any:
        seconds = self._placement.limits.start_seconds
        try:
            return await _within(seconds, ref)
        except TimeoutError:
            raise PipelineError(f"{name} node was not ready after {seconds:g} s") from None
        except RayTaskError as error:
            raise (error.cause or error) from None
        except DEAD as error:
            raise PipelineError(f"{name} node died while starting ({type(error).__name__})") from None

    async def _replace(self, kind: str) -> None:
        """Start another, until it succeeds. After the third failure, whoever waits for this kind is told."""
        for attempt in itertools.count(1):
            try:
                await self._start_replica(kind)
                self.replaced += 1
                return
            except Exception as error:  # noqa: BLE001 - whatever it is, it is logged and tried again
                logger.warning("%s node did not start again: %s", kind, error)
                if attempt >= RESTARTS_BEFORE_FAILURE:
                    async with self._changed:
                        self._failures[kind] = str(error)
                        self._changed.notify_all()
            await asyncio.sleep(min(2.0**attempt, 30.0))

    async def _heartbeat(self) -> None:
        """Ask everybody for a sign of life: Ray may take a minute to notice what a missing answer says in seconds."""
        limit = self._placement.limits.heartbeat_seconds

        async def probe(replica: Replica) -> None:
            try:
                await _within(limit, replica.actor.health.remote())
            except (TimeoutError, *DEAD) as error:
                await self.report_dead(replica, type(error).__name__)

        await asyncio.gather(*(probe(replica) for replica in self.all()))
        await self.recover_store(self.store_generation)

    async def _store_answers(self) -> bool:
        try:
            await _within(self._placement.limits.heartbeat_seconds, self.store.stats.remote())
            return True
        except (TimeoutError, *DEAD):
            return False

    async def _renew(self) -> None:
        """Keep the leases of running requests alive."""
        if self.leases:
            await _quietly(self.store.renew.remote(sorted(self.leases)), self._placement.store.lease_seconds)

    async def _every(self, seconds: float, action: Callable[[], Awaitable[None]]) -> None:
        """Do it again and again. One time that fails does not end it."""
        while True:
            await asyncio.sleep(seconds)
            try:
                await action()
            except Exception:
                logger.exception("%s failed; it is tried again", getattr(action, "__name__", action))

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _quietly(ref: Any, seconds: float) -> None:
    """Wait for a call whose failure changes nothing."""
    with contextlib.suppress(TimeoutError, RayTaskError, *DEAD):
        await _within(seconds, ref)


async def _within(seconds: float, ref: Any) -> Any:
    """The value of `ref`, or `TimeoutError`.

    Not `asyncio.wait_for`: in Python 3.11 that one loses a cancellation that comes together with the answer, and a
    heartbeat that cannot be cancelled lets `close` wait for ever.
    """
    async with asyncio.timeout(seconds):
        return await ref
