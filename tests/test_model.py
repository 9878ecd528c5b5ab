"""The network's parts against diffusers' own, and against themselves in company."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cosmos3_model.actions import ActionSettings
from cosmos3_model.attention import DensePrefix, get_backend
from cosmos3_model.conditioning import Conditioning, fit_image, prepare
from cosmos3_model.config import SnapshotConfig
from cosmos3_model.fused import FusedPipeline
from cosmos3_model.layout import Latents, Layout, action_segment, patchify, text_positions, unpatchify, vision_segment
from cosmos3_model.rotary import RotaryEmbedding
from cosmos3_model.sampling import NonFiniteError, Sampler, SamplingSettings
from cosmos3_model.schedule import ScheduleSettings, solver_for
from cosmos3_model.snapshot import EULER
from cosmos3_model.towers import Branch
from cosmos3_model.transformer import load_generation, load_understanding


@pytest.fixture(scope="module")
def config(snapshot: Path) -> SnapshotConfig:
    return SnapshotConfig.from_folder(snapshot)


@pytest.mark.parametrize("frames", [1, 5])
@pytest.mark.parametrize("fps", [24.0, 10.0])
def test_positions_equal_diffusers(config: SnapshotConfig, frames: int, fps: float) -> None:
    from diffusers.pipelines.cosmos.pipeline_cosmos3_omni import (
        get_3d_mrope_ids_text_tokens,
        get_3d_mrope_ids_vae_tokens,
    )

    text, offset = get_3d_mrope_ids_text_tokens(31, 0, use_float_positions=True)
    assert torch.equal(text_positions(31, config.transformer), text)
    theirs, _ = get_3d_mrope_ids_vae_tokens(frames, 3, 5, offset + 15000, fps=fps)
    layout = vision_segment(config.transformer, (1, 48, frames, 5, 10), text_tokens=31, fps=fps)
    assert torch.equal(layout.positions.float(), theirs.float())
    assert layout.grid == (frames, 3, 5)


@pytest.mark.parametrize("axes", [(24, 20, 20), (4, 2, 2)])
def test_rotary_tables_equal_diffusers_in_bfloat16_too(axes: tuple[int, int, int]) -> None:
    from diffusers.models.transformers.transformer_cosmos3 import Cosmos3VLTextRotaryEmbedding

    dim = 2 * sum(axes)
    positions = torch.rand(3, 50) * 100 + 15000
    theirs = Cosmos3VLTextRotaryEmbedding(dim, 5e6, axes)(positions[:, None], "cpu", torch.bfloat16)
    for ours, table in zip(RotaryEmbedding(dim, 5e6, axes)(positions, torch.bfloat16), theirs, strict=True):
        assert torch.equal(ours, table[0])


def test_patches_go_there_and_back_with_odd_sizes(config: SnapshotConfig) -> None:
    latents = torch.randn(1, 48, 3, 5, 7)
    layout = vision_segment(config.transformer, (1, 48, 3, 5, 7), text_tokens=4, fps=24)
    tokens = patchify(latents, 2)
    assert tokens.shape == (3 * 3 * 4, 192)
    assert torch.equal(unpatchify(tokens, layout, 2), latents)
    assert torch.equal(tokens[0, :48], latents[0, :, 0, 0, 0]), "channels are innermost"
    assert torch.equal(tokens[0, 48:96], latents[0, :, 0, 0, 1]), "then patch columns"
    assert tokens[-1, 48:].abs().sum() == 0, "the odd corner is padded with zeros"


@pytest.mark.parametrize(
    "family", [{}, {"hidden_act": "relu2", "qk_norm_for_text": False, "use_und_k_norm_for_gen": True}]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_step_equals_diffusers_transformer(config: SnapshotConfig, family: dict[str, Any], dtype: Any) -> None:
    """Both families of decoder layer, clean frames, odd sizes; random weights in both networks."""
    from diffusers import Cosmos3OmniPipeline, Cosmos3OmniTransformer  # noqa: F401

    from cosmos3_model.towers import GenerationTower, UnderstandingTower

    parts = replace(config.transformer, action_gen=False, sound_gen=False, **family)
    raw = json.loads((config.root / "transformer" / "config.json").read_text()) | {
        "action_gen": False,
        "sound_gen": False,
    }
    torch.manual_seed(0)
    theirs = Cosmos3OmniTransformer.from_config(raw | family).eval()
    for name, parameter in theirs.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.1 if "norm" in name else 0.15)
    theirs.to(dtype).time_embedder.float()
    weights = theirs.state_dict()
    backend = get_backend("sdpa")
    understanding, generation = UnderstandingTower(parts, backend), GenerationTower(parts, backend)
    for tower in (understanding, generation):
        tower.load_state_dict({key: weights[key] for key in tower.state_dict()}, assign=True)

    ids = torch.randint(0, 200, (13,))
    latents = torch.randn(1, 48, 3, 5, 6)
    layout = vision_segment(parts, (1, 48, 3, 5, 6), text_tokens=13, fps=24, clean_frames=(0,))
    branch = Branch({"vision": latents}, 700.0, Layout({"vision": layout}), understanding(ids))
    ours = generation([branch])[0]["vision"]

    per_frame, noisy = 9, torch.tensor([1, 2])
    span = torch.arange(13, 13 + 27)
    with torch.no_grad():
        expected = theirs(
            input_ids=ids,
            text_indexes=torch.arange(13),
            position_ids=torch.cat([text_positions(13, parts), layout.positions], dim=1),
            und_len=13,
            sequence_length=40,
            vision_tokens=[latents.to(dtype)],
            vision_token_shapes=[layout.grid],
            vision_sequence_indexes=span,
            vision_mse_loss_indexes=span[per_frame:],
            vision_timesteps=torch.full((2 * per_frame,), 700),
            vision_noisy_frame_indexes=[noisy],
        ).sample[0]
    bar = 1e-5 if dtype == torch.float32 else 0.1 * expected.std().item()
    assert (ours - expected.float()).abs().max() <= bar
    assert ours[:, :, 0].abs().sum() == 0


def branch_of(config: SnapshotConfig, text: int, shape: tuple[int, ...], timestep: float, seed: int) -> Branch:
    generator = torch.Generator().manual_seed(seed)
    parts = config.transformer
    shape5 = (1, 48, *shape)
    kv = [
        tuple(torch.randn(2, text, parts.num_key_value_heads, parts.head_dim, generator=generator).unbind())
        for _ in range(parts.num_hidden_layers)
    ]
    layout = vision_segment(parts, shape5, text_tokens=text, fps=24, clean_frames=(0,) if shape[0] > 1 else ())
    latents = torch.randn(shape5, generator=generator)
    return Branch({"vision": latents}, timestep, Layout({"vision": layout}), DensePrefix(kv))  # type: ignore[arg-type]


def test_a_joint_forward_equals_each_branch_alone_in_any_order(config: SnapshotConfig) -> None:
    tower = load_generation(config, dtype=torch.float32)
    sizes = [(5, (1, 4, 6)), (40, (5, 3, 5)), (17, (2, 8, 2)), (1, (1, 1, 1))]
    branches = [branch_of(config, text, shape, 100.0 + 200 * i, i) for i, (text, shape) in enumerate(sizes)]
    alone = [tower([branch])[0] for branch in branches]
    worst = 0.0
    for order in itertools.permutations(range(4)):
        for place, velocity in zip(order, tower([branches[i] for i in order]), strict=True):
            worst = max(worst, (velocity["vision"] - alone[place]["vision"]).abs().max().item())
    print(f"joint against alone, 24 orders: max abs diff {worst:.2e}")
    assert worst <= 1e-5


def test_given_actions_have_no_velocity(config: SnapshotConfig) -> None:
    tower = load_generation(config, dtype=torch.float32)
    branch = branch_of(config, 5, (2, 4, 4), 300.0, 0)
    for given in (True, False):
        actions = action_segment(config.transformer, 4, text_tokens=5, fps=5, domain_id=2, given=given)
        layout = Layout({**branch.layout.segments, "action": actions})
        latents: Latents = {**branch.latents, "action": torch.randn(actions.shape)}
        velocity = tower([replace(branch, latents=latents, layout=layout)])[0]["action"]
        assert bool((velocity == 0).all()) is given


def test_the_towers_share_no_weight_and_miss_none(config: SnapshotConfig) -> None:
    from cosmos3_model.loader import read_header
    from cosmos3_model.towers import UNUSED_KEYS

    understanding = set(load_understanding(config, dtype=torch.float32).state_dict())
    generation = set(load_generation(config, dtype=torch.float32).state_dict())
    assert not understanding & generation
    assert understanding | generation | set(UNUSED_KEYS) == set(read_header(config.root / "transformer"))


def test_text_kv_is_in_the_asked_type_and_time_mlp_in_float32(config: SnapshotConfig) -> None:
    prefix = load_understanding(config, dtype=torch.bfloat16)(torch.arange(9))
    assert {tensor.dtype for pair in prefix.layers for tensor in pair} == {torch.bfloat16}
    generation = load_generation(config, dtype=torch.bfloat16)
    assert generation.proj_in.weight.dtype == torch.bfloat16
    assert generation.time_embedder.linear_1.weight.dtype == torch.float32


def test_native_flow_schedule_has_the_published_timesteps(config: SnapshotConfig) -> None:
    native = replace(config, use_native_flow_schedule=True)
    solver = solver_for(native, ScheduleSettings(10, flow_shift=3.0, use_karras_sigmas=False))
    assert solver._scheduler.timesteps.tolist() == [999, 963, 922, 874, 817, 749, 666, 562, 428, 249]


def test_karras_schedule_of_four_steps_starts_as_published(config: SnapshotConfig) -> None:
    settings = ScheduleSettings.resolve(config, 4)
    assert settings == ScheduleSettings(4, 1.0, True)
    assert solver_for(config, settings).sigmas[0] == pytest.approx(200 / 201)
    assert ScheduleSettings.resolve(config, 4, flow_shift=10.0).use_karras_sigmas is False
    assert ScheduleSettings.resolve(config, 4, flow_shift=10.0, use_karras_sigmas=True).use_karras_sigmas is True


def settings_of(**changes: Any) -> SamplingSettings:
    return replace(SamplingSettings((1, 48, 2, 4, 4), 24.0, 3, 6.0, ScheduleSettings(7, 10.0, False)), **changes)


def sampler_of(config: SnapshotConfig, fused: FusedPipeline, **changes: Any) -> Sampler:
    tower = fused.transformer.understanding
    return Sampler(config, settings_of(**changes), [tower(torch.arange(5)), tower(torch.arange(8))])


def walk(sampler: Sampler, fused: FusedPipeline, until: int) -> None:
    while sampler.step_index < until:
        sampler.advance([fused.transformer.generation([branch])[0] for branch in sampler.branches()])


@pytest.mark.parametrize("at", [0, 1, 2, 3, 6])
@pytest.mark.parametrize("kind", ["plain", "everything", "four steps"])
def test_a_sampler_goes_on_from_a_saved_state_bit_for_bit(
    config: SnapshotConfig, fused: FusedPipeline, at: int, kind: str
) -> None:
    changes: dict[str, Any] = {}
    if kind == "everything":
        changes = {"sound_shape": (64, 3), "action": ActionSettings(4, 2, 9, given=False)}
    elif kind == "four steps":  # seven of them here; each adds noise
        config = replace(config, scheduler=EULER)
        changes = {"schedule": ScheduleSettings(7, 1.0, False, tuple(1 - i / 8 for i in range(7)))}
    whole, first, second = (sampler_of(config, fused, **changes) for _ in range(3))
    walk(whole, fused, 7)
    walk(first, fused, at)
    second.load_state(first.state())
    walk(second, fused, 7)
    assert second.latents.keys() == whole.latents.keys()
    for name, latents in whole.latents.items():
        assert torch.equal(second.latents[name], latents), name
    assert second.done


def test_not_a_number_is_named_with_its_step(config: SnapshotConfig, fused: FusedPipeline) -> None:
    sampler = sampler_of(config, fused)
    walk(sampler, fused, 2)
    with pytest.raises(NonFiniteError, match="after step 3 of 7"):
        sampler.advance([{"vision": torch.full_like(sampler.latents["vision"], float("nan"))}] * 2)


def test_noise_does_not_depend_on_the_anchor_and_keeps_it_clean(config: SnapshotConfig, fused: FusedPipeline) -> None:
    anchor = torch.ones(1, 48, 2, 4, 4)
    free = settings_of(latent_shape=(1, 48, 4, 4, 4))
    prefixes = [fused.transformer.understanding(torch.arange(5))] * 2
    noise = Sampler(config, free, prefixes).latents["vision"]
    pinned = Sampler(config, replace(free, clean_frames=(0, 2)), prefixes, anchor).latents["vision"]
    assert torch.equal(pinned[:, :, [1, 3]], noise[:, :, [1, 3]])
    assert torch.equal(pinned[:, :, [0, 2]], anchor)


def test_sound_and_actions_are_drawn_after_the_picture(config: SnapshotConfig, fused: FusedPipeline) -> None:
    """So a seed gives the silent clip's initial noise, whatever else is made beside it."""
    prefixes = [fused.transformer.understanding(torch.arange(5))] * 2
    silent = Sampler(config, settings_of(), prefixes).latents
    both = settings_of(sound_shape=(64, 3), action=ActionSettings(4, 2, 9, given=False))
    drawn = Sampler(config, both, prefixes).latents
    assert torch.equal(drawn["vision"], silent["vision"])
    generator = torch.Generator().manual_seed(3)
    for shape, name in (((1, 48, 2, 4, 4), "vision"), ((64, 3), "sound"), ((4, 64), "action")):
        expected = torch.randn(shape, generator=generator)
        if name == "action":
            expected[:, 9:] = 0
        assert torch.equal(drawn[name], expected), name


@pytest.mark.parametrize("interval", [(0.0, 1000.0), (1000.0, 1000.0), (850.0, 970.0)])
def test_guidance_is_on_between_its_timesteps_alone(
    config: SnapshotConfig, fused: FusedPipeline, interval: tuple[float, float]
) -> None:
    """Against a loop written out here, which combines or does not by the timestep."""
    prefixes = [fused.transformer.understanding(torch.arange(n)) for n in (5, 8)]
    sampler = Sampler(config, settings_of(guidance_interval=interval), prefixes)
    by_hand = Sampler(config, settings_of(), prefixes)
    latents, solver = by_hand.latents["vision"], by_hand.solvers["vision"]
    generation, guided = fused.transformer.generation, 0
    for _ in range(solver.num_steps):
        timestep = solver.timestep
        cond, uncond = (
            generation([replace(branch, latents={"vision": latents}, timestep=timestep)])[0]["vision"]
            for branch in by_hand_branches(by_hand)
        )
        on = interval[0] <= timestep <= interval[1]
        guided += on
        latents = solver.step(uncond + 6.0 * (cond - uncond) if on else cond, latents, torch.Generator())
    walk(sampler, fused, 7)
    assert torch.equal(sampler.latents["vision"], latents)
    print(f"guidance on in {guided} of 7 steps for {interval}")
    assert guided == {0.0: 7, 1000.0: 0, 850.0: 3}[interval[0]]


def by_hand_branches(sampler: Sampler) -> list[Branch]:
    """Both branches, whatever step the solver is at."""
    zeros = {"vision": torch.zeros(1, 48, 2, 4, 4)}
    return [Branch(zeros, 0.0, *pair) for pair in zip(sampler._layouts, sampler._prefixes, strict=True)]


@pytest.mark.parametrize("frames", [5, 17])
def test_one_encoded_frame_equals_the_first_of_the_padded_clip(
    fused: FusedPipeline, picture: np.ndarray, frames: int
) -> None:
    anchor = fused.vae.encode(picture[None], Conditioning("image", 64, 96, 1, (0,)))
    clip = fit_image(picture, 64, 96).unsqueeze(2).expand(-1, -1, frames, -1, -1)
    with torch.inference_mode():
        whole = fused.vae._vae.encode(clip).latent_dist.mode()[:, :, :1]
    assert torch.equal(anchor, ((whole - fused.vae._mean) * fused.vae._inverse_std))


@pytest.mark.parametrize("source", [(70, 120), (31, 500), (500, 31), (64, 96), (5, 5)])
def test_images_are_covered_and_cropped_as_in_diffusers(source: tuple[int, int]) -> None:
    from diffusers.pipelines.cosmos.pipeline_cosmos3_omni import _preprocess_conditioning_image
    from PIL import Image

    image = np.random.default_rng(1).integers(0, 256, (*source, 3), dtype=np.uint8)
    assert torch.equal(fit_image(image, 64, 96), _preprocess_conditioning_image(Image.fromarray(image), 64, 96))


@pytest.mark.parametrize("size", [(64, 200), (300, 96), (64, 96)])
def test_a_clip_of_another_shape_is_cropped_and_not_squashed(size: tuple[int, int]) -> None:
    """A square in the middle stays one, whatever lies beside it."""
    rows, columns = size
    frames = np.zeros((2, *size, 3), np.uint8)
    half = min(rows / 64, columns / 96) * 16
    top, left = int(rows / 2 - half), int(columns / 2 - half)
    frames[:, top : top + int(2 * half), left : left + int(2 * half)] = 255
    pixels = prepare(frames, Conditioning("clip", 64, 96, 5, (0, 1)))
    assert pixels.shape == (1, 3, 5, 64, 96)
    bright = pixels[0, 0, 0] > 0
    assert abs(int(bright.any(0).sum()) - 32) <= 2
    assert abs(int(bright.any(1).sum()) - 32) <= 2


def test_an_unknown_backend_names_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"'flash' is not one of \['sdpa'\]"):
        get_backend("flash")
