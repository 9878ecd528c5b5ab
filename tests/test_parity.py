"""The reference run against diffusers: every mode, on every family, with and without guidance, float32 on the CPU.

`pytest tests/test_parity.py -s` prints the table of figures at its end.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from cases import CLIP, STEPS, TEXTS, has, request_of
from rich.console import Console
from rich.table import Table

from cosmos3_model.families import FAMILIES
from graph.modes import MODES
from graph.reference import ReferencePipeline

BAR = 1e-4


@pytest.fixture(scope="module")
def references(families: dict[str, Path]) -> dict[str, ReferencePipeline]:
    return {family: ReferencePipeline(path) for family, path in families.items()}


@pytest.fixture(scope="module")
def figures() -> Iterator[list[tuple[str, ...]]]:
    rows: list[tuple[str, ...]] = []
    yield rows
    columns = ("family", "mode", "guidance", "latents", "frames, dB", "sound", "actions")
    table = Table(*columns, title="reference run against diffusers: max abs diff, PSNR")
    for row in rows:
        table.add_row(*row)
    Console(width=120).print(table)


GRID = [case for case in itertools.product(FAMILIES, MODES, (6.0, 1.0)) if has(*case)]


@pytest.mark.parametrize(("family", "mode", "guidance"), GRID)
def test_every_mode_of_every_family_equals_diffusers(
    family: str,
    mode: str,
    guidance: float,
    families: dict[str, Path],
    references: dict[str, ReferencePipeline],
    figures: list[tuple[str, ...]],
    picture: np.ndarray,
    clip: np.ndarray,
) -> None:
    fields = request_of(family, mode, guidance, picture, clip)
    ours = references[family](**fields)
    theirs = oracle.ask(families[family], **fields)
    latents = (ours.latents - theirs.video).abs().max().item()
    assert latents <= BAR
    assert ours.latents.std() > 0.1, "a run that made nothing would be equal to anything"
    assert len(ours.input_ids) == (1 if guidance == 1.0 else 2)
    sound = actions = decibels = "-"
    assert (theirs.sound is not None) == mode.endswith("with-sound")
    if theirs.sound is not None:
        assert ours.sound is not None
        difference = (ours.sound - theirs.sound).abs().max().item()
        sound = f"{difference:.1e}"
        assert ours.sound.shape == theirs.sound.shape
        assert difference <= BAR
        assert ours.sound.std() > 0.01
    assert (theirs.actions is not None) == (mode in ("policy", "inverse-dynamics"))
    if theirs.actions is not None:
        assert ours.actions is not None
        difference = (ours.actions - theirs.actions).abs().max().item()
        actions = f"{difference:.1e}"
        assert ours.actions.shape == theirs.actions.shape
        assert difference <= BAR
        assert ours.actions.std() > 0.1
    if guidance == 1.0:
        expected = oracle.ask(families[family], frames=True, **fields).video
        decibels = f"{psnr(ours.frames, expected):.1f}"
        # Latents agree within 1e-4, so a value may fall on the other side of a rounding step, and only there.
        assert np.abs(ours.frames.astype(int) - expected.astype(int)).max() <= 1
        assert (ours.frames != expected).mean() < 0.01
    figures.append((family, mode, f"{guidance:g}", f"{latents:.1e}", decibels, sound, actions))


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    error = np.mean((a.astype(np.float64) - b.astype(np.float64)) ** 2)
    return float("inf") if error == 0 else float(10 * np.log10(255**2 / error))


SCHEDULES = {"karras": {"use_karras_sigmas": True}, "shifted": {"flow_shift": 10.0}}
TEXT_GRID = list(itertools.product((1, 17), (6.0, 1.0), SCHEDULES, [(64, 96), (48, 80)], (True, False)))


@pytest.mark.parametrize(("frames", "guidance", "schedule", "size", "templates"), TEXT_GRID)
def test_latents_and_token_ids_equal_diffusers(
    frames: int,
    guidance: float,
    schedule: str,
    size: tuple[int, int],
    templates: bool,
    reference: ReferencePipeline,
    snapshot: Path,
) -> None:
    """Schedules, sizes and prompt templates, where nothing but text is given."""
    switches = dict.fromkeys(("use_system_prompt", "add_resolution_template", "add_duration_template"), templates)
    shape = {"num_frames": frames, "height": size[0], "width": size[1]}
    fields = TEXTS | shape | switches | {"num_inference_steps": STEPS, "guidance_scale": guidance, "seed": 12345}
    ours = reference(**fields, **SCHEDULES[schedule])
    theirs = oracle.ask(snapshot, **fields, **SCHEDULES[schedule])
    ids = oracle.load(snapshot).tokenize_prompt(**TEXTS, **shape, **switches)
    assert ours.input_ids == [list(branch) for branch in ids][: len(ours.input_ids)]
    difference = (ours.latents - theirs.video).abs().max().item()
    print(f"{frames} frames, {size}, {schedule}, guidance {guidance:g}: max abs diff on latents {difference:.1e}")
    assert difference <= BAR


@pytest.mark.parametrize("keep", ["first", "last"])
@pytest.mark.parametrize("indexes", [[0], [0, 1], [0, 2], [3]])
@pytest.mark.parametrize("length", [1, 2, 9, 30])
def test_clips_longer_and_shorter_than_needed_equal_diffusers(
    reference: ReferencePipeline, snapshot: Path, keep: str, indexes: list[int], length: int
) -> None:
    video = np.random.default_rng(length).integers(0, 256, (length, 48, 80, 3), dtype=np.uint8)
    fields = CLIP | {"video": video, "condition_frame_indexes_vision": indexes, "condition_video_keep": keep}
    fields |= {"num_inference_steps": 2, "flow_shift": 10.0, "seed": 3, "guidance_scale": 2.0}
    ours = reference(**fields)
    assert ours.anchor is not None
    assert ours.anchor.shape[2] == len(indexes)
    assert (ours.latents - oracle.ask(snapshot, **fields).video).abs().max() <= BAR


@pytest.mark.parametrize("tier", [256, 480])
@pytest.mark.parametrize("size", [(16, 16), (70, 500), (300, 200), (144, 208), (256, 256), (500, 900)])
@pytest.mark.parametrize("length", [1, 9])
def test_scenes_of_any_shape_are_set_as_in_diffusers(snapshot: Path, tier: int, size: Any, length: int) -> None:
    """Canvas, content and pixels: never enlarged, mirrored where there is enough to mirror, else repeated."""
    from PIL import Image

    from cosmos3_model.conditioning import prepare, scene_conditioning

    frames = np.random.default_rng(0).integers(0, 256, (length, *size, 3), dtype=np.uint8)
    ours = scene_conditioning(size, tier, 5, (0, 1))
    pixels, image_size, height, width = oracle.load(snapshot)._prepare_action_video_conditioning(
        [Image.fromarray(frame) for frame in frames], tier, 5, "cpu", torch.float32
    )
    assert [ours.height, ours.width, *(ours.content or ())] == image_size.tolist()
    assert (ours.height, ours.width) == (height, width)
    assert torch.equal(prepare(frames, ours), pixels)


@pytest.mark.parametrize("view", ["ego_view", "third_person_view", "wrist_view", "concat_view"])
@pytest.mark.parametrize(("frames", "fps"), [(17, 24.0), (17, 5.0), (4000, 10.0), (2, 240.0)])
def test_action_captions_equal_diffusers(view: str, frames: int, fps: float) -> None:
    from diffusers import Cosmos3OmniPipeline

    from cosmos3_model.actions import caption

    settings = {"view_point": view, "num_frames": frames, "fps": fps, "height": 544, "width": 736}
    for text in (" Push it", "Push it!", "", "Push it."):
        assert caption(text, **settings) == Cosmos3OmniPipeline._build_action_json_prompt(text, **settings)


def test_the_tables_of_actions_equal_diffusers() -> None:
    from diffusers.pipelines.cosmos import pipeline_cosmos3_omni as theirs

    from cosmos3_model.actions import CANVASES, DOMAINS, VIEW_POINTS, WIDTHLESS

    assert {name: domain.width for name, domain in DOMAINS.items()} == theirs._EMBODIMENT_TO_RAW_ACTION_DIM
    ids = theirs._EMBODIMENT_TO_DOMAIN_ID
    assert {name: domain.id for name, domain in DOMAINS.items()} == {name: ids[name] for name in DOMAINS}
    assert set(ids) == {*DOMAINS, *WIDTHLESS}
    assert VIEW_POINTS == theirs._ACTION_VIEWPOINT_TEMPLATES
    bins = {int(tier): tuple(sizes.values()) for tier, sizes in theirs._ACTION_RESOLUTION_BINS.items()}
    assert bins == CANVASES


def test_what_nothing_is_asked_about_equals_diffusers(reference: ReferencePipeline, snapshot: Path) -> None:
    """Fps, guidance, templates and schedule are left open on both sides; diffusers' users set the shift."""
    size = {"prompt": "A kitchen.", "num_frames": 5, "height": 48, "width": 80, "num_inference_steps": 2, "seed": 2}
    theirs = oracle.ask(snapshot, **size, flow_shift=10.0).video
    assert (reference(**size).latents - theirs).abs().max() <= BAR
    still = size | {"num_frames": 1}
    assert (reference(**still).latents - oracle.ask(snapshot, **still).video).abs().max() <= BAR


def test_fps_reaches_the_positions(reference: ReferencePipeline, snapshot: Path) -> None:
    size = {"prompt": "A kitchen.", "num_frames": 17, "height": 48, "width": 80, "num_inference_steps": 2, "seed": 2}
    fields = size | {"add_duration_template": False, "flow_shift": 10.0}
    slow, fast = (reference(**fields, fps=fps).latents for fps in (8.0, 30.0))
    assert not torch.equal(slow, fast)
    assert (fast - oracle.ask(snapshot, **fields, fps=30.0).video).abs().max() <= BAR
