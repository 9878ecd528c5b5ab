"""Prompt text to token ids; a conditioning image to a clean latent frame."""

from __future__ import annotations

import numpy as np
import torch

from cosmos3_model.prompts import PromptTokenizer
from cosmos3_model.vae import WanVAE

from .base import Node
from .job import Job, NodeSettings


class EncoderNode(Node):
    kind = "encoder"

    def __init__(self, settings: NodeSettings) -> None:
        super().__init__(settings)
        self._tokenizer = PromptTokenizer(self.snapshot)
        self._vae = WanVAE(self.snapshot, dtype=settings.torch_dtype, device=settings.device)

    def warm_up(self) -> None:
        side = 2 * self.snapshot.spatial_compression
        self._vae.encode_image(np.zeros((side, side, 3), np.uint8), side, side)

    def encode_text(self, job: Job) -> list[list[int]]:
        """Token ids of the conditional branch, then of the unconditional one if guidance needs it."""
        job.check_deadline("encode_text")
        branches = list(self._tokenizer(job.prompt))
        return branches if job.sampling.guided else branches[:1]

    def encode_image(self, job: Job, image: np.ndarray) -> torch.Tensor:
        """RGB8 `[h, w, 3]` to its latent frame `[1, C, 1, H, W]`, float32."""
        job.check_deadline("encode_image")
        return self._vae.encode_image(image, job.prompt.height, job.prompt.width)
