"""`Pipeline`: what driver scripts, the command line and the Serve app use. Launch, submit, close."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

import ray

from cosmos3_model.config import SnapshotConfig
from cosmos3_model.families import family_of
from cosmos3_model.loader import read_header
from cosmos3_model.prompts import check_tokenizer
from cosmos3_model.transformer import check_transformer
from nodes.codec import unpack
from nodes.job import DeadlineExceeded, Job

from .cluster import start_ray
from .defaults import WITH_SOUND
from .executor import Executor, OnProgress
from .modes import MODES, graph_of, modes_of
from .placement import Placement
from .request import GenerationRequest, RequestError
from .resolve import resolve, sources_of
from .result import GenerationResult
from .workers import PipelineError, Workers

CLOSE_SECONDS = 60.0


class Overloaded(PipelineError):
    """As many requests wait as may; this one was not taken."""


class PendingGeneration:
    """A submitted request: wait for it, await it, or cancel it."""

    def __init__(self, request_id: str, seed: int, future: concurrent.futures.Future[GenerationResult]) -> None:
        self.request_id = request_id
        self.seed = seed
        self._future = future

    def result(self, timeout: float | None = None) -> GenerationResult:
        """The result, after waiting for it.

        Raises:
            TimeoutError: not done within `timeout` seconds; the request goes on.
            concurrent.futures.CancelledError: it was cancelled.
            Exception: whatever the request failed with.
        """
        return self._future.result(timeout)

    def done(self) -> bool:
        return self._future.done()

    def cancel(self) -> bool:
        """Stop it at the next step; False if it was done already."""
        return self._future.cancel()

    def __await__(self) -> Generator[Any, None, GenerationResult]:
        return asyncio.wrap_future(self._future).__await__()


class Pipeline:
    """Model nodes on Ray for one snapshot. Safe to use from any thread."""

    def __init__(self, snapshot: SnapshotConfig, placement: Placement, modes: Iterable[str], owns_ray: bool) -> None:
        """Use `launch`."""
        self.snapshot = snapshot
        self.placement = placement
        self.modes = frozenset(modes)
        self._owns_ray = owns_ray
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="cosmoray-pipeline", daemon=True)
        self._thread.start()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._waiting = 0
        self._closed = False
        self.workers: Workers
        self._executor: Executor
        self._slots: asyncio.Semaphore

    @classmethod
    def launch(
        cls,
        snapshot: str | Path,
        placement: Placement | str | Path | None = None,
        *,
        modes: Iterable[str] | None = None,
        on_ready: Callable[[str], None] = lambda name: None,
    ) -> Pipeline:
        """Check the snapshot, start Ray on this machine unless it runs, and start every node.

        Args:
            snapshot: Folder of the checkpoint.
            placement: A `Placement`, a YAML file of one, or None for this machine's default.
            modes: Only the nodes that these modes need are started; None for every mode that the snapshot has.
            on_ready: Hears `snapshot` when it was found usable, then `ray` and each node's kind as it becomes ready.

        Raises:
            SnapshotError: the snapshot is not usable. Its headers are read before anything is started.
            PlacementError: the placement file is not usable.
            PipelineError: a node did not start.
        """
        config = SnapshotConfig.from_folder(snapshot)
        check_tokenizer(config.root)
        check_transformer(config)
        read_header(config.root / "vae")
        modes = modes_of(config) if modes is None else list(modes)
        for mode in modes:
            if mode not in MODES:
                raise PipelineError(f"mode {mode!r} is not one of {', '.join(MODES)}")
        if any(mode.endswith(WITH_SOUND) for mode in modes):
            read_header(config.root / "sound_tokenizer")
        if isinstance(placement, str | Path):
            placement = Placement.from_yaml(placement)
        on_ready("snapshot")
        owns_ray = start_ray()
        on_ready("ray")
        if placement is None:
            placement = Placement.default(int(ray.cluster_resources().get("GPU", 0)))
        pipeline = cls(config, placement, modes, owns_ray)
        try:
            pipeline._run(pipeline._start(on_ready))
        except BaseException:
            pipeline.close()
            raise
        return pipeline

    def submit(
        self,
        request: GenerationRequest | None = None,
        *,
        on_progress: OnProgress = lambda progress: None,
        **fields: Any,
    ) -> PendingGeneration:
        """Take a request, given whole or as keyword arguments, and return at once.

        `on_progress` is called from the pipeline's thread and must not block.

        Raises:
            RequestError: a field is wrong, or asks for what this checkpoint has not; nothing was started.
            Overloaded: too many requests wait already.
        """
        if self._closed:
            raise PipelineError("the pipeline is closed")
        if request is None:
            request = GenerationRequest.parse(**fields)
        elif fields:
            raise RequestError(next(iter(fields)), "give a request or its fields, not both")
        limits = self.placement.limits
        if self._waiting >= limits.max_in_flight + limits.max_queued:
            raise Overloaded(f"{self._waiting} requests are running or waiting; try again later")
        job = resolve(request, self.snapshot)
        if job.mode not in self.modes:
            raise PipelineError(f"the pipeline was launched without {job.mode}; it has {', '.join(sorted(self.modes))}")
        self._waiting += 1
        future = asyncio.run_coroutine_threadsafe(self._serve(request, job, on_progress), self._loop)
        future.add_done_callback(self._count_down)
        return PendingGeneration(job.request_id, job.sampling.seed, future)

    def generate(
        self,
        request: GenerationRequest | None = None,
        *,
        on_progress: OnProgress = lambda progress: None,
        **fields: Any,
    ) -> GenerationResult:
        """`submit`, and wait. An interrupt cancels the request."""
        pending = self.submit(request, on_progress=on_progress, **fields)
        try:
            return pending.result()
        except BaseException:
            pending.cancel()
            raise

    def stats(self) -> dict[str, Any]:
        """Counts of the store and of every node, and how many actors were replaced."""
        return self._run(self._stats())

    def close(self) -> None:
        """Cancel what runs, free the devices, end every actor, and Ray if `launch` started it."""
        if self._closed:
            return
        self._closed = True
        # Bounded: whatever does not end by itself ends with Ray, or with this process.
        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(CLOSE_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        if self._owns_ray:
            ray.shutdown()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    async def _start(self, on_ready: Callable[[str], None]) -> None:
        self._register_task()
        limits = self.placement.limits
        kinds = set().union(*(MODES[mode].kinds() for mode in self.modes))
        self.workers = Workers(self.snapshot, self.placement, kinds)
        self._executor = Executor(self.workers, max_attempts=limits.max_attempts)
        self._slots = asyncio.Semaphore(limits.max_in_flight)
        await self.workers.start(on_ready)

    async def _stop(self) -> None:
        for task in self._tasks:
            # One that is cancelled already waits for its nodes to let go; a second time would break off that wait.
            if not task.cancelling():
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if hasattr(self, "workers"):
            await self.workers.close()
        # What still runs was left behind by a wait that was broken off. The loop must not end before it.
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _serve(self, request: GenerationRequest, job: Job, on_progress: OnProgress) -> GenerationResult:
        self._register_task()
        submitted = time.time()
        await self._take_slot(job)
        try:
            graph = graph_of(job)
            walk = await self._executor.run(job, graph, sources_of(request), on_progress)
            results = {name: unpack(await walk.values[source]) for name, source in graph.results.items()}
        finally:
            self._slots.release()
        domain = {} if request.action is None else {"domain_name": request.action.domain_name}
        metadata = _metadata(job, self.snapshot, walk.reports) | domain | {"seconds": time.time() - submitted}
        return GenerationResult(
            job.request_id,
            job.mode,
            job.output,
            results.get("media"),
            metadata,
            walk.timings,
            results.get("sound"),
            results["actions"].numpy().copy() if "actions" in results else None,
        )

    async def _take_slot(self, job: Job) -> None:
        """Wait for a request to end, if there are as many as there may be; the time spent here counts, too."""
        try:
            async with asyncio.timeout(None if job.deadline is None else job.deadline - time.time()):
                await self._slots.acquire()
        except TimeoutError:
            raise DeadlineExceeded(f"request {job.request_id} ran out of time while it waited for others") from None

    def _register_task(self) -> None:
        """Let `close` find the current task: a launch that is interrupted, or a request."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _stats(self) -> dict[str, Any]:
        nodes = self.workers.all()
        store, *stats = await asyncio.gather(
            self.workers.store.stats.remote(), *(replica.actor.stats.remote() for replica in nodes)
        )
        integrity = await self.workers.store.check_integrity.remote()
        return {"store": store | {"integrity": integrity}, "nodes": stats, "replaced": self.workers.replaced}

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _count_down(self, _: object) -> None:
        self._waiting -= 1


def _metadata(job: Job, snapshot: SnapshotConfig, reports: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The settings that were really used, those of the nodes last."""
    prompt, sampling, schedule = job.prompt, job.sampling, job.sampling.schedule
    *_, frames, rows, columns = sampling.latent_shape  # a scene's canvas is larger than what is made of it
    settings: dict[str, Any] = {
        "family": family_of(snapshot),
        "seed": sampling.seed,
        "num_frames": (frames - 1) * snapshot.temporal_compression + 1,
        "height": rows * snapshot.spatial_compression,
        "width": columns * snapshot.spatial_compression,
        "fps": prompt.fps,
        "guidance_scale": sampling.guidance_scale,
        "guidance_interval": sampling.guidance_interval,
        "num_inference_steps": schedule.num_inference_steps,
        "flow_shift": schedule.flow_shift,
        "use_karras_sigmas": schedule.use_karras_sigmas,
        "use_system_prompt": prompt.use_system_prompt,
        "clean_frames": sampling.clean_frames,
    }
    if sampling.sound_shape is not None:
        settings["sampling_rate"] = snapshot.sampling_rate
    if sampling.action is not None:
        settings["chunk_size"] = sampling.action.chunk_size
        settings["content"] = job.conditioning.content if job.conditioning else None
    for report in reports.values():
        settings |= report
    return settings
