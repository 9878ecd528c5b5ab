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
from .config import SnapshotConfig
from .prompts import PromptSettings, PromptTokenizer
from .sampling import Sampler, SamplingSettings
from .schedule import ScheduleSettings
from .transformer import FusedTransformer, load_generation, load_understanding
from .vae import WanVAE


@dataclass(frozen=True)
class FusedOutput:
    """Everything that a stage of the pipeline can be compared with.

    Attributes:
        input_ids: Token ids of each branch, conditional first.
        prefixes: Text K/V of each branch, as of the last step.
        anchor: The conditioning image's latent frame `[1, C, 1, H, W]`, or None.
        latents: `[1, C, T, H, W]` float32.
        frames: RGB8 `[frames, height, width, 3]`.
    """

    input_ids: list[list[int]]
    prefixes: list[DensePrefix]
    anchor: torch.Tensor | None
    latents: torch.Tensor
    frames: np.ndarray


class FusedPipeline:
    """Tokenizer, both towers and the VAE of one snapshot in this process."""

    def __init__(
        self, root: str | Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        self.snapshot = SnapshotConfig.from_folder(root)
        self.device = device
        self.tokenizer = PromptTokenizer(self.snapshot)
        self.vae = WanVAE(self.snapshot, dtype=dtype, device=device)
        self.transformer = FusedTransformer(
            load_understanding(self.snapshot, dtype=dtype, device=device),
            load_generation(self.snapshot, dtype=dtype, device=device),
        )

    def __call__(
        self,
        prompt: str,
        *,
        negative_prompt: str = "",
        image: np.ndarray | None = None,
        num_frames: int = 189,
        height: int = 720,
        width: int = 1280,
        fps: float = 24.0,
        num_inference_steps: int = 35,
        guidance_scale: float = 6.0,
        seed: int = 0,
        flow_shift: float | None = None,
        use_karras_sigmas: bool | None = None,
        use_system_prompt: bool | None = None,
        add_resolution_template: bool = True,
        add_duration_template: bool = True,
        on_step: Callable[[int, torch.Tensor], None] | None = None,
    ) -> FusedOutput:
        """Generate one clip (one frame: an image). Argument names follow diffusers' `Cosmos3OmniPipeline`.

        `on_step` is called after each step with its index and the latents.
        """
        if use_system_prompt is None:
            use_system_prompt = self.snapshot.default_use_system_prompt
        ids = self.tokenizer(
            PromptSettings(
                prompt,
                negative_prompt,
                num_frames,
                height,
                width,
                fps,
                use_system_prompt,
                add_resolution_template,
                add_duration_template,
            )
        )
        settings = SamplingSettings(
            self.snapshot.latent_shape(num_frames, height, width),
            fps,
            seed,
            guidance_scale,
            ScheduleSettings.resolve(self.snapshot, num_inference_steps, flow_shift, use_karras_sigmas),
        )
        branch_ids = list(ids) if settings.guided else [ids[0]]
        anchor = self.vae.encode_image(image, height, width) if image is not None else None
        tensors = [torch.tensor(tokens, device=self.device) for tokens in branch_ids]
        prefixes = [self.transformer.understanding(tokens) for tokens in tensors]
        sampler = Sampler(self.snapshot, settings, prefixes, anchor, self.device)
        while not sampler.done:
            velocities = [
                self.transformer(tokens, branch) for tokens, branch in zip(tensors, sampler.branches(), strict=True)
            ]
            sampler.advance(velocities)
            if on_step:
                on_step(sampler.step_index - 1, sampler.latents)
        return FusedOutput(branch_ids, prefixes, anchor, sampler.latents, self.vae.decode(sampler.latents))
