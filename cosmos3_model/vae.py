"""The Wan VAE: one conditioning image to a clean latent frame, latents to frames. A thin wrapper over diffusers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from .config import SnapshotConfig
from .loader import check_keys, load_weights, read_header


class WanVAE:
    """`AutoencoderKLWan` with the checkpoint's latent statistics applied."""

    def __init__(self, snapshot: SnapshotConfig, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        """Load `vae/`, strictly.

        Raises:
            SnapshotError: a missing, unexpected or misshapen key.
        """
        # Imported here: diffusers costs seconds, and only the processes that hold a VAE need it.
        from diffusers import AutoencoderKLWan

        with torch.device("meta"):
            self._vae: Any = AutoencoderKLWan.from_config(snapshot.vae)
        folder = snapshot.root / "vae"
        header = read_header(folder)
        check_keys(header, {key: tuple(value.shape) for key, value in self._vae.state_dict().items()}, folder)
        load_weights(self._vae, header, device=device, dtype=dtype)
        self.device, self.dtype = device, dtype
        shape = (1, -1, 1, 1, 1)
        self._mean = torch.tensor(snapshot.vae["latents_mean"], dtype=dtype, device=device).view(shape)
        self._inverse_std = 1.0 / torch.tensor(snapshot.vae["latents_std"], dtype=dtype, device=device).view(shape)

    @torch.inference_mode()
    def encode_image(self, image: np.ndarray, height: int, width: int) -> torch.Tensor:
        """RGB8 `[h, w, 3]` of any size to one clean latent frame `[1, C, 1, H, W]`, float32 on the CPU.

        The encoder is causal in time, so the frame alone encodes to what it would as the first of a clip.
        """
        pixels = fit_image(image, height, width).unsqueeze(2).to(self.device, self.dtype)
        mode = self._vae.encode(pixels).latent_dist.mode()
        return ((mode - self._mean) * self._inverse_std).float().cpu().contiguous()

    @torch.inference_mode()
    def decode(self, latents: torch.Tensor) -> np.ndarray:
        """Latents `[1, C, T, H, W]` to RGB8 frames `[frames, height, width, 3]`."""
        z = latents.to(self.device, self.dtype) / self._inverse_std + self._mean
        video = self._vae.decode(z).sample.float()[0]
        scaled = (video * 0.5 + 0.5).clamp(0, 1).permute(1, 2, 3, 0)
        return (scaled * 255).round().to(torch.uint8).cpu().numpy()


def fit_image(image: np.ndarray, height: int, width: int) -> torch.Tensor:
    """RGB8 `[h, w, 3]` to `[1, 3, height, width]` in [-1, 1]: cover-scale, antialiased, centre crop, 8 bits."""
    pixels = torch.from_numpy(np.array(image, dtype=np.uint8)).permute(2, 0, 1)[None].float()
    source_height, source_width = pixels.shape[-2:]
    scale = max(width / source_width, height / source_height)
    size = (math.ceil(scale * source_height), math.ceil(scale * source_width))
    pixels = torch.nn.functional.interpolate(pixels, size=size, mode="bilinear", align_corners=False, antialias=True)
    top, left = round((size[0] - height) / 2), round((size[1] - width) / 2)
    return pixels[:, :, top : top + height, left : left + width].round().clamp(0, 255) / 127.5 - 1.0
