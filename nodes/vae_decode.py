"""Latents to frames to a finished file: what leaves this node is already what the user asked for."""

from __future__ import annotations

from typing import Any

import torch

from cosmos3_model.vae import WanVAE

from .base import Node
from .job import Job, NodeSettings
from .media import encode_frames


class VAEDecodeNode(Node):
    kind = "vae_decode"

    def __init__(self, settings: NodeSettings) -> None:
        super().__init__(settings)
        self._vae = WanVAE(self.snapshot, dtype=settings.torch_dtype, device=settings.device)

    def warm_up(self) -> None:
        self._vae.decode(torch.zeros(self.snapshot.latent_shape(1, 64, 64)))

    def decode(self, job: Job, latents: torch.Tensor) -> Any:
        """Latents `[1, C, T, H, W]` in the form that the job asks for.

        Returns:
            The latents themselves for `latent`, RGB8 frames `[T, H, W, 3]` for `np`, a list of PNG files for
            `png_frames`, else the bytes of one file.
        """
        job.check_deadline("vae_decode")
        if job.output == "latent":
            return latents
        return encode_frames(self._vae.decode(latents), job.output, job.prompt.fps)
