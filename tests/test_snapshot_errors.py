"""A snapshot that is not what it says it is: one line that names the file or the key, before any work."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from cosmos3_model.config import SnapshotConfig, SnapshotError
from cosmos3_model.snapshot import write_snapshot
from cosmos3_model.transformer import load_generation, load_understanding
from cosmos3_model.vae import WanVAE
from graph.pipeline import Pipeline

INDEX = "diffusion_pytorch_model.safetensors.index.json"


@pytest.fixture
def broken(snapshot: Path, tmp_path: Path) -> Path:
    """A copy of the snapshot, to be damaged."""
    return Path(shutil.copytree(snapshot, tmp_path / "broken"))


def shard_of(root: Path, key: str) -> Path:
    index = json.loads((root / "transformer" / INDEX).read_text())
    return root / "transformer" / index["weight_map"][key]


def rewrite(file: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(file)
    change(tensors)
    file.unlink()
    save_file(tensors, file)


def drop_index_entry(root: Path, key: str) -> None:
    path = root / "transformer" / INDEX
    index = json.loads(path.read_text())
    del index["weight_map"][key]
    path.write_text(json.dumps(index))


KEY = "layers.1.self_attn.add_k_proj.weight"


def missing_shard(root: Path) -> str:
    shard_of(root, KEY).unlink()
    return "00002-of-00002.safetensors: shard is missing"


def missing_key(root: Path) -> str:
    rewrite(shard_of(root, KEY), lambda tensors: tensors.pop(KEY))
    return f"key {KEY} is missing, though the index places it there"


def missing_key_and_entry(root: Path) -> str:
    rewrite(shard_of(root, KEY), lambda tensors: tensors.pop(KEY))
    drop_index_entry(root, KEY)
    return f"key {KEY} is missing"


def extra_key(root: Path) -> str:
    rewrite(shard_of(root, KEY), lambda tensors: tensors.update({"layers.9.odd": torch.zeros(1)}))
    return "unexpected key layers.9.odd"


def wrong_shape(root: Path) -> str:
    rewrite(shard_of(root, KEY), lambda tensors: tensors.update({KEY: torch.zeros(3, 64)}))
    return rf"key {KEY} has shape \[3, 64\], expected \[32, 64\]"


def truncated(root: Path) -> str:
    file = shard_of(root, KEY)
    file.write_bytes(file.read_bytes()[:-100])
    return "00002-of-00002.safetensors: not a complete safetensors file"


def empty_file(root: Path) -> str:
    shard_of(root, KEY).write_bytes(b"")
    return "not a complete safetensors file"


def truncated_vae(root: Path) -> str:
    file = root / "vae" / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return "vae/diffusion_pytorch_model.safetensors: not a complete safetensors file"


def truncated_sound(root: Path) -> str:
    file = next((root / "sound_tokenizer").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1000])
    return "sound_tokenizer/.*not a complete safetensors file"


def no_vae(root: Path) -> str:
    shutil.rmtree(root / "vae")
    return "vae/config.json: file is missing"


def no_tokenizer(root: Path) -> str:
    shutil.rmtree(root / "text_tokenizer")
    return "text_tokenizer: no tokenizer"


def broken_json(root: Path) -> str:
    (root / "transformer" / "config.json").write_text("{")
    return "transformer/config.json: not valid JSON"


def no_index(root: Path) -> str:
    (root / "model_index.json").unlink()
    return "model_index.json: file is missing"


def odd_rope(root: Path) -> str:
    path = root / "transformer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_axes_dim": [1, 1, 1]}))
    return "rope_axes_dim"


def heads_in_words(root: Path) -> str:
    return set_config(root, "transformer", "num_attention_heads", "32")


def no_heads(root: Path) -> str:
    return set_config(root, "transformer", "num_key_value_heads", 0)


def axes_that_are_one_number(root: Path) -> str:
    return set_config(root, "transformer", "rope_axes_dim", 5)


def no_latent_statistics(root: Path) -> str:
    set_config(root, "vae", "latents_mean", None)
    return "vae/config.json: latents_mean must be a list of numbers"


def index_that_places_nothing(root: Path) -> str:
    (root / "transformer" / INDEX).write_text('{"weight_map": [1]}')
    return "index.json: weight_map must place each key in a file"


def set_config(root: Path, part: str, name: str, value: object) -> str:
    path = root / part / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    return f"transformer/config.json: {name} holds an unusable value"


FAULTS = [
    heads_in_words,
    no_heads,
    axes_that_are_one_number,
    no_latent_statistics,
    index_that_places_nothing,
    missing_shard,
    missing_key,
    missing_key_and_entry,
    extra_key,
    wrong_shape,
    truncated,
    empty_file,
    truncated_vae,
    truncated_sound,
    no_vae,
    no_tokenizer,
    broken_json,
    no_index,
    odd_rope,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_launch_refuses_it_before_ray_is_asked(fault: Any, broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unwanted() -> bool:
        raise AssertionError("Ray was started for a snapshot that cannot be used")

    monkeypatch.setattr("graph.pipeline.start_ray", unwanted)
    message = fault(broken)
    with pytest.raises(SnapshotError, match=message) as caught:
        Pipeline.launch(broken)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("fault", [missing_shard, missing_key, extra_key, wrong_shape, truncated])
@pytest.mark.parametrize("load", [load_understanding, load_generation])
def test_either_tower_refuses_it(fault: Any, load: Any, broken: Path) -> None:
    """The faulty key is the generation tower's; the other one must not load a checkpoint that is not whole either."""
    message = fault(broken)
    with pytest.raises(SnapshotError, match=message):
        load(SnapshotConfig.from_folder(broken), dtype=torch.float32)


def test_the_vae_is_loaded_strictly(broken: Path) -> None:
    file = broken / "vae" / "diffusion_pytorch_model.safetensors"
    with safe_open(file, "pt") as stream:
        key = sorted(stream.keys())[0]
    rewrite(file, lambda tensors: tensors.pop(key))
    with pytest.raises(SnapshotError, match=f"key {key} is missing"):
        WanVAE(SnapshotConfig.from_folder(broken), dtype=torch.float32)


def test_one_file_without_an_index_loads(broken: Path) -> None:
    folder = broken / "transformer"
    tensors = {key: value for file in sorted(folder.glob("*.safetensors")) for key, value in load_file(file).items()}
    for file in [*folder.glob("*.safetensors"), folder / INDEX]:
        file.unlink()
    save_file(tensors, folder / "diffusion_pytorch_model.safetensors")
    load_generation(SnapshotConfig.from_folder(broken), dtype=torch.float32)


def test_the_same_seed_writes_the_same_weights(snapshot: Path, tmp_path: Path) -> None:
    again = write_snapshot(tmp_path / "again")
    for file in sorted(snapshot.rglob("*.*")):
        assert (again / file.relative_to(snapshot)).read_bytes() == file.read_bytes(), file.name
    other = SnapshotConfig.from_folder(write_snapshot(tmp_path / "other", seed=1))
    assert other.fingerprint != SnapshotConfig.from_folder(snapshot).fingerprint


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("keep")
    with pytest.raises(FileExistsError):
        write_snapshot(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]
    for wrong in ({"family": "mega"}, {"size": "huge"}):
        with pytest.raises(ValueError, match="is not one of"):
            write_snapshot(tmp_path / "new", **wrong)
    assert not (tmp_path / "new").exists()
