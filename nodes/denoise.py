"""Noise to latents: the generation tower over many requests at once, one step of each per round.

Requests join and leave between rounds. Progress, cancellation and deadlines are looked at there, and there the
states are saved from which a request can go on in another process.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from cosmos3_model.attention import DensePrefix
from cosmos3_model.layout import Latents
from cosmos3_model.sampling import Sampler, SamplingSettings
from cosmos3_model.schedule import ScheduleSettings
from cosmos3_model.towers import Branch
from cosmos3_model.transformer import load_generation
from kvstore.handle import KVHandle

from .base import StoreNode
from .job import Job, NodeSettings, RequestCancelled


@dataclass(frozen=True)
class StepDone:
    """A request has done `step` of `num_steps` steps."""

    request_id: str
    step: int
    num_steps: int


@dataclass(frozen=True)
class Saved:
    """`state` is what the request needs to go on after `step` somewhere else."""

    request_id: str
    step: int
    state: dict[str, Any]


@dataclass(frozen=True)
class Finished:
    """The request is done and has left: float32 `latents` by modality, and facts for the response."""

    request_id: str
    latents: Latents
    report: dict[str, Any]


@dataclass(frozen=True)
class Failed:
    """The request has left without a result; the others go on."""

    request_id: str
    error: Exception


Event = StepDone | Saved | Finished | Failed


@dataclass
class _Running:
    job: Job
    sampler: Sampler
    prefixes: list[Any]
    start_step: int
    velocities: list[Latents] = field(default_factory=list)
    largest_batch: int = 1

    @property
    def tokens(self) -> int:
        return sum(branch.layout.num_tokens for branch in self.sampler.branches())


class DenoiseNode(StoreNode):
    kind = "denoise"

    def __init__(self, settings: NodeSettings) -> None:
        super().__init__(settings)
        self._tower = load_generation(
            self.snapshot, dtype=settings.torch_dtype, device=settings.device, attention=settings.attention
        )
        self._running: dict[str, _Running] = {}
        self._cancelled: set[str] = set()
        self._lock = threading.Lock()
        self._counters = {"steps": 0, "rounds": 0, "forwards": 0, "finished": 0}

    def warm_up(self) -> None:
        """One step of a small picture over a text of zeros: the first forward, and the import that the solver needs."""
        config = self.snapshot.transformer
        side = 4 * self.snapshot.spatial_compression
        settings = SamplingSettings(
            self.snapshot.latent_shape(1, side, side), 24.0, 0, 1.0, ScheduleSettings.resolve(self.snapshot, 1)
        )
        shape = (8, config.num_key_value_heads, config.head_dim)
        text = torch.zeros(shape, dtype=self.settings.torch_dtype, device=self.settings.device)
        prefix = DensePrefix([(text, text)] * config.num_hidden_layers)
        sampler = Sampler(self.snapshot, settings, [prefix], device=self.settings.device)
        sampler.advance(self._tower(sampler.branches()))

    @property
    def active(self) -> int:
        """Requests that have joined and not left."""
        return len(self._running)

    def add(
        self,
        job: Job,
        handles: list[KVHandle],
        anchor: torch.Tensor | None = None,
        actions: np.ndarray | None = None,
        state: dict[str, Any] | None = None,
    ) -> None:
        """Let a request join at the next round.

        Args:
            job: The request.
            handles: Its text K/V, conditional branch first.
            anchor: The clean latent frames `[1, C, t, H, W]`, if there are any.
            actions: `[chunk_size, width]` float32 to follow, if they are given.
            state: Of a `Saved` event of the same request, to go on from there.

        Raises:
            StaleHandle: the K/V is gone.
            RequestCancelled: it was cancelled before it could join.
        """
        error = self._reason_to_leave(job)
        if error is not None:
            raise error
        prefixes = [self.pool.resolve(handle) for handle in handles]
        given = None if actions is None else torch.tensor(actions)
        sampler = Sampler(self.snapshot, job.sampling, prefixes, anchor, given, self.settings.device)
        if state is not None:
            sampler.load_state(state)
        self._running[job.request_id] = _Running(job, sampler, prefixes, sampler.step_index)

    def cancel(self, request_id: str) -> None:
        """Make a request leave before its next step. Safe to call from another thread, at any time."""
        with self._lock:
            self._cancelled.add(request_id)

    def drop(self, request_id: str) -> None:
        """Forget a request, whatever became of it. Call it once for each, between rounds."""
        self._running.pop(request_id, None)
        with self._lock:
            self._cancelled.discard(request_id)

    def step(self) -> list[Event]:
        """One round: one step of every request that has joined. Returns what happened, in order."""
        events: list[Event] = []
        for running in list(self._running.values()):
            error = self._reason_to_leave(running.job)
            if error is not None:
                events.append(self._leave(running, error))
        self._counters["rounds"] += bool(self._running)
        for batch in self._batches():
            failed = self._forward(batch)
            for running in batch:
                error = failed.get(running.job.request_id)
                events.extend(self._advance(running) if error is None else [self._leave(running, error)])
        return events

    def _batches(self) -> Iterator[list[_Running]]:
        """Requests in order of joining, cut where a joint forward would grow too large."""
        batch: list[_Running] = []
        tokens = 0
        for running in list(self._running.values()):
            full = tokens + running.tokens > self.settings.max_batch_tokens
            if batch and (self.settings.batching == "exact" or full):
                yield batch
                batch, tokens = [], 0
            batch.append(running)
            tokens += running.tokens
        if batch:
            yield batch

    def _forward(self, batch: list[_Running]) -> dict[str, Exception]:
        """Fill in the velocities of a batch. An error in a joint forward is pinned on whom it belongs to."""
        try:
            branches = [running.sampler.branches() for running in batch]
            velocities = iter(self._velocities([branch for own in branches for branch in own]))
            for running, own in zip(batch, branches, strict=True):
                running.velocities = [next(velocities) for _ in own]
                running.largest_batch = max(running.largest_batch, len(batch))
            return {}
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends one request and not the worker
            if len(batch) == 1:
                return {batch[0].job.request_id: error}
            failed: dict[str, Exception] = {}
            for running in batch:
                failed |= self._forward([running])
            return failed

    def _velocities(self, branches: list[Branch]) -> list[Latents]:
        if self.settings.batching == "joint":
            self._counters["forwards"] += 1
            return self._tower(branches)
        self._counters["forwards"] += len(branches)
        return [self._tower([branch])[0] for branch in branches]

    def _advance(self, running: _Running) -> list[Event]:
        job, sampler = running.job, running.sampler
        try:
            # Looked at after the pages were read: had they been given away meanwhile, this step is void.
            for prefix in running.prefixes:
                prefix.check()
            sampler.advance(running.velocities)
        except Exception as error:  # noqa: BLE001 - as above
            return [self._leave(running, error)]
        self._counters["steps"] += 1
        step, num_steps = sampler.step_index, sampler.num_steps
        events: list[Event] = [StepDone(job.request_id, step, num_steps)]
        if sampler.done:
            self._counters["finished"] += 1
            del self._running[job.request_id]
            events.append(Finished(job.request_id, sampler.results(), self._report(running)))
        elif step % self.settings.save_every == 0:
            events.append(Saved(job.request_id, step, sampler.state()))
        return events

    def _report(self, running: _Running) -> dict[str, Any]:
        return {
            "sigmas": running.sampler.sigmas,
            "start_step": running.start_step,
            "attention": self.settings.attention,
            "batching": self.settings.batching,
            "largest_batch": running.largest_batch,
            "pool": self.pool.kind,
        }

    def _reason_to_leave(self, job: Job) -> Exception | None:
        with self._lock:
            if job.request_id in self._cancelled:
                return RequestCancelled(f"request {job.request_id} was cancelled")
        try:
            job.check_deadline("denoise")
        except Exception as error:  # noqa: BLE001 - handed on as the event's error
            return error
        return None

    def _leave(self, running: _Running, error: Exception) -> Failed:
        self._running.pop(running.job.request_id, None)
        return Failed(running.job.request_id, error)

    def stats(self) -> dict[str, Any]:
        return super().stats() | self._counters | {"active": self.active}
