"""The fused run against diffusers' `Cosmos3OmniPipeline`: same snapshot, seed and settings, float32 on the CPU."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from cosmos3_model.fused import FusedPipeline

BAR = 1e-4
STEPS = 4
MODES = {"t2i": (1, False), "t2v": (17, False), "i2v": (17, True)}
SIZES = [(64, 96), (48, 80)]
SCHEDULES = {"karras": {}, "shifted": {"flow_shift": 10.0}}
GRID = list(itertools.product(MODES, (6.0, 1.0), SCHEDULES, SIZES, (0, 12345), (True, False)))


@pytest.fixture(scope="module")
def oracle(snapshot: Path) -> Any:
    from diffusers import Cosmos3OmniPipeline

    pipe = Cosmos3OmniPipeline.from_pretrained(
        snapshot, dtype=torch.float32, safety_checker=None, enable_safety_checker=False
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def ask(oracle: Any, snapshot: Path, schedule: dict[str, Any], seed: int, **arguments: Any) -> Any:
    """What diffusers makes of a request, its scheduler set as its users set it."""
    from diffusers import UniPCMultistepScheduler

    config = json.loads((snapshot / "scheduler" / "scheduler_config.json").read_text())
    if schedule:
        config |= schedule | {"use_karras_sigmas": False}
    oracle.scheduler = UniPCMultistepScheduler.from_config(config)
    return oracle(**arguments, generator=torch.Generator("cpu").manual_seed(seed)).video


@pytest.mark.parametrize(("mode", "guidance", "schedule", "size", "seed", "templates"), GRID)
def test_latents_and_token_ids_equal_diffusers(
    mode: str,
    guidance: float,
    schedule: str,
    size: tuple[int, int],
    seed: int,
    templates: bool,
    oracle: Any,
    fused: FusedPipeline,
    snapshot: Path,
    picture: np.ndarray,
) -> None:
    frames, with_image = MODES[mode]
    height, width = size
    texts = {"prompt": "A red cube turns. ", "negative_prompt": "blurry, dark."}
    switches = dict.fromkeys(("use_system_prompt", "add_resolution_template", "add_duration_template"), templates)
    common = {
        "num_frames": frames,
        "height": height,
        "width": width,
        "num_inference_steps": STEPS,
        "guidance_scale": guidance,
        **texts,
        **switches,
    }
    ours = fused(**common, image=picture if with_image else None, seed=seed, **SCHEDULES[schedule])
    image = Image.fromarray(picture) if with_image else None
    theirs = ask(oracle, snapshot, SCHEDULES[schedule], seed, **common, image=image, output_type="latent")
    ids = oracle.tokenize_prompt(**texts, num_frames=frames, height=height, width=width, **switches)
    assert ours.input_ids == [list(branch) for branch in ids][: len(ours.input_ids)]
    assert len(ours.input_ids) == (1 if guidance == 1.0 else 2)
    difference = (ours.latents - theirs).abs().max().item()
    print(f"{mode} guidance {guidance} {schedule} {height}x{width} seed {seed}: max abs diff {difference:.2e}")
    assert difference <= BAR
    assert ours.latents.std() > 0.1, "a run that made nothing would be equal to anything"


@pytest.mark.parametrize("mode", MODES)
def test_frames_equal_diffusers(
    mode: str, oracle: Any, fused: FusedPipeline, snapshot: Path, picture: np.ndarray
) -> None:
    frames, with_image = MODES[mode]
    common = {"prompt": "A red cube.", "num_frames": frames, "height": 64, "width": 96, "num_inference_steps": STEPS}
    ours = fused(**common, image=picture if with_image else None, seed=1).frames
    image = Image.fromarray(picture) if with_image else None
    theirs = ask(oracle, snapshot, {}, 1, **common, image=image, output_type="np")
    theirs = (theirs * 255).round().astype(np.uint8)
    assert ours.shape == theirs.shape == (frames, 64, 96, 3)
    # Latents agree within 1e-4, so a value may fall on the other side of a rounding step, and only there.
    assert np.abs(ours.astype(int) - theirs.astype(int)).max() <= 1
    assert (ours != theirs).mean() < 0.01


def test_defaults_equal_diffusers_where_nothing_is_asked_for(oracle: Any, fused: FusedPipeline, snapshot: Path) -> None:
    """Everything but the size is left open on both sides, fps and templates included."""
    size = {"num_frames": 5, "height": 48, "width": 80, "num_inference_steps": 2}
    ours = fused("A kitchen.", seed=2, **size).latents
    theirs = ask(oracle, snapshot, {}, 2, prompt="A kitchen.", output_type="latent", **size)
    assert (ours - theirs).abs().max() <= BAR


def test_fps_reaches_the_positions(oracle: Any, fused: FusedPipeline, snapshot: Path) -> None:
    size = {"num_frames": 17, "height": 48, "width": 80, "num_inference_steps": 2, "add_duration_template": False}
    slow, fast = (fused("A kitchen.", seed=2, fps=fps, **size).latents for fps in (8.0, 30.0))
    assert not torch.equal(slow, fast)
    theirs = ask(oracle, snapshot, {}, 2, prompt="A kitchen.", fps=30.0, output_type="latent", **size)
    assert (fast - theirs).abs().max() <= BAR
