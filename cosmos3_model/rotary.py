"""3D multimodal rotary embedding with interleaved sections (diffusers' `Cosmos3VLTextRotaryEmbedding`)."""

from __future__ import annotations

import torch


class RotaryEmbedding:
    """Turns `[3, N]` positions (temporal, row, column) into cosine and sine tables.

    Frequencies of the row and column axes are interleaved with those of the temporal axis (T H W T H W ... T T),
    so that every axis sees high and low frequencies.
    """

    def __init__(self, head_dim: int, theta: float, axes: tuple[int, int, int]) -> None:
        self.inv_freq = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim))
        self.axes = axes

    def __call__(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine, each `[N, head_dim]` in `dtype`.

        The angles are formed in float32 with autocast off: bfloat16 cannot tell integers over 256 apart, and
        vision positions start above 15,000.
        """
        inv_freq = self.inv_freq.to(positions.device)
        with torch.autocast(device_type=positions.device.type, enabled=False):
            angles = positions.to(torch.float32)[:, :, None] * inv_freq
        mixed = angles[0].clone()
        for axis in (1, 2):
            spread = slice(axis, self.axes[axis] * 3, 3)
            mixed[:, spread] = angles[axis, :, spread]
        angles = torch.cat((mixed, mixed), dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate `[N, heads, head_dim]` by tables of `[N, head_dim]`; the halves of a head form the pairs."""
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos[:, None] + rotated * sin[:, None]
