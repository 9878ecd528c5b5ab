"""Nodes, a store and a walk in this process: what the pipeline does, without Ray."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from cosmos3_model.config import SnapshotConfig
from graph.request import GenerationRequest
from graph.resolve import resolve
from kvstore.handle import KVHandle
from kvstore.local import LocalStore
from nodes.catalog import build_node
from nodes.denoise import DenoiseNode, Event, Failed, Finished
from nodes.job import Job, NodeSettings
from nodes.prefill import PrefillNode, page_layout


def local_store(snapshot: Path, *, dtype: str = "float32", pages: int = 256, page_size: int = 16) -> LocalStore:
    return LocalStore(page_layout(SnapshotConfig.from_folder(snapshot), pages=pages, page_size=page_size, dtype=dtype))


def node(kind: str, snapshot: Path, store: Any = None, **settings: Any) -> Any:
    built = build_node(kind, NodeSettings(str(snapshot), **settings))
    if store is not None:
        built.attach_store(store)
    return built


def job_of(snapshot: Path, request_id: str | None = None, **fields: Any) -> Job:
    job = resolve(GenerationRequest.parse(**fields), SnapshotConfig.from_folder(snapshot))
    return replace(job, request_id=request_id) if request_id else job


def prefill(prefill_node: PrefillNode, encoder: Any, job: Job) -> list[KVHandle]:
    return prefill_node.prefill(job, encoder.encode_text(job))


def drain(
    denoise: DenoiseNode, on_event: Callable[[Event], None] = lambda event: None, rounds: int = 1000
) -> dict[str, Finished | Failed]:
    """Step until everybody has left; the last event of each request."""
    ends: dict[str, Finished | Failed] = {}
    while denoise.active and rounds:
        rounds -= 1
        for event in denoise.step():
            on_event(event)
            if isinstance(event, Finished | Failed):
                ends[event.request_id] = event
                denoise.drop(event.request_id)
    return ends
