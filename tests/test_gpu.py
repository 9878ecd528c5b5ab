"""Parity on a GPU, in bfloat16, on a snapshot with the published head_dim. Prints each figure.

python -m pytest tests/test_gpu.py -s
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import has, request_of
from test_node_denoise import House

from cosmos3_model.families import FAMILIES
from cosmos3_model.snapshot import write_snapshot
from graph.modes import MODES
from graph.pipeline import Pipeline
from graph.placement import Placement
from graph.reference import ReferencePipeline

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; torch sees none on this machine"),
]
PROMPTS = {"prompt": "A red cube.", "negative_prompt": "blurry"}
STILL = {**PROMPTS, "num_frames": 1, "height": 192, "width": 320, "num_inference_steps": 8, "seed": 1}


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    """Decibels between two RGB8 arrays of one shape."""
    error = np.mean((a.astype(np.float64) - b.astype(np.float64)) ** 2)
    return float("inf") if error == 0 else float(10 * np.log10(255**2 / error))


def fields_of(family: str, mode: str, picture: np.ndarray, clip: np.ndarray) -> dict[str, Any]:
    """As on the CPU, at a larger size."""
    fields = request_of(family, mode, 6.0, picture, clip)
    return fields if "action" in fields else fields | {"height": 192, "width": 320}


def compare(made: torch.Tensor | np.ndarray | None, expected: torch.Tensor | None) -> float:
    """Largest difference; both or neither are there."""
    assert (made is None) == (expected is None)
    if made is None or expected is None:
        return 0.0
    return (torch.as_tensor(made) - expected.cpu()).abs().max().item()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_snapshot(tmp_path_factory.mktemp("gpu") / "small", size="small")


@pytest.fixture(scope="module")
def fused(small: Path) -> ReferencePipeline:
    return ReferencePipeline(small, dtype=torch.bfloat16, device="cuda")


@pytest.fixture(scope="module", params=["exact", "joint"])
def launched(request: pytest.FixtureRequest, small: Path) -> Iterator[tuple[str, Pipeline]]:
    placement = Placement.default(1)
    denoise = placement.node("denoise").model_copy(update={"batching": request.param})
    with Pipeline.launch(
        small, placement.model_copy(update={"nodes": placement.nodes | {"denoise": denoise}})
    ) as pipeline:
        yield request.param, pipeline
        assert pipeline.stats()["store"]["pages_in_use"] == 0


@pytest.mark.parametrize("mode", MODES)
def test_the_pipeline_equals_the_fused_run_in_every_mode(
    launched: tuple[str, Pipeline], fused: ReferencePipeline, picture: np.ndarray, clip: np.ndarray, mode: str
) -> None:
    """Branches in sequence: bit-exact. Both branches in one forward: at least 35 dB."""
    batching, pipeline = launched
    fields = fields_of("nano", mode, picture, clip)
    expected = fused(**fields)
    result = pipeline.generate(**fields)
    sound, actions = compare(result.sound, expected.sound), compare(result.actions, expected.actions)
    latents, decibels = 0.0, float("inf")
    if result.media is not None:
        latents = compare(pipeline.generate(**fields, output="latent").media, expected.latents)
        decibels = psnr(result.media, expected.frames)
        assert expected.frames.std() > 5
    print(
        f"{mode}, {batching}: max abs diff on latents {latents:.1e}, sound {sound:.1e}, actions {actions:.1e}, "
        f"frames {decibels:.1f} dB"
    )
    if batching == "exact":
        assert (latents, sound, actions) == (0, 0, 0)
    assert decibels >= 35
    assert max(sound, actions) <= 0.05


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "nano"])
@pytest.mark.parametrize("mode", ["text-to-image", "image-to-video", "video-to-video-with-sound", "policy"])
def test_nodes_of_every_family_equal_the_fused_run(
    tmp_path: Path, picture: np.ndarray, clip: np.ndarray, family: str, mode: str
) -> None:
    if not has(family, mode, 1.0):
        pytest.skip(f"{family} was not trained for {mode}")
    snapshot = write_snapshot(tmp_path / family, family=family, size="small")
    fields = fields_of(family, mode, picture, clip)
    expected = ReferencePipeline(snapshot, dtype=torch.bfloat16, device="cuda")(**fields)
    made = House(snapshot, dtype="bfloat16", device="cuda").run(**fields)
    wanted = {"vision": expected.latents, "sound": expected.sound_latents, "action": expected.actions}
    differences = [compare(made[name].cpu() if name in made else None, latents) for name, latents in wanted.items()]
    print(f"{family}, {mode}: max abs diff on latents, sound and actions {differences}")
    assert differences == [0, 0, 0]


def test_requests_in_one_batch_stay_themselves(launched: tuple[str, Pipeline], fused: ReferencePipeline) -> None:
    batching, pipeline = launched
    mixed = [STILL | {"seed": seed, "prompt": f"Number {seed}."} for seed in range(4)]
    alone = [fused(**fields).frames for fields in mixed]
    pending = [pipeline.submit(**fields) for fields in mixed]
    results = [item.result(120) for item in pending]
    largest = max(result.metadata["largest_batch"] for result in results)
    assert {result.metadata["batching"] for result in results} == {batching}
    assert (largest > 1) == (batching == "joint"), "the requests did not share a forward"
    for index, frames in enumerate(result.media for result in results):
        own = psnr(frames, alone[index])
        other = max(psnr(frames, alone[i]) for i in range(4) if i != index)
        print(f"{batching}, request {index}: own {own:.1f} dB, nearest other {other:.1f} dB")
        assert own > other + 8
        assert own >= 35


def test_one_anchor_frame_equals_the_first_of_the_padded_clip(fused: ReferencePipeline, picture: np.ndarray) -> None:
    from cosmos3_model.conditioning import Conditioning, fit_image

    vae = fused.fused.vae
    anchor = vae.encode(picture[None], Conditioning("image", 192, 320, 1, (0,)))
    clip = fit_image(picture, 192, 320).unsqueeze(2).expand(-1, -1, 17, -1, -1).to("cuda", torch.bfloat16)
    with torch.inference_mode():
        whole = vae._vae.encode(clip).latent_dist.mode()[:, :, :1]
    expected = ((whole - vae._mean) * vae._inverse_std).float().cpu()
    difference = (anchor - expected).abs().max().item()
    print(f"anchor frame against the padded clip: max abs diff {difference:.2e}")
    assert difference <= 1e-4


@pytest.mark.parametrize("mode", ["text-to-image", "text-to-video-with-sound", "policy"])
def test_float32_on_the_gpu_is_close_to_the_cpu(small: Path, picture: np.ndarray, clip: np.ndarray, mode: str) -> None:
    """The devices sum in another order; steps of guidance multiply what is left by about a hundred."""
    fields = fields_of("nano", mode, picture, clip)
    here, there = ReferencePipeline(small)(**fields), ReferencePipeline(small, device="cuda")(**fields)
    pairs = [(here.latents, there.latents), (here.sound, there.sound), (here.actions, there.actions)]
    differences = [compare(ours, theirs) for ours, theirs in pairs]
    shown = ", ".join(f"{difference:.1e}" for difference in differences)
    print(f"float32 {mode}, GPU against CPU: latents, sound, actions {shown}; {psnr(here.frames, there.frames):.1f} dB")
    assert max(differences) <= 1e-2
