"""`cosmoray info`: what is said about a snapshot is what loading it shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from test_cli import cosmoray

from cosmos3_model.config import SnapshotConfig, SnapshotError
from cosmos3_model.families import FAMILIES, lacks_sound
from cosmos3_model.sound import SoundDecoder
from cosmos3_model.transformer import load_generation, load_understanding
from cosmos3_model.vae import WanVAE
from graph.modes import modes_of
from serving.info import describe, show


def held(module: torch.nn.Module) -> tuple[int, int]:
    """Numbers and bytes of a module's weights."""
    tensors = list(module.state_dict().values())
    return sum(t.numel() for t in tensors), sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_and_memory_are_those_of_what_is_loaded(families: dict[str, Path], family: str, dtype: str) -> None:
    found = describe(families[family])
    snapshot, kind = SnapshotConfig.from_folder(families[family]), getattr(torch, dtype)
    loaded: dict[str, tuple[str, torch.nn.Module]] = {
        "prefill": ("understanding", load_understanding(snapshot, dtype=kind)),
        "denoise": ("generation", load_generation(snapshot, dtype=kind)),
        "vae_decode": ("vae", WanVAE(snapshot, dtype=kind)._vae),
    }
    if lacks_sound(snapshot) is None:
        loaded["sound_decode"] = ("sound_decoder", SoundDecoder(snapshot, dtype=kind)._tokenizer)
    for node, (part, module) in loaded.items():
        assert held(module) == (found["parameters"][part], found["memory_bytes"][dtype][node]), node
    assert set(found["memory_bytes"][dtype]) == {*loaded, "encoder", "kvstore"}
    assert (found["family"], found["modes"]) == (family, modes_of(snapshot))


def test_text_kv_takes_what_the_store_counts(snapshot: Path) -> None:
    from nodes.prefill import page_layout

    found = describe(snapshot)
    layout = page_layout(SnapshotConfig.from_folder(snapshot), pages=1024, page_size=16, dtype="bfloat16")
    assert found["kv_bytes_per_token"] * 16 * 1024 == layout.pool_bytes
    assert found["memory_bytes"]["bfloat16"]["kvstore"] == layout.pool_bytes


def test_no_weight_is_read(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors import safe_open

    from cosmos3_model import loader

    class Headers:
        """`safe_open`, where tensors cannot be had."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            self._file = safe_open(*arguments, **options)

        def __enter__(self) -> Headers:
            return self

        def __exit__(self, *error: object) -> None: ...

        def keys(self) -> Any:
            return self._file.keys()

        def get_slice(self, key: str) -> Any:
            return self._file.get_slice(key)

    monkeypatch.setattr(loader, "safe_open", Headers)
    assert describe(snapshot)["family"] == "nano"
    with pytest.raises(AttributeError, match="get_tensor"):
        load_generation(SnapshotConfig.from_folder(snapshot), dtype=torch.float32)


def test_it_is_printed_for_people_and_for_programs(families: dict[str, Path]) -> None:
    console = Console(record=True, width=120, file=None, quiet=False, highlight=False)
    with console.capture() as captured:
        show(describe(families["nano-policy-droid"]), console)
    text = captured.get()
    for part in ("nano-policy-droid", "refused", "trained without sound", "policy", "of the scene", "vae_decode"):
        assert part in text
    policy = next(line for line in text.splitlines() if line.strip().startswith("policy"))
    assert policy.split()[-4:] == ["4", "3", "5", "24"]
    run = cosmoray("info", families["edge"], "--json")
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == json.loads(json.dumps(describe(families["edge"])))


def test_a_folder_that_is_no_snapshot_is_named(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match=r"model_index.json: file is missing"):
        describe(tmp_path)
