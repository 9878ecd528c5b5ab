"""The VAE-decode node against the fused run's frames, in every form that a user can ask for."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from conftest import PROMPTS, SIZE
from local import job_of, node
from PIL import Image

from cosmos3_model.sampling import NonFiniteError

FIELDS = {**PROMPTS, **SIZE, "num_inference_steps": 2, "seed": 4}


@pytest.fixture(scope="module")
def decoder(snapshot: Path) -> Any:
    built = node("vae_decode", snapshot)
    built.warm_up()
    return built


def decode(decoder: Any, snapshot: Path, run: Any, output: str, frames: int) -> Any:
    return decoder.decode(job_of(snapshot, **FIELDS, num_frames=frames, output=output), run.latents)


@pytest.mark.parametrize("frames", [1, 17])
def test_frames_equal_the_fused_run(decoder: Any, fused_run: Any, snapshot: Path, frames: int) -> None:
    run = fused_run(**FIELDS, num_frames=frames)
    assert np.array_equal(decode(decoder, snapshot, run, "np", frames), run.frames)
    assert np.array_equal(np.load(io.BytesIO(decode(decoder, snapshot, run, "npy", frames))), run.frames)
    files = decode(decoder, snapshot, run, "png_frames", frames)
    assert np.array_equal(np.stack([np.asarray(Image.open(io.BytesIO(file))) for file in files]), run.frames)


def test_latents_pass_through(decoder: Any, fused_run: Any, snapshot: Path) -> None:
    run = fused_run(**FIELDS, num_frames=1)
    assert torch.equal(decode(decoder, snapshot, run, "latent", 1), run.latents)


@pytest.mark.parametrize(("output", "kind", "bar"), [("png", "PNG", 0), ("jpeg", "JPEG", 40), ("webp", "WEBP", 40)])
def test_pictures_are_what_they_are_called(
    decoder: Any, fused_run: Any, snapshot: Path, output: str, kind: str, bar: int
) -> None:
    run = fused_run(**FIELDS, num_frames=1)
    picture = Image.open(io.BytesIO(decode(decoder, snapshot, run, output, 1)))
    assert picture.format == kind
    assert picture.size == (96, 64)
    difference = np.abs(np.asarray(picture.convert("RGB")).astype(int) - run.frames[0].astype(int))
    assert difference.mean() <= bar


def test_clips_play_in_a_browser_and_depend_on_the_frames_alone(decoder: Any, fused_run: Any, snapshot: Path) -> None:
    run = fused_run(**FIELDS, num_frames=17)
    data = decode(decoder, snapshot, run, "mp4", 17)
    assert all(decode(decoder, snapshot, run, "mp4", 17) == data for _ in range(5))
    assert data.index(b"moov") < data.index(b"mdat"), "the index is not in front"
    with av.open(io.BytesIO(data)) as clip:
        stream = clip.streams.video[0]
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        assert (stream.width, stream.height, float(stream.average_rate)) == (96, 64, 24.0)
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in clip.decode(stream)])
    assert frames.shape == run.frames.shape
    luma = (frames.mean(-1) - run.frames.mean(-1)).astype(np.float64)
    assert np.sqrt((luma**2).mean()) < 16


def test_frames_that_are_not_a_number_are_no_black_picture(snapshot: Path, fused_run: Any) -> None:
    broken = node("vae_decode", snapshot)
    broken._vae._mean.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="VAE decoder's frames are not finite"):
        decode(broken, snapshot, fused_run(**FIELDS, num_frames=1), "png", 1)
