"""Prompt text to token ids; a conditioning picture, clip or scene to clean latent frames."""

from __future__ import annotations

import numpy as np
import torch

from cosmos3_model.conditioning import Conditioning
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
        picture = Conditioning("image", side, side, 1, (0,))
        self._vae.encode(np.zeros((1, side, side, 3), np.uint8), picture)

    def encode_text(self, job: Job) -> list[list[int]]:
        """Token ids of the conditional branch, then of the unconditional one if guidance needs it."""
        job.check_deadline("encode_text")
        branches = list(self._tokenizer(job.prompt))
        return branches if job.sampling.guided else branches[:1]

    def encode_vision(self, job: Job, frames: np.ndarray) -> torch.Tensor:
        """RGB8 `[F, h, w, 3]` to the latent frames that stay clean, `[1, C, t, H, W]`, float32."""
        job.check_deadline("encode_vision")
        assert job.conditioning is not None
        return self._vae.encode(frames, job.conditioning)
