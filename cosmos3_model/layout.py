"""Where each token of a joint sequence stands: token order, rotary positions, and which frames are noisy.

The order is text, then vision (frames, patch rows, patch columns). Text positions count 0, 1, 2, ... on all three
axes; vision starts a fixed margin after the text on the temporal axis and at 0 on the spatial ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .config import TransformerConfig


@dataclass(frozen=True)
class VisionLayout:
    """The vision part of one branch of one request; fixed for all its steps.

    Attributes:
        latent_shape: `[1, C, T, H, W]` of the latents.
        grid: Patches along frames, rows and columns; rows and columns are rounded up.
        clean_frames: Latent frames given as conditioning: no timestep embedding, velocity zero.
        positions: `[3, tokens]` rotary positions.
    """

    latent_shape: tuple[int, int, int, int, int]
    grid: tuple[int, int, int]
    clean_frames: tuple[int, ...]
    positions: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return math.prod(self.grid)

    @property
    def noisy_frames(self) -> list[int]:
        return [frame for frame in range(self.grid[0]) if frame not in self.clean_frames]


def text_positions(num_tokens: int, config: TransformerConfig) -> torch.Tensor:
    """`[3, num_tokens]`: the three axes count together from 0."""
    dtype = torch.float32 if config.enable_fps_modulation else torch.long
    return torch.arange(num_tokens, dtype=dtype).expand(3, -1)


def vision_layout(
    config: TransformerConfig,
    latent_shape: tuple[int, int, int, int, int],
    *,
    text_tokens: int,
    fps: float,
    clean_frames: tuple[int, ...] = (),
    temporal_compression: int = 4,
) -> VisionLayout:
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
    offset = text_tokens + config.unified_3d_mrope_temporal_modality_margin
    spatial_offset = 0 if config.unified_3d_mrope_reset_spatial_ids else offset
    if config.enable_fps_modulation and frames > 1:
        latents_per_second = fps / temporal_compression
        base = config.base_fps / temporal_compression
        temporal = torch.arange(frames, dtype=torch.float32) / latents_per_second * base + offset
    else:
        temporal = torch.arange(frames) + offset
    axes = (temporal, torch.arange(grid[1]) + spatial_offset, torch.arange(grid[2]) + spatial_offset)
    positions = torch.stack(torch.meshgrid(*(axis.to(temporal.dtype) for axis in axes), indexing="ij"))
    return VisionLayout(latent_shape, grid, clean_frames, positions.reshape(3, -1))


def patchify(latents: torch.Tensor, patch: int) -> torch.Tensor:
    """`[1, C, T, H, W]` to tokens `[T * rows * columns, patch * patch * C]`, odd sizes padded with zeros.

    Within a token the order is patch row, patch column, channel.
    """
    _, channels, frames, height, width = latents.shape
    latents = torch.nn.functional.pad(latents[0], (0, -width % patch, 0, -height % patch))
    rows, columns = latents.shape[2] // patch, latents.shape[3] // patch
    tokens = latents.reshape(channels, frames, rows, patch, columns, patch).permute(1, 2, 4, 3, 5, 0)
    return tokens.reshape(frames * rows * columns, patch * patch * channels)


def unpatchify(tokens: torch.Tensor, layout: VisionLayout, patch: int) -> torch.Tensor:
    """The inverse of `patchify`: tokens of `layout` back to its `[1, C, T, H, W]`, padding cropped."""
    _, channels, frames, height, width = layout.latent_shape
    _, rows, columns = layout.grid
    latents = tokens.reshape(frames, rows, columns, patch, patch, channels).permute(5, 0, 1, 3, 2, 4)
    return latents.reshape(channels, frames, rows * patch, columns * patch)[None, :, :, :height, :width]
