"""The encoder node against the same stages of the fused run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import PROMPTS, SIZE
from local import job_of, node

from nodes.job import DeadlineExceeded


@pytest.fixture(scope="module")
def encoder(snapshot: Path) -> Any:
    built = node("encoder", snapshot)
    built.warm_up()
    return built


@pytest.mark.parametrize("frames", [1, 17])
@pytest.mark.parametrize("guidance", [6.0, 1.0])
def test_token_ids_equal_the_fused_run(
    encoder: Any, fused_run: Any, snapshot: Path, frames: int, guidance: float
) -> None:
    fields = {**PROMPTS, **SIZE, "num_frames": frames, "guidance_scale": guidance, "num_inference_steps": 1, "seed": 0}
    assert encoder.encode_text(job_of(snapshot, **fields)) == fused_run(**fields).input_ids


def test_the_image_latent_equals_the_fused_run(
    encoder: Any, fused_run: Any, snapshot: Path, picture: np.ndarray
) -> None:
    fields = {**PROMPTS, **SIZE, "num_frames": 5, "num_inference_steps": 1, "seed": 0, "image": picture}
    latent = encoder.encode_vision(job_of(snapshot, **fields), picture[None])
    assert torch.equal(latent, fused_run(**fields).anchor)


def test_a_request_that_is_out_of_time_is_not_started(encoder: Any, snapshot: Path) -> None:
    late = job_of(snapshot, **PROMPTS, timeout=1e-9)
    with pytest.raises(DeadlineExceeded, match="encode_text"):
        encoder.encode_text(late)
