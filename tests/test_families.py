"""Each checkpoint family: told by its structure, written with its quirks, loaded strictly, with its own modes."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cosmos3_model.attention import get_backend
from cosmos3_model.config import SnapshotConfig, SnapshotError, TransformerConfig
from cosmos3_model.families import FAMILIES, family_of
from cosmos3_model.loader import shapes_of
from cosmos3_model.snapshot import RECIPES
from cosmos3_model.sound import SoundDecoder
from cosmos3_model.towers import GenerationTower
from cosmos3_model.transformer import check_transformer, count_parameters
from graph.defaults import DEFAULTS
from graph.modes import MODES, modes_of, refusal

CLIPS = {"text-to-image", "text-to-video", "image-to-video", "video-to-video"}
SOUND = {f"{mode}-with-sound" for mode in CLIPS - {"text-to-image"}}
ACTIONS = {"policy", "forward-dynamics", "inverse-dynamics"}
EXPECTED = {
    "nano": CLIPS | SOUND | ACTIONS,
    "super": CLIPS | SOUND | ACTIONS,
    "edge": CLIPS | ACTIONS,
    "nano-policy-droid": CLIPS | ACTIONS,
    "super-t2i-4step": CLIPS,
    "super-i2v-4step": CLIPS,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_snapshot_is_of_its_family_and_has_its_modes(families: dict[str, Path], family: str) -> None:
    snapshot = SnapshotConfig.from_folder(families[family])
    check_transformer(snapshot)
    assert family_of(snapshot) == family
    assert set(modes_of(snapshot)) == EXPECTED[family]
    for mode in set(MODES) - EXPECTED[family]:
        assert refusal(snapshot, mode)
    assert set(DEFAULTS[family]) >= EXPECTED[family] - SOUND


PUBLISHED = {
    "nano": (36, 4096, 12288, 32, 151936),
    "super": (64, 5120, 25600, 64, 151936),
    "edge": (28, 2048, 9216, 16, 131072),
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_published_dimensions_are_of_their_family(families: dict[str, Path], family: str) -> None:
    """And Nano's parameters are as many as published; no weight is allocated for it."""
    from dataclasses import replace

    layers, hidden, ffn, heads, vocab = PUBLISHED[family]
    small = SnapshotConfig.from_folder(families[family])
    sizes: dict[str, Any] = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": ffn}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128, "rope_axes_dim": (24, 20, 20)}
    snapshot = replace(small, transformer=replace(small.transformer, **sizes, **heads_of, vocab_size=vocab))
    assert family_of(snapshot) == family
    if family == "nano":
        assert round(count_parameters(snapshot)["understanding"] / 1e9, 1) == 7.6
        generation = shapes_of(lambda: GenerationTower(snapshot.transformer, get_backend("sdpa")))
        layers_alone = sum(math.prod(shape) for key, shape in generation.items() if key.startswith("layers."))
        assert round(layers_alone / 1e9, 2) == 6.95
        assert 1.0 < count_parameters(snapshot)["generation"] / layers_alone < 1.01


def test_the_layouts_have_their_quirks(families: dict[str, Path]) -> None:
    def index(family: str) -> Any:
        return json.loads((families[family] / "model_index.json").read_text())

    assert index("nano")["_class_name"] == "Cosmos3OmniDiffusersPipeline"
    assert index("super")["_class_name"] == "Cosmos3OmniPipeline"
    assert index("edge")["use_native_flow_schedule"] is True
    assert index("nano-policy-droid")["sound_tokenizer"] == [None, None]
    for family, recipe in RECIPES.items():
        folder = families[family]
        assert (folder / "sound_tokenizer").exists() == recipe.sound
        assert (folder / "modular_model_index.json").exists() == family.endswith("4step")
        assert (folder / "model_index.json").exists() != family.endswith("4step")
        names = sorted(path.name for path in (folder / "transformer").glob("*"))
        assert ("diffusion_pytorch_model.safetensors.index.json" in names) == recipe.sharded
    for family in ("super-t2i-4step", "super-i2v-4step"):
        sigmas = SnapshotConfig.from_folder(families[family]).distilled_sigmas
        assert sigmas == (1.0, 0.9375, 0.8333333333333334, 0.625)


def test_a_modular_index_beside_the_usual_one_makes_no_four_steps(families: dict[str, Path], tmp_path: Path) -> None:
    """Published checkpoints have come to carry both."""
    folder = Path(shutil.copytree(families["nano"], tmp_path / "both"))
    (folder / "modular_model_index.json").write_text('{"_class_name": "Cosmos3OmniModularPipeline"}')
    snapshot = SnapshotConfig.from_folder(folder)
    assert snapshot.distilled_sigmas is None
    assert family_of(snapshot) == "nano"
    (folder / "model_index.json").unlink()
    (folder / "modular_model_index.json").unlink()
    with pytest.raises(SnapshotError, match=r"model_index.json: file is missing.* and so is modular_model_index.json"):
        SnapshotConfig.from_folder(folder)


@pytest.mark.parametrize("sigmas", ['"four"', '["a"]', "{}"])
def test_sigmas_that_are_no_numbers_are_named(families: dict[str, Path], tmp_path: Path, sigmas: str) -> None:
    folder = Path(shutil.copytree(families["super-i2v-4step"], tmp_path / "broken"))
    (folder / "modular_model_index.json").write_text(f'{{"distilled_sigmas": {sigmas}}}')
    if sigmas == "{}":
        assert SnapshotConfig.from_folder(folder).distilled_sigmas is None
        return
    with pytest.raises(SnapshotError, match=r"modular_model_index.json: distilled_sigmas must be a list of numbers"):
        SnapshotConfig.from_folder(folder)


def test_each_family_speaks_another_transformer(families: dict[str, Path]) -> None:
    edge = SnapshotConfig.from_folder(families["edge"]).transformer
    assert (edge.hidden_act, edge.qk_norm_for_text, edge.use_und_k_norm_for_gen) == ("relu2", False, True)
    assert (edge.rope_theta, edge.rms_norm_eps) == (1e8, 1e-5)
    nano = SnapshotConfig.from_folder(families["nano"]).transformer
    assert TransformerConfig().rope_theta == nano.rope_theta == 5e6


def broken_sound(source: Path, target: Path, change: Any) -> SnapshotConfig:
    folder = Path(shutil.copytree(source, target))
    file = next((folder / "sound_tokenizer").glob("*.safetensors"))
    tensors = load_file(file)
    change(tensors)
    file.unlink()
    save_file(tensors, file)
    return SnapshotConfig.from_folder(folder)


def test_a_sound_tokenizer_is_loaded_strictly_but_for_its_encoder(snapshot: Path, tmp_path: Path) -> None:
    def without(prefix: str) -> Any:
        def change(tensors: dict[str, torch.Tensor]) -> None:
            for key in [key for key in tensors if key.startswith(prefix)]:
                del tensors[key]

        return change

    whole = SoundDecoder(SnapshotConfig.from_folder(snapshot), dtype=torch.float32)
    bare = broken_sound(snapshot, tmp_path / "bare", without("encoder."))
    latents = torch.randn(64, 3)
    samples = whole.decode(latents)
    assert samples.shape == (2, 3 * 1920)
    assert (samples.abs() < 1).float().mean() > 0.9, "nearly all of it is clipped, and shows nothing"
    assert torch.equal(samples, SoundDecoder(bare, dtype=torch.float32).decode(latents))
    with pytest.raises(SnapshotError, match=r"key decoder.conv1.* is missing"):
        SoundDecoder(broken_sound(snapshot, tmp_path / "less", without("decoder.conv1.")), dtype=torch.float32)
    more = broken_sound(snapshot, tmp_path / "more", lambda tensors: tensors.update(extra=torch.zeros(1)))
    with pytest.raises(SnapshotError, match="unexpected key extra"):
        SoundDecoder(more, dtype=torch.float32)
    config = tmp_path / "bare" / "sound_tokenizer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dec_type": "harp"}))
    with pytest.raises(SnapshotError, match=r"sound_tokenizer/config.json: .*harp"):
        SoundDecoder(SnapshotConfig.from_folder(tmp_path / "bare"), dtype=torch.float32)
