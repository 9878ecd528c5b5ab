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

from cosmos3_model.fused import FusedOutput, FusedPipeline
from cosmos3_model.snapshot import write_snapshot

torch.set_num_threads(1)  # as in the nodes
SIZE = {"height": 64, "width": 96}
PROMPTS = {"prompt": "A red cube.", "negative_prompt": "blurry"}


@pytest.fixture(scope="session")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_snapshot(tmp_path_factory.mktemp("snapshots") / "nano-tiny")


@pytest.fixture(scope="session")
def fused(snapshot: Path) -> FusedPipeline:
    return FusedPipeline(snapshot)


@pytest.fixture(scope="session")
def fused_run(fused: FusedPipeline) -> Callable[..., FusedOutput]:
    """The fused run of a request given in the fields of `GenerationRequest`; repeated requests run once."""
    done: dict[Any, FusedOutput] = {}

    def run(**fields: Any) -> FusedOutput:
        fields.pop("output", None)
        key = tuple((name, str(value)) for name, value in sorted(fields.items()))
        if key not in done:
            done[key] = fused(**fields)
        return done[key]

    return run


@pytest.fixture(scope="session")
def picture() -> np.ndarray:
    """RGB8, of neither the size nor the shape of any request."""
    return np.random.default_rng(0).integers(0, 256, (70, 120, 3), dtype=np.uint8)


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
