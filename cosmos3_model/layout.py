"""Where each token of a joint sequence stands: token order, rotary positions, and which frames are noisy.

The order is text, vision (frames, patch rows, patch columns), sound, action. Text positions count 0, 1, 2, ... on all
three axes; the other three start together, a fixed margin after the text on the temporal axis and at 0 on the
spatial ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from .config import TransformerConfig

Modality = Literal["vision", "sound", "action"]
# Latents, or their velocity, of each modality that a request has: vision `[1, C, T, H, W]`, sound `[C, T]`, action
# `[T, D]`.
Latents = dict[Modality, torch.Tensor]


@dataclass(frozen=True)
class Segment:
    """The tokens of one modality in one branch of one request; fixed for all its steps.

    Attributes:
        shape: Of the latents (`Latents`).
        grid: Tokens along time, rows and columns. Vision: patches, rows and columns rounded up; else one row and
            column.
        positions: `[3, tokens]` rotary positions.
        clean_frames: Frames given as conditioning: no timestep embedding, velocity zero.
        domain_id: Row of the action projections; of the action segment only.
    """

    shape: tuple[int, ...]
    grid: tuple[int, int, int]
    positions: torch.Tensor
    clean_frames: tuple[int, ...] = ()
    domain_id: int | None = None

    @property
    def num_tokens(self) -> int:
        return math.prod(self.grid)

    @property
    def noisy_frames(self) -> list[int]:
        return [frame for frame in range(self.grid[0]) if frame not in self.clean_frames]


@dataclass(frozen=True)
class Layout:
    """All generation tokens of one branch, in the order of the segments."""

    segments: Mapping[Modality, Segment]

    @property
    def num_tokens(self) -> int:
        return sum(segment.num_tokens for segment in self.segments.values())

    @cached_property
    def positions(self) -> torch.Tensor:
        """`[3, num_tokens]`."""
        return torch.cat([segment.positions for segment in self.segments.values()], dim=1)


def text_positions(num_tokens: int, config: TransformerConfig) -> torch.Tensor:
    """`[3, num_tokens]`: the three axes count together from 0."""
    dtype = torch.float32 if config.enable_fps_modulation else torch.long
    return torch.arange(num_tokens, dtype=dtype).expand(3, -1)


def vision_segment(
    config: TransformerConfig,
    latent_shape: tuple[int, int, int, int, int],
    *,
    text_tokens: int,
    fps: float,
    clean_frames: tuple[int, ...] = (),
    temporal_compression: int = 4,
) -> Segment:
    """Lay out the vision tokens that follow `text_tokens` tokens of text.

    Args:
        config: Of the transformer.
        latent_shape: `[1, C, T, H, W]`.
        text_tokens: Length of the branch's prompt; it shifts the temporal positions.
        fps: Frame rate asked for. With more than one latent frame it scales the temporal positions, in float32.
        clean_frames: Latent frames that are conditioning.
        temporal_compression: Frames per latent frame.
    """
    _, _, frames, rows, columns = latent_shape
    patch = config.latent_patch_size
    grid = (frames, math.ceil(rows / patch), math.ceil(columns / patch))
    return Segment(latent_shape, grid, _positions(config, grid, text_tokens, fps, temporal_compression), clean_frames)


def sound_segment(config: TransformerConfig, shape: tuple[int, int], *, text_tokens: int) -> Segment:
    """Lay out sound latents `[C, T]`, at the rate that the checkpoint names. All of them are noisy."""
    grid = (shape[1], 1, 1)
    return Segment(shape, grid, _positions(config, grid, text_tokens, config.sound_latent_fps, 1))


def action_segment(
    config: TransformerConfig,
    num_actions: int,
    *,
    text_tokens: int,
    fps: float,
    domain_id: int,
    given: bool,
    temporal_compression: int = 4,
) -> Segment:
    """Lay out actions `[T, D]`: one a pixel frame, from the second on; all clean if they are `given`."""
    grid = (num_actions, 1, 1)
    positions = _positions(config, grid, text_tokens, fps, 1, base_compression=temporal_compression, start=1)
    clean = tuple(range(num_actions)) if given else ()
    return Segment((num_actions, config.action_dim or 0), grid, positions, clean, domain_id)


def _positions(
    config: TransformerConfig,
    grid: tuple[int, int, int],
    text_tokens: int,
    fps: float,
    compression: int,
    *,
    base_compression: int | None = None,
    start: int = 0,
) -> torch.Tensor:
    """`[3, tokens]`: integers for one frame, else scaled by the frame rate in float32."""
    frames, rows, columns = grid
    offset = text_tokens + config.unified_3d_mrope_temporal_modality_margin
    spatial_offset = 0 if config.unified_3d_mrope_reset_spatial_ids else offset
    if config.enable_fps_modulation and frames > 1:
        per_second = fps / compression
        base = config.base_fps / (base_compression or compression)
        temporal = (torch.arange(frames, dtype=torch.float32) + start) / per_second * base + offset
    else:
        temporal = torch.arange(frames) + offset + start
    axes = (temporal, torch.arange(rows) + spatial_offset, torch.arange(columns) + spatial_offset)
    positions = torch.stack(torch.meshgrid(*(axis.to(temporal.dtype) for axis in axes), indexing="ij"))
    return positions.reshape(3, -1)


def patchify(latents: torch.Tensor, patch: int) -> torch.Tensor:
    """`[1, C, T, H, W]` to tokens `[T * rows * columns, patch * patch * C]`, odd sizes padded with zeros.

    Within a token the order is patch row, patch column, channel.
    """
    _, channels, frames, height, width = latents.shape
    latents = torch.nn.functional.pad(latents[0], (0, -width % patch, 0, -height % patch))
    rows, columns = latents.shape[2] // patch, latents.shape[3] // patch
    tokens = latents.reshape(channels, frames, rows, patch, columns, patch).permute(1, 2, 4, 3, 5, 0)
    return tokens.reshape(frames * rows * columns, patch * patch * channels)


def unpatchify(tokens: torch.Tensor, segment: Segment, patch: int) -> torch.Tensor:
    """The inverse of `patchify`: tokens of a vision `segment` back to its `[1, C, T, H, W]`, padding cropped."""
    _, channels, frames, height, width = segment.shape
    _, rows, columns = segment.grid
    latents = tokens.reshape(frames, rows, columns, patch, patch, channels).permute(5, 0, 1, 3, 2, 4)
    return latents.reshape(channels, frames, rows * patch, columns * patch)[None, :, :, :height, :width]
