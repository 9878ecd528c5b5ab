"""One request's way from noise to latents: initial noise, guidance, solver. Plain data in, plain data out.

The fused run and the denoise node both walk a `Sampler`; they differ only in where the text K/V comes from and
in how many requests share a forward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .attention import KVPrefix
from .config import SnapshotConfig
from .layout import VisionLayout, vision_layout
from .schedule import ScheduleSettings, Solver
from .towers import Branch


class NonFiniteError(ValueError):
    """NaN or infinity in a request's latents or K/V; the message names where."""


@dataclass(frozen=True)
class SamplingSettings:
    """What fixes a request's latents, apart from its text and its anchor."""

    latent_shape: tuple[int, int, int, int, int]
    fps: float
    seed: int
    guidance_scale: float
    schedule: ScheduleSettings

    @property
    def guided(self) -> bool:
        """Whether there is an unconditional branch at all."""
        return self.guidance_scale != 1.0


def initial_latents(shape: Sequence[int], seed: int, anchor: torch.Tensor | None) -> torch.Tensor:
    """Noise `[1, C, T, H, W]` float32 from a CPU generator, with the clean `anchor` frames in front.

    The CPU draws it whatever the device, so that a seed means the same everywhere.
    """
    noise = torch.randn(tuple(shape), generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.float32)
    if anchor is not None:
        noise[:, :, : anchor.shape[2]] = anchor
    return noise


class Sampler:
    """The state of one request between two steps."""

    def __init__(
        self,
        snapshot: SnapshotConfig,
        settings: SamplingSettings,
        prefixes: Sequence[KVPrefix],
        anchor: torch.Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """Start at step 0.

        Args:
            snapshot: The checkpoint.
            settings: Of the request.
            prefixes: Text K/V of the conditional branch, then of the unconditional one if `settings.guided`.
            anchor: Clean leading latent frames `[1, C, t, H, W]`, or None.
            device: Where the latents live.
        """
        if len(prefixes) != (2 if settings.guided else 1):
            raise ValueError(f"guidance {settings.guidance_scale} does not go with {len(prefixes)} prompts")
        self.settings = settings
        self.solver = Solver(snapshot, settings.schedule)
        self.latents = initial_latents(settings.latent_shape, settings.seed, anchor).to(device)
        clean = tuple(range(anchor.shape[2])) if anchor is not None else ()
        self._prefixes = list(prefixes)
        self._layouts: list[VisionLayout] = [
            vision_layout(
                snapshot.transformer,
                settings.latent_shape,
                text_tokens=prefix.num_tokens,
                fps=settings.fps,
                clean_frames=clean,
                temporal_compression=snapshot.temporal_compression,
            )
            for prefix in prefixes
        ]

    @property
    def step_index(self) -> int:
        """Steps done."""
        return self.solver.step_index

    @property
    def done(self) -> bool:
        return self.solver.step_index == self.solver.num_steps

    def branches(self) -> list[Branch]:
        """What the generation tower must run for the next step: conditional first."""
        timestep = float(self.solver.timestep)
        return [
            Branch(self.latents, timestep, layout, prefix)
            for layout, prefix in zip(self._layouts, self._prefixes, strict=True)
        ]

    def advance(self, velocities: Sequence[torch.Tensor]) -> None:
        """Take one solver step with the velocities of `branches()`, in their order.

        Raises:
            NonFiniteError: the latents after the step are not all finite.
        """
        velocity = velocities[0]
        if self.settings.guided:
            velocity = velocities[1] + self.settings.guidance_scale * (velocities[0] - velocities[1])
        self.latents = self.solver.step(velocity, self.latents)
        # A sum is finite only if every term is; one number crosses to the host instead of a mask.
        if not math.isfinite(float(self.latents.abs().sum())):
            raise NonFiniteError(f"latents are not finite after step {self.step_index} of {self.solver.num_steps}")

    def state(self) -> dict[str, Any]:
        """Latents and solver memory after the last step."""
        return {"latents": self.latents, "solver": self.solver.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from another sampler's `state`; the rest of the run is the same bit for bit."""
        self.latents = state["latents"].to(self.latents.device)
        self.solver.load_state(state["solver"])
