"""Walks one request over its graph: one coroutine a request, object references from node to node.

Whatever dies under a request is done again elsewhere: a node's call on another replica, denoising from the last
saved state, prefill when the store was lost. The results are the same bytes, because nothing that a node computes
depends on which process runs it or when.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import ObjectLostError, RayTaskError

from kvstore.handle import StaleHandle, StoreLost
from nodes.job import DeadlineExceeded, Job

from .result import NodeTiming
from .spec import REQUEST, Graph, NodeSpec
from .workers import DEAD, PipelineError, Replica, Workers

logger = logging.getLogger("cosmoray")
CANCEL_SECONDS = 30.0
RELEASE_SECONDS = 5.0


@dataclass(frozen=True)
class Progress:
    """Where a request is: a node has begun (`step` 0 of 0), or the denoise node has done `step` of `num_steps`."""

    request_id: str
    node: str
    step: int = 0
    num_steps: int = 0


OnProgress = Callable[[Progress], None]


@dataclass
class _Walk:
    """What is known of one request on its way."""

    job: Job
    graph: Graph
    on_progress: OnProgress
    values: dict[str, Any]
    started: float
    timings: list[NodeTiming] = field(default_factory=list)
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)
    saved: dict[str, Any] = field(default_factory=dict)
    release: asyncio.Task[None] | None = None

    def tell(self, progress: Progress) -> None:
        """Report progress. A listener that fails is its own concern, not the request's."""
        try:
            self.on_progress(progress)
        except Exception:
            logger.exception("on_progress failed for request %s", progress.request_id)


class Executor:
    """Runs requests on `Workers`."""

    def __init__(self, workers: Workers, *, max_attempts: int) -> None:
        self._workers = workers
        self._max_attempts = max_attempts

    async def run(self, job: Job, graph: Graph, sources: dict[str, Any], on_progress: OnProgress) -> _Walk:
        """Run a request to its end; its results are in `values`, under `graph.results`, as object references.

        Args:
            job: The request.
            graph: Of its mode.
            sources: Values of the `request.*` sources that the graph uses.
            on_progress: Hears about it on the way, on the event loop.

        Raises:
            NodeError, StoreError, MediaError: as the nodes raise them.
            PipelineError: actors died too often.
        """
        values = {f"{REQUEST}.{name}": value for name, value in sources.items()}
        walk = _Walk(job, graph, on_progress, values, time.time())
        try:
            limit = None if job.deadline is None else job.deadline - time.time()
            async with asyncio.timeout(limit):
                await self._walk(walk)
            return walk
        except TimeoutError:
            raise DeadlineExceeded(f"request {job.request_id} ran out of time") from None
        finally:
            await asyncio.shield(walk.release or self._release(job.request_id))

    async def _walk(self, walk: _Walk) -> None:
        """Start each node as soon as its inputs are there, until all results are."""
        self._workers.leases.add(walk.job.request_id)
        running: dict[asyncio.Task[Any], NodeSpec] = {}
        losses = 0
        try:
            while not walk.values.keys() >= set(walk.graph.results.values()):
                for node in self._ready(walk, running.values()):
                    running[asyncio.create_task(self._run_node(walk, node))] = node
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    node = running.pop(task)
                    generation = self._workers.store_generation
                    try:
                        walk.values |= task.result()
                        if "kv_handles" in node.takes.values():
                            # Nobody reads the text after this; its pages go back while the clip is decoded.
                            walk.release = asyncio.create_task(self._release(walk.job.request_id))
                    except (StoreLost, StaleHandle, ObjectLostError) as error:
                        losses += 1
                        if losses >= self._max_attempts:
                            raise PipelineError(f"{node.name}: lost what it reads {losses} times ({error})") from None
                        await self._workers.recover_store(generation)
                        await self._forget(walk, error)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def _ready(self, walk: _Walk, running: Any) -> list[NodeSpec]:
        return [
            node
            for node in walk.graph.nodes
            if not walk.values.keys() >= node.outputs.keys()
            and node not in running
            and all(source in walk.values for source in walk.graph.inputs(node).values())
        ]

    async def _forget(self, walk: _Walk, error: Exception) -> None:
        """Drop the values that are no good any more; the walk makes them again."""
        if walk.release is not None:
            await walk.release
            walk.release = None
            self._workers.leases.add(walk.job.request_id)
        for node in walk.graph.nodes:
            if "kv_handles" in node.outputs.values() or isinstance(error, ObjectLostError):
                for output in node.outputs:
                    walk.values.pop(output, None)
        if isinstance(error, ObjectLostError):
            walk.saved.clear()

    async def _run_node(self, walk: _Walk, node: NodeSpec) -> dict[str, Any]:
        """One node's outputs as object references, from whichever replica lives to give them."""
        for attempt in range(1, self._max_attempts + 1):
            async with self._workers.acquire(node.kind) as replica:
                walk.tell(Progress(walk.job.request_id, node.name))
                try:
                    call = self._stream if node.streaming else self._call
                    values, report = await call(walk, node, replica)
                except DEAD as error:
                    await self._workers.report_dead(replica, type(error).__name__)
                    continue
                except RayTaskError as error:
                    raise (error.cause or error) from None
            started, ended = report.pop("started") - walk.started, report.pop("ended") - walk.started
            walk.timings.append(NodeTiming(node.name, started, ended, report.pop("pid"), attempt))
            walk.reports[node.name] = report
            return values
        raise PipelineError(f"{node.name}: {self._max_attempts} {node.kind} nodes died under this request")

    async def _call(self, walk: _Walk, node: NodeSpec, replica: Replica) -> tuple[dict[str, Any], dict[str, Any]]:
        names, inputs = self._inputs(walk, node)
        value, report = replica.actor.call.remote(node.method, walk.job, names, *inputs)
        try:
            return {node.name: value}, await report
        except asyncio.CancelledError:
            # A call cannot be interrupted. Until it has ended it may write to pages that the request still leases.
            await asyncio.shield(self._wait_out(report))
            raise
        except Exception:
            # Both references carry the error; one that nobody looks at would be reported as unhandled.
            with contextlib.suppress(Exception):
                await value
            raise

    async def _stream(self, walk: _Walk, node: NodeSpec, replica: Replica) -> tuple[dict[str, Any], dict[str, Any]]:
        names, inputs = self._inputs(walk, node)
        if node.name in walk.saved:
            names, inputs = [*names, "state"], [*inputs, walk.saved[node.name]]
        request_id = walk.job.request_id
        items = replica.actor.stream.remote(walk.job, list(node.gives), names, *inputs)
        try:
            async for ref in items:
                match await ref:
                    case ("step", step, num_steps):
                        walk.tell(Progress(request_id, node.name, step, num_steps))
                    case ("saved", _):
                        walk.saved[node.name] = await anext(items)
                    case ("done", report):
                        latents = {output: await anext(items) for output in node.outputs}
                        num_steps = walk.job.sampling.schedule.num_inference_steps
                        walk.tell(Progress(request_id, node.name, num_steps, num_steps))
                        return latents, report
            raise PipelineError(f"{node.name}: the stream ended without a result")
        except (asyncio.CancelledError, TimeoutError):
            await asyncio.shield(self._cancel(replica, request_id, items))
            raise

    def _inputs(self, walk: _Walk, node: NodeSpec) -> tuple[list[str], list[Any]]:
        inputs = walk.graph.inputs(node)
        return list(inputs), [walk.values[source] for source in inputs.values()]

    async def _cancel(self, replica: Replica, request_id: str, items: Any) -> None:
        """Returns when the request has left its denoise node, so that its pages can be given away."""
        with contextlib.suppress(TimeoutError, RayTaskError, *DEAD):
            async with asyncio.timeout(CANCEL_SECONDS):
                await replica.actor.cancel.remote(request_id)
                # What the stream still holds ends with the cancellation, as an error that somebody has to look at.
                async for ref in items:
                    await ref

    async def _wait_out(self, ref: Any) -> None:
        with contextlib.suppress(TimeoutError, RayTaskError, *DEAD):
            async with asyncio.timeout(CANCEL_SECONDS):
                await ref

    async def _release(self, request_id: str) -> None:
        self._workers.leases.discard(request_id)
        with contextlib.suppress(TimeoutError, RayTaskError, *DEAD):
            async with asyncio.timeout(RELEASE_SECONDS):
                await self._workers.store.release.remote(request_id)
