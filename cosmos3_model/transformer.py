"""Builds the towers from a snapshot, and composes both into the fused forward that runs text at every step."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TypeVar

import torch

from .attention import DensePrefix, get_backend
from .config import SnapshotConfig
from .layout import Latents
from .loader import check_keys, load_weights, read_header, shapes_of
from .towers import UNUSED_KEYS, Branch, GenerationTower, UnderstandingTower

KEEP_FLOAT32 = ("time_embedder.",)
Tower = TypeVar("Tower", UnderstandingTower, GenerationTower)


def expected_shapes(snapshot: SnapshotConfig) -> dict[str, tuple[int, ...]]:
    """Every key of the transformer's checkpoint and its shape, for both towers and what neither uses."""
    config, backend = snapshot.transformer, get_backend("sdpa")
    shapes = shapes_of(lambda: UnderstandingTower(config, backend))
    shapes |= shapes_of(lambda: GenerationTower(config, backend))
    sizes = {"lm_head.weight": (config.vocab_size, config.hidden_size), "norm.weight": (config.hidden_size,)}
    return shapes | {key: sizes[key] for key in UNUSED_KEYS}


def check_transformer(snapshot: SnapshotConfig) -> None:
    """Compare the checkpoint's headers with the config, reading no weight.

    Raises:
        SnapshotError: the first missing, unexpected or misshapen key, or an incomplete file.
    """
    folder = snapshot.root / "transformer"
    check_keys(read_header(folder), expected_shapes(snapshot), folder)


def count_parameters(snapshot: SnapshotConfig) -> dict[str, int]:
    """Numbers in each tower, in what neither uses, and in the part of generation that stays in float32."""
    config, backend = snapshot.transformer, get_backend("sdpa")
    generation = shapes_of(lambda: GenerationTower(config, backend))
    parts = {
        "understanding": shapes_of(lambda: UnderstandingTower(config, backend)),
        "generation": generation,
        "generation_float32": {key: shape for key, shape in generation.items() if key.startswith(KEEP_FLOAT32)},
    }
    parts["unused"] = {key: shape for key, shape in expected_shapes(snapshot).items() if key in UNUSED_KEYS}
    return {name: sum(math.prod(shape) for shape in shapes.values()) for name, shapes in parts.items()}


def load_understanding(
    snapshot: SnapshotConfig, *, dtype: torch.dtype, device: torch.device | str = "cpu", attention: str = "sdpa"
) -> UnderstandingTower:
    """The understanding tower with its weights; generation weights are not read."""
    return _load(UnderstandingTower, snapshot, dtype, device, attention)


def load_generation(
    snapshot: SnapshotConfig, *, dtype: torch.dtype, device: torch.device | str = "cpu", attention: str = "sdpa"
) -> GenerationTower:
    """The generation tower with its weights; understanding weights are not read."""
    return _load(GenerationTower, snapshot, dtype, device, attention)


def _load(
    kind: type[Tower], snapshot: SnapshotConfig, dtype: torch.dtype, device: torch.device | str, attention: str
) -> Tower:
    check_transformer(snapshot)
    with torch.device("meta"):
        tower = kind(snapshot.transformer, get_backend(attention))
    header = read_header(snapshot.root / "transformer")
    load_weights(tower, header, device=device, dtype=dtype, keep_float32=KEEP_FLOAT32)
    return tower


class FusedTransformer:
    """Both towers in one process, nothing cached: the reference that cached runs must equal."""

    def __init__(self, understanding: UnderstandingTower, generation: GenerationTower) -> None:
        self.understanding = understanding
        self.generation = generation

    def __call__(self, input_ids: torch.Tensor, branch: Branch) -> Latents:
        """Velocity of one branch by modality; its prefix is computed here, whatever it was before."""
        prefix: DensePrefix = self.understanding(input_ids)
        return self.generation([replace(branch, prefix=prefix)])[0]
