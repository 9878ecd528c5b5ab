"""One snapshot, one fused run and one pipeline for the whole session: Ray is slow to start on two cores."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import numpy as np
import pytest
import torch

from cosmos3_model.families import FAMILIES
from cosmos3_model.fused import FusedOutput, FusedPipeline
from cosmos3_model.snapshot import write_snapshot
from graph.reference import ReferencePipeline

torch.set_num_threads(1)  # as in the nodes
SIZE = {"height": 64, "width": 96}
PROMPTS = {"prompt": "A red cube.", "negative_prompt": "blurry"}


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny snapshot of each checkpoint family."""
    folder = tmp_path_factory.mktemp("snapshots")
    return {family: write_snapshot(folder / f"{family}-tiny", family=family) for family in FAMILIES}


@pytest.fixture(scope="session")
def snapshot(families: dict[str, Path]) -> Path:
    return families["nano"]


@pytest.fixture(scope="session")
def reference(snapshot: Path) -> ReferencePipeline:
    return ReferencePipeline(snapshot)


@pytest.fixture(scope="session")
def fused(reference: ReferencePipeline) -> FusedPipeline:
    """The parts of the reference run."""
    return reference.fused


@pytest.fixture(scope="session")
def fused_run(reference: ReferencePipeline) -> Callable[..., FusedOutput]:
    """The fused run of a request given in the fields of `GenerationRequest`; repeated requests run once."""
    done: dict[Any, FusedOutput] = {}

    def run(**fields: Any) -> FusedOutput:
        fields.pop("output", None)
        key = tuple((name, str(value)) for name, value in sorted(fields.items()))
        if key not in done:
            done[key] = reference(**fields)
        return done[key]

    return run


@pytest.fixture(scope="session")
def picture() -> np.ndarray:
    """RGB8, of neither the size nor the shape of any request."""
    return np.random.default_rng(0).integers(0, 256, (70, 120, 3), dtype=np.uint8)


@pytest.fixture(scope="session")
def clip() -> np.ndarray:
    """RGB8, nine frames, of the shape of 48x80 and not of its size."""
    return np.random.default_rng(1).integers(0, 256, (9, 96, 160, 3), dtype=np.uint8)


@pytest.fixture(scope="session")
def pipeline(snapshot: Path) -> Iterator[Any]:
    """Every node on Ray, two of denoise."""
    import ray

    from graph.pipeline import Pipeline
    from graph.placement import Placement

    ray.init(
        address="local", num_cpus=4, include_dashboard=False, namespace=f"tests-{os.getpid()}", log_to_driver=False
    )
    placement = Placement.model_validate(
        {"nodes": {"denoise": {"replicas": 2, "save_every": 2}}, "limits": {"heartbeat_seconds": 4}}
    )
    with Pipeline.launch(snapshot, placement) as launched:
        yield launched
    ray.shutdown()


@pytest.fixture
def clean(pipeline: Any) -> Iterator[Any]:
    """The pipeline, and after the test the proof that it left nothing behind."""
    yield pipeline
    deadline = time.monotonic() + 20
    while True:
        store = pipeline.stats()["store"]
        left = [store["pages_in_use"], store["leases"], store["owners"], len(pipeline.workers.leases)]
        if not any(left) or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    assert left == [0, 0, 0, 0], "pages in use, leases, owners, leases that the driver renews"
    assert store["integrity"] is True
