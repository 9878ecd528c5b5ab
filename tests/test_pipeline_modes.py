"""Every mode on Ray equals the fused run bit for bit: pictures, sound and actions."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from cases import request_of

from graph.modes import MODES
from graph.pipeline import Pipeline
from graph.reference import ReferencePipeline
from graph.request import RequestError
from graph.workers import PipelineError
from nodes.media import encode_frames


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("guidance", [6.0, 1.0])
def test_each_mode_equals_the_fused_run_bit_for_bit(
    clean: Pipeline, fused_run: Any, picture: np.ndarray, clip: np.ndarray, mode: str, guidance: float
) -> None:
    fields = request_of("nano", mode, guidance, picture, clip)
    expected = fused_run(**fields)
    result = clean.generate(**fields)
    assert result.mode == mode
    assert (result.media is None) == (mode == "inverse-dynamics")
    if result.media is not None:
        assert np.array_equal(result.media, expected.frames)
        assert torch.equal(clean.generate(**fields, output="latent").media, expected.latents)
    for made, wanted in ((result.sound, expected.sound), (result.actions, expected.actions)):
        assert (made is None) == (wanted is None)
        assert wanted is None or np.array_equal(made, wanted.numpy())
    assert (result.sound is not None) == mode.endswith("with-sound")
    assert (result.actions is not None) == (mode in ("policy", "inverse-dynamics"))
    assert result.metadata["pool"] == "shared"
    # An array has nothing to be put together; else every node of the mode's graph has worked.
    nodes = {node.name for node in MODES[mode].nodes} - {"mux"}
    assert {timing.node for timing in result.timings} == nodes


def test_guidance_one_leaves_no_second_entry_in_the_store(clean: Pipeline) -> None:
    fields = {"num_frames": 1, "height": 48, "width": 80, "num_inference_steps": 2, "seed": 1}
    for guidance, entries in ((1.0, 1), (6.0, 2)):
        before = clean.stats()["store"]["misses"]
        clean.generate(
            prompt=f"Seen by none, {guidance}.",
            negative_prompt=f"Nor this, {guidance}.",
            guidance_scale=guidance,
            **fields,
        )
        assert clean.stats()["store"]["misses"] - before == entries


def test_the_negative_prompt_is_the_request_s_own(clean: Pipeline, fused_run: Any) -> None:
    fields = {"prompt": "A cube.", "num_frames": 1, "height": 48, "width": 80, "num_inference_steps": 3, "seed": 1}
    texts = ("", "dark", "bright")
    pending = [clean.submit(**fields, negative_prompt=text, output="latent") for text in texts]
    made = [item.result(60).media for item in pending]
    for text, latents in zip(texts, made, strict=True):
        assert torch.equal(latents, fused_run(**fields, negative_prompt=text).latents)
    assert not torch.equal(made[0], made[1])
    assert not torch.equal(made[1], made[2])


def test_the_guidance_interval_reaches_the_steps(clean: Pipeline, fused_run: Any) -> None:
    fields = {"prompt": "A cube.", "num_frames": 1, "height": 48, "width": 80, "num_inference_steps": 8, "seed": 1}
    fields |= {"flow_shift": 3.0, "output": "latent"}
    whole = clean.generate(**fields)
    within = clean.generate(**fields, guidance_interval=[400, 1000])
    assert torch.equal(clean.generate(**fields, guidance_interval=[0, 1000]).media, whole.media)
    assert not torch.equal(within.media, whole.media)
    assert torch.equal(within.media, fused_run(**fields, guidance_interval=[400, 1000]).latents)
    assert within.metadata["guidance_interval"] == (400, 1000)
    assert whole.metadata["guidance_interval"] is None


def test_pictures_and_sound_are_decoded_side_by_side(clean: Pipeline) -> None:
    fields = {"prompt": "A bell.", "num_frames": 97, "height": 96, "width": 160, "num_inference_steps": 1, "seed": 1}
    result = clean.generate(**fields, enable_sound=True, output="mp4")
    spans = {timing.node: timing for timing in result.timings}
    pictures, sound, mux = spans["decode"], spans["decode_sound"], spans["mux"]
    together = min(pictures.end, sound.end) - max(pictures.start, sound.start)
    print(f"decode {pictures.seconds:.3f} s, decode_sound {sound.seconds:.3f} s, together {together:.3f} s")
    assert together > 0
    assert pictures.pid != sound.pid
    assert mux.start >= max(pictures.end, sound.end)


def test_a_clip_with_sound_is_one_file_and_its_pictures_are_the_silent_file_s(
    clean: Pipeline, fused_run: Any, picture: np.ndarray, clip: np.ndarray
) -> None:
    fields = request_of("nano", "text-to-video-with-sound", 6.0, picture, clip)
    result = clean.generate(**fields, output="mp4")
    run = fused_run(**fields)
    assert result.metadata["sampling_rate"] == 48000
    assert np.array_equal(result.sound, run.sound.numpy())
    with av.open(io.BytesIO(result.media)) as made, av.open(io.BytesIO(encode_frames(run.frames, "mp4", 24.0))) as bare:
        assert [stream.type for stream in made.streams] == ["video", "audio"]
        for ours, silent in zip(made.decode(video=0), bare.decode(video=0), strict=True):
            assert np.array_equal(ours.to_ndarray(), silent.to_ndarray())
    assert clean.generate(**fields, output="mp4").media == result.media


def test_a_policy_gives_actions_alone_or_with_the_clip(
    clean: Pipeline, fused_run: Any, picture: np.ndarray, clip: np.ndarray
) -> None:
    fields = request_of("nano", "policy", 1.0, picture, clip)
    alone = clean.generate(**fields, output="actions")
    assert alone.media is None
    assert "decode" not in {timing.node for timing in alone.timings}
    both = clean.generate(**fields, output="npy")
    assert np.array_equal(alone.actions, both.actions)
    assert np.array_equal(np.load(io.BytesIO(both.media)), fused_run(**fields).frames)
    assert both.metadata["domain_name"] == "droid_lerobot"
    assert both.metadata["content"] == (64, 112)


def test_another_family_on_ray_equals_its_fused_run(
    pipeline: Pipeline, families: dict[str, Path], picture: np.ndarray, clip: np.ndarray
) -> None:
    """With noise at every step. Only the nodes that the mode needs are started."""
    family = "super-i2v-4step"
    fields = request_of(family, "image-to-video", 6.0, picture, clip)
    with Pipeline.launch(families[family], modes=["image-to-video"]) as launched:
        assert {replica.kind for replica in launched.workers.all()} == {"encoder", "prefill", "denoise", "vae_decode"}
        expected = ReferencePipeline(families[family])(**fields)
        result = launched.generate(**fields, output="latent")
        assert torch.equal(result.media, expected.latents)
        assert result.metadata["family"] == family
        with pytest.raises(RequestError, match="enable_sound"):
            launched.generate(prompt="x", enable_sound=True)
        with pytest.raises(PipelineError, match=r"launched without text-to-video; it has image-to-video"):
            launched.generate(prompt="x", num_frames=5)
        assert launched.stats()["store"]["pages_in_use"] == 0
