"""The Wan VAE: conditioning frames to clean latent frames, latents to frames. A thin wrapper over diffusers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .conditioning import Conditioning, prepare
from .config import SnapshotConfig
from .loader import check_keys, load_weights, read_header
from .sampling import NonFiniteError


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
    def encode(self, frames: np.ndarray, conditioning: Conditioning) -> torch.Tensor:
        """RGB8 `[F, h, w, 3]` of any size to the clean latent frames `[1, C, t, H, W]`, float32 on the CPU.

        The encoder is causal in time, so the frames encode to what they would as the beginning of a longer clip.
        """
        pixels = prepare(frames, conditioning).to(self.device, self.dtype)
        mode = self._vae.encode(pixels).latent_dist.mode()
        latents = ((mode - self._mean) * self._inverse_std).float().cpu()[:, :, list(conditioning.latent_frames)]
        if conditioning.latent_content is not None:
            rows, columns = conditioning.latent_content
            latents = latents[..., :rows, :columns]
        return latents.contiguous()

    @torch.inference_mode()
    def decode(self, latents: torch.Tensor) -> np.ndarray:
        """Latents `[1, C, T, H, W]` to RGB8 frames `[frames, height, width, 3]`.

        Raises:
            NonFiniteError: the decoder gave NaN or infinity, which 8 bits would show as black or white.
        """
        z = latents.to(self.device, self.dtype) / self._inverse_std + self._mean
        video = self._vae.decode(z).sample.float()[0]
        if not video.isfinite().all():
            raise NonFiniteError(f"the VAE decoder's frames are not finite in {self.dtype}")
        scaled = (video * 0.5 + 0.5).clamp(0, 1).permute(1, 2, 3, 0)
        return (scaled * 255).round().to(torch.uint8).cpu().numpy()
