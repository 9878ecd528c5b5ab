"""Sound latents to samples, beside the VAE; and the samples into the clip's file when both are done."""

from __future__ import annotations

import numpy as np
import torch

from cosmos3_model.sound import SoundDecoder

from .base import Node
from .job import Job, NodeSettings
from .media import mux_sound


class SoundDecodeNode(Node):
    kind = "sound_decode"

    def __init__(self, settings: NodeSettings) -> None:
        super().__init__(settings)
        self._decoder = SoundDecoder(self.snapshot, dtype=settings.torch_dtype, device=settings.device)

    def warm_up(self) -> None:
        self._decoder.decode(torch.zeros(self.snapshot.sound_shape(1, 24.0)))

    def decode(self, job: Job, latents: torch.Tensor) -> np.ndarray:
        """Latents `[C, T]` to samples `[channels, N]` float32 in [-1, 1]; N may reach beyond the clip's end."""
        job.check_deadline("sound_decode")
        return self._decoder.decode(latents).numpy()

    def mux(self, job: Job, media: bytes, sound: np.ndarray) -> bytes:
        """An MP4 file with the sound in it, as long as the clip."""
        job.check_deadline("mux")
        rate = self.snapshot.sampling_rate
        return mux_sound(media, sound[:, : round(job.prompt.num_frames / job.prompt.fps * rate)], rate)
