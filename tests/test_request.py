"""What is refused, each with the name of the field, before any work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cosmos3_model.config import SnapshotConfig
from graph.modes import mode_of
from graph.request import GenerationRequest, RequestError

GOOD = {"prompt": "A red cube.", "num_frames": 1, "height": 64, "width": 96}
CLIP = GOOD | {"num_frames": 5}

BAD = [
    ({"num_frames": 16}, "num_frames", "the nearest are 13 and 17"),
    ({"num_frames": 2}, "num_frames", "the nearest are 1 and 5"),
    ({"num_frames": 0}, "num_frames", "from 1 to"),
    ({"num_frames": -3}, "num_frames", "from 1 to"),
    ({"num_frames": "5"}, "num_frames", "got '5'"),
    ({"num_frames": 5.0}, "num_frames", "valid integer"),
    ({"num_frames": True}, "num_frames", "valid integer"),
    ({"num_frames": 4097, "height": 4096, "width": 4096}, "num_frames", "tokens"),
    ({"height": 50}, "height", "multiple of 16"),
    ({"height": 0}, "height", "multiple of 16"),
    ({"width": 1 << 20}, "width", "to 4096"),
    ({"width": -16}, "width", "multiple of 16"),
    ({"fps": 0.0}, "fps", "greater than 0"),
    ({"fps": float("inf")}, "fps", "finite"),
    ({"num_inference_steps": 0}, "num_inference_steps", "greater than or equal to 1"),
    ({"num_inference_steps": 10**9}, "num_inference_steps", "less than or equal to 1000"),
    ({"guidance_scale": float("nan")}, "guidance_scale", "finite"),
    ({"guidance_scale": -1.0}, "guidance_scale", "greater than or equal to 0"),
    ({"guidance_scale": "six"}, "guidance_scale", "valid number"),
    ({"flow_shift": 0.0}, "flow_shift", "greater than 0"),
    ({"flow_shift": float("nan")}, "flow_shift", ""),
    ({"seed": -1}, "seed", "greater than or equal to 0"),
    ({"seed": 1 << 63}, "seed", "less than"),
    ({"prompt": ""}, "prompt", "must not be empty"),
    ({"prompt": " \n"}, "prompt", "must not be empty"),
    ({"prompt": "x" * 70_000}, "prompt", "at most 65536"),
    ({"prompt": 3}, "prompt", "valid string"),
    ({"prompt": "\ud800"}, "prompt", "unicode"),
    ({"output": "gif"}, "output", "'np', 'npy'"),
    ({"output": "png", "num_frames": 5}, "output", "holds one frame"),
    ({"image": b"\x89PNG not really", "num_frames": 5}, "image", "not a picture"),
    ({"image": np.zeros((4, 4), np.uint8), "num_frames": 5}, "image", "uint8"),
    ({"image": 7, "num_frames": 5}, "image", ""),
    ({"image": np.zeros((4, 4, 3), np.uint8)}, "image", "needs num_frames over 1"),
    ({"timeout": 0.0}, "timeout", "greater than 0"),
    ({"steps": 3}, "steps", "unknown field; there are prompt, "),
]


@pytest.mark.parametrize(("change", "field", "message"), BAD, ids=lambda value: str(value)[:40])
def test_it_is_refused_by_name(change: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        GenerationRequest.parse(**GOOD | change)
    assert caught.value.field == field
    assert message in caught.value.message
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_missing_prompt_is_named() -> None:
    with pytest.raises(RequestError, match="prompt: is required"):
        GenerationRequest.parse(num_frames=1)


def test_an_image_file_that_is_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    file.write_text("not a picture")
    with pytest.raises(RequestError, match=r"image: .*picture.png: not a picture"):
        GenerationRequest.parse(**CLIP, image=file)
    with pytest.raises(RequestError, match=r"image: .*absent.png: no such file"):
        GenerationRequest.parse(**CLIP, image=tmp_path / "absent.png")


def test_the_mode_follows_from_the_fields(picture: np.ndarray) -> None:
    assert mode_of(GenerationRequest.parse(**GOOD)) == "text-to-image"
    assert mode_of(GenerationRequest.parse(**CLIP)) == "text-to-video"
    assert mode_of(GenerationRequest.parse(**CLIP, image=picture)) == "image-to-video"


def test_what_is_left_open_is_settled_from_the_checkpoint(snapshot: Path) -> None:
    config = SnapshotConfig.from_folder(snapshot)
    job = GenerationRequest.parse(prompt="x").resolve(config)
    assert (job.prompt.num_frames, job.prompt.height, job.prompt.width, job.prompt.fps) == (189, 720, 1280, 24.0)
    assert (job.sampling.guidance_scale, job.sampling.schedule.num_inference_steps) == (6.0, 35)
    assert (job.sampling.schedule.use_karras_sigmas, job.prompt.use_system_prompt) == (True, True)
    assert job.sampling.latent_shape == (1, 48, 48, 45, 80)
    seeds = {GenerationRequest.parse(prompt="x").resolve(config).sampling.seed for _ in range(8)}
    assert len(seeds) == 8
    assert GenerationRequest.parse(prompt="x", seed=5).resolve(config).sampling.seed == 5
