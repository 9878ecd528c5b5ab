"""Any node as a Ray actor: control on the event loop, compute in one thread.

Because compute never runs on the loop, `cancel`, `health` and `stats` answer at once while a step runs. Results
stay in the object store of the host that made them; what the caller awaits is a small report.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
import torch

from cosmos3_model.layout import Modality
from kvstore.actor import RayStoreClient

from .catalog import build_node
from .codec import pack, unpack
from .denoise import Failed, Finished, Saved, StepDone
from .job import Job, NodeSettings, RequestCancelled


@ray.remote(max_restarts=0)
class NodeActor:
    """One node, alone in a process."""

    def __init__(self, kind: str, settings: NodeSettings) -> None:
        self._kind = kind
        self._settings = settings
        self._compute = ThreadPoolExecutor(1, thread_name_prefix=f"{kind}-compute")
        self._node: Any = None
        self._inboxes: dict[str, asyncio.Queue[Any]] = {}
        self._left: dict[str, asyncio.Event] = {}
        self._driver: asyncio.Task[None] | None = None
        # A cancel may overtake the call that it is meant for, whose inputs have to be fetched first.
        self._cancelled_early: deque[str] = deque(maxlen=256)

    async def load(self) -> None:
        """Build the node and warm it up. Errors of the snapshot are raised here."""

        def build() -> None:
            self._node = build_node(self._kind, self._settings)
            self._node.warm_up()

        await self._run(build)

    async def attach_store(self, store: Any) -> None:
        """Use this store from now on."""
        await self._run(self._node.attach_store, RayStoreClient(store))

    @ray.method(num_returns=2)
    async def call(self, method: str, job: Job, names: list[str], *inputs: Any) -> tuple[Any, dict[str, Any]]:
        """Run a method of the node. Returns the result and a report as two objects.

        Args:
            method: Of the node.
            job: The request.
            names: Names of the inputs that follow, which may be object references.
            inputs: In the order of `names`.
        """
        arguments = {name: unpack(value) for name, value in zip(names, inputs, strict=True)}
        started = time.time()
        result = await self._run(getattr(self._node, method), job, **arguments)
        packed = pack(result)
        return packed, {"started": started, "ended": time.time(), "pid": os.getpid()}

    async def stream(self, job: Job, modalities: list[Modality], names: list[str], *inputs: Any) -> AsyncIterator[Any]:
        """Denoise a request, telling about it on the way. A streaming generator.

        Args:
            job: The request.
            modalities: Whose latents the caller wants, in that order.
            names: Names of the inputs that follow, which may be object references.
            inputs: In the order of `names`.

        Yields:
            `("step", done, total)` after each step but the last; `("saved", step)` followed by a state; at the end
            `("done", report)` followed by the latents of each modality. States and latents come as items of their
            own, so that the caller can hold references to them without fetching them.
        """
        arguments = {name: unpack(value) for name, value in zip(names, inputs, strict=True)}
        started = time.time()
        inbox: asyncio.Queue[Any] = asyncio.Queue()
        request_id = job.request_id
        if request_id in self._cancelled_early:
            self._cancelled_early.remove(request_id)
            raise RequestCancelled(f"request {request_id} was cancelled")
        if request_id in self._inboxes:
            # A caller that retries too early: the earlier run of the same request has to leave first.
            await self.cancel(request_id)
        self._inboxes[request_id] = inbox
        self._left[request_id] = asyncio.Event()
        try:
            await self._run(self._node.add, job, **arguments)
            if self._driver is None or self._driver.done():
                self._driver = asyncio.get_running_loop().create_task(self._drive())
            while True:
                event = await inbox.get()
                match event:
                    case StepDone(step=step, num_steps=total):
                        if step < total:  # the last step is told by the end itself: an item less to wait for
                            yield ("step", step, total)
                    case Saved(step=step, state=state):
                        yield ("saved", step)
                        yield pack(state)
                    case Finished(latents=latents, report=report):
                        yield ("done", {"started": started, "ended": time.time(), "pid": os.getpid()} | report)
                        for modality in modalities:
                            yield pack(latents[modality])
                        return
                    case Failed(error=error):
                        raise error
        finally:
            await self._run(self._node.drop, request_id)
            del self._inboxes[request_id]
            self._left.pop(request_id).set()

    async def cancel(self, request_id: str) -> None:
        """Make a denoising request leave before its next step; returns when it has left."""
        left = self._left.get(request_id)
        if left is None:
            self._cancelled_early.append(request_id)
            return
        self._node.cancel(request_id)
        await left.wait()

    async def health(self) -> float:
        """Seconds since the epoch, to show that the loop turns."""
        return time.time()

    async def stats(self) -> dict[str, Any]:
        return {"kind": self._kind, "pid": os.getpid(), **self._node.stats()}

    async def count_parameters(self) -> int:
        """Numbers in all module parameters that are alive in this process, whoever holds them."""
        alive = [item for item in gc.get_objects() if isinstance(item, torch.nn.Parameter) and not item.is_meta]
        return sum(item.numel() for item in alive)

    async def close(self) -> None:
        """Let go of the device before the process ends."""
        if self._node is not None:
            await self._run(self._node.close)

    async def _drive(self) -> None:
        """Rounds for as long as there are requests; each event goes to its request's stream."""
        while self._node.active:
            try:
                events = await self._run(self._node.step)
            except Exception as error:  # noqa: BLE001 - a round that breaks ends the requests in it, with its cause
                for request_id, inbox in self._inboxes.items():
                    inbox.put_nowait(Failed(request_id, error))
                return
            for event in events:
                if event.request_id in self._inboxes:
                    self._inboxes[event.request_id].put_nowait(event)

    async def _run(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._compute, lambda: function(*args, **kwargs))
