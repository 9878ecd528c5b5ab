"""The single-process reference: everything in one place, both towers at every step, nothing cached or batched.

Slow and plain on purpose. The distributed pipeline is judged by it, and it is judged by diffusers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from .attention import DensePrefix
from .conditioning import Conditioning
from .config import SnapshotConfig
from .families import lacks_sound
from .prompts import PromptSettings, PromptTokenizer
from .sampling import Sampler, SamplingSettings
from .sound import SoundDecoder
from .transformer import FusedTransformer, load_generation, load_understanding
from .vae import WanVAE


@dataclass(frozen=True)
class FusedOutput:
    """Everything that a stage of the pipeline can be compared with.

    Attributes:
        input_ids: Token ids of each branch, conditional first.
        prefixes: Text K/V of each branch, as of the last step.
        anchor: The clean latent frames `[1, C, t, H, W]`, or None.
        latents: Vision `[1, C, T, H, W]`, float32.
        frames: RGB8 `[frames, height, width, 3]`.
        sound_latents: `[C, T]`, or None.
        sound: Samples `[channels, N]` in [-1, 1], or None.
        actions: `[chunk_size, width]`, or None.
    """

    input_ids: list[list[int]]
    prefixes: list[DensePrefix]
    anchor: torch.Tensor | None
    latents: torch.Tensor
    frames: np.ndarray
    sound_latents: torch.Tensor | None = None
    sound: torch.Tensor | None = None
    actions: torch.Tensor | None = None


class FusedPipeline:
    """Tokenizer, both towers, the VAE and the sound decoder of one snapshot in this process."""

    def __init__(
        self, root: str | Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        self.snapshot = SnapshotConfig.from_folder(root)
        self.device = device
        self.tokenizer = PromptTokenizer(self.snapshot)
        self.vae = WanVAE(self.snapshot, dtype=dtype, device=device)
        self.sound = None if lacks_sound(self.snapshot) else SoundDecoder(self.snapshot, dtype=dtype, device=device)
        self.transformer = FusedTransformer(
            load_understanding(self.snapshot, dtype=dtype, device=device),
            load_generation(self.snapshot, dtype=dtype, device=device),
        )

    def __call__(
        self,
        prompt: PromptSettings,
        sampling: SamplingSettings,
        *,
        conditioning: Conditioning | None = None,
        frames: np.ndarray | None = None,
        actions: np.ndarray | None = None,
        on_step: Callable[[int, torch.Tensor], None] | None = None,
    ) -> FusedOutput:
        """Generate one clip (one frame: an image) from settings with nothing left open.

        Args:
            prompt: Texts and templates.
            sampling: Shapes, seed, guidance, schedule.
            conditioning: What becomes of `frames`.
            frames: RGB8 `[F, h, w, 3]` to start from, or None.
            actions: `[chunk_size, width]` to follow, or None.
            on_step: Called after each step with its index and the vision latents.
        """
        ids = self.tokenizer(prompt)
        branch_ids = list(ids) if sampling.guided else [ids[0]]
        anchor = self.vae.encode(frames, conditioning) if frames is not None and conditioning is not None else None
        tensors = [torch.tensor(tokens, device=self.device) for tokens in branch_ids]
        prefixes = [self.transformer.understanding(tokens) for tokens in tensors]
        given = torch.from_numpy(actions) if actions is not None else None
        sampler = Sampler(self.snapshot, sampling, prefixes, anchor, given, self.device)
        while not sampler.done:
            branches = sampler.branches()
            velocities = [
                self.transformer(tokens, branch)
                for tokens, branch in zip(tensors[: len(branches)], branches, strict=True)
            ]
            sampler.advance(velocities)
            if on_step:
                on_step(sampler.step_index - 1, sampler.latents["vision"])
        results = sampler.results()
        sound = results.get("sound")
        return FusedOutput(
            branch_ids,
            prefixes,
            anchor,
            results["vision"],
            self.vae.decode(results["vision"]),
            sound,
            self.sound.decode(sound) if sound is not None and self.sound is not None else None,
            results.get("action"),
        )
