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

from cosmos3_model.attention import DensePrefix, get_backend
from cosmos3_model.config import SnapshotConfig
from cosmos3_model.fused import FusedPipeline
from cosmos3_model.layout import patchify, text_positions, unpatchify, vision_layout
from cosmos3_model.rotary import RotaryEmbedding
from cosmos3_model.sampling import NonFiniteError, Sampler, SamplingSettings, initial_latents
from cosmos3_model.schedule import ScheduleSettings, Solver
from cosmos3_model.towers import Branch
from cosmos3_model.transformer import load_generation, load_understanding
from cosmos3_model.vae import fit_image


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
    layout = vision_layout(config.transformer, (1, 48, frames, 5, 10), text_tokens=31, fps=fps)
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
    layout = vision_layout(config.transformer, (1, 48, 3, 5, 7), text_tokens=4, fps=24)
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
    layout = vision_layout(parts, (1, 48, 3, 5, 6), text_tokens=13, fps=24, clean_frames=(0,))
    ours = generation([Branch(latents, 700.0, layout, understanding(ids))])[0]

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
    layout = vision_layout(parts, shape5, text_tokens=text, fps=24, clean_frames=(0,) if shape[0] > 1 else ())
    return Branch(torch.randn(shape5, generator=generator), timestep, layout, DensePrefix(kv))  # type: ignore[arg-type]


def test_a_joint_forward_equals_each_branch_alone_in_any_order(config: SnapshotConfig) -> None:
    tower = load_generation(config, dtype=torch.float32)
    sizes = [(5, (1, 4, 6)), (40, (5, 3, 5)), (17, (2, 8, 2)), (1, (1, 1, 1))]
    branches = [branch_of(config, text, shape, 100.0 + 200 * i, i) for i, (text, shape) in enumerate(sizes)]
    alone = [tower([branch])[0] for branch in branches]
    worst = 0.0
    for order in itertools.permutations(range(4)):
        for place, velocity in zip(order, tower([branches[i] for i in order]), strict=True):
            worst = max(worst, (velocity - alone[place]).abs().max().item())
    print(f"joint against alone, 24 orders: max abs diff {worst:.2e}")
    assert worst <= 1e-5


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
    solver = Solver(native, ScheduleSettings(10, flow_shift=3.0, use_karras_sigmas=False))
    assert solver._scheduler.timesteps.tolist() == [999, 963, 922, 874, 817, 749, 666, 562, 428, 249]


def test_karras_schedule_of_four_steps_starts_as_published(config: SnapshotConfig) -> None:
    settings = ScheduleSettings.resolve(config, 4)
    assert settings == ScheduleSettings(4, 1.0, True)
    assert Solver(config, settings).sigmas[0] == pytest.approx(200 / 201)
    assert ScheduleSettings.resolve(config, 4, flow_shift=10.0).use_karras_sigmas is False
    assert ScheduleSettings.resolve(config, 4, flow_shift=10.0, use_karras_sigmas=True).use_karras_sigmas is True


def sampler_of(config: SnapshotConfig, fused: FusedPipeline, steps: int = 7) -> Sampler:
    settings = SamplingSettings((1, 48, 2, 4, 4), 24.0, 3, 6.0, ScheduleSettings(steps, 10.0, False))
    tower = fused.transformer.understanding
    return Sampler(config, settings, [tower(torch.arange(5)), tower(torch.arange(8))])


def walk(sampler: Sampler, fused: FusedPipeline, until: int) -> None:
    while sampler.step_index < until:
        sampler.advance([fused.transformer.generation([branch])[0] for branch in sampler.branches()])


@pytest.mark.parametrize("at", [0, 1, 2, 3, 6])
def test_a_sampler_goes_on_from_a_saved_state_bit_for_bit(
    config: SnapshotConfig, fused: FusedPipeline, at: int
) -> None:
    whole, first, second = (sampler_of(config, fused) for _ in range(3))
    walk(whole, fused, 7)
    walk(first, fused, at)
    second.load_state(first.state())
    walk(second, fused, 7)
    assert torch.equal(second.latents, whole.latents)
    assert second.done


def test_not_a_number_is_named_with_its_step(config: SnapshotConfig, fused: FusedPipeline) -> None:
    sampler = sampler_of(config, fused)
    walk(sampler, fused, 2)
    with pytest.raises(NonFiniteError, match="after step 3 of 7"):
        sampler.advance([torch.full_like(sampler.latents, float("nan"))] * 2)


def test_noise_does_not_depend_on_the_anchor_and_keeps_it_clean() -> None:
    anchor = torch.ones(1, 4, 1, 2, 2)
    noise, anchored = initial_latents((1, 4, 3, 2, 2), 5, None), initial_latents((1, 4, 3, 2, 2), 5, anchor)
    assert torch.equal(noise[:, :, 1:], anchored[:, :, 1:])
    assert torch.equal(anchored[:, :, :1], anchor)


@pytest.mark.parametrize("frames", [5, 17])
def test_one_encoded_frame_equals_the_first_of_the_padded_clip(
    fused: FusedPipeline, picture: np.ndarray, frames: int
) -> None:
    anchor = fused.vae.encode_image(picture, 64, 96)
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


def test_an_unknown_backend_names_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"'flash' is not one of \['sdpa'\]"):
        get_backend("flash")
