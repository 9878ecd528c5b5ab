"""One request's way from noise to latents: initial noise, guidance, solvers. Plain data in, plain data out.

The fused run and the denoise node both walk a `Sampler`; they differ only in where the text K/V comes from and
in how many requests share a forward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .actions import ActionSettings
from .attention import KVPrefix
from .config import SnapshotConfig
from .layout import Latents, Layout, Modality, Segment, action_segment, sound_segment, vision_segment
from .schedule import ScheduleSettings, solver_for
from .towers import Branch


class NonFiniteError(ValueError):
    """NaN or infinity in a request's latents, K/V, frames or sound; the message names where."""


@dataclass(frozen=True)
class SamplingSettings:
    """What fixes a request's latents, apart from its text and what it is conditioned on.

    Attributes:
        latent_shape: `[1, C, T, H, W]` of the vision latents.
        fps: Frame rate of the clip.
        seed: Of all noise of the request.
        guidance_scale: 1 runs no unconditional branch.
        schedule: Sigmas and solver, the same for every modality.
        guidance_interval: Timesteps from and to which guidance is on; None for all.
        clean_frames: Latent frames that are conditioning.
        sound_shape: `[C, T]` of the sound latents, or None for a silent clip.
        action: The action tokens, or None.
    """

    latent_shape: tuple[int, int, int, int, int]
    fps: float
    seed: int
    guidance_scale: float
    schedule: ScheduleSettings
    guidance_interval: tuple[float, float] | None = None
    clean_frames: tuple[int, ...] = ()
    sound_shape: tuple[int, int] | None = None
    action: ActionSettings | None = None

    @property
    def guided(self) -> bool:
        """Whether there is an unconditional branch at all."""
        return self.guidance_scale != 1.0


class Sampler:
    """The state of one request between two steps."""

    def __init__(
        self,
        snapshot: SnapshotConfig,
        settings: SamplingSettings,
        prefixes: Sequence[KVPrefix],
        anchor: torch.Tensor | None = None,
        actions: torch.Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """Start at step 0.

        Args:
            snapshot: The checkpoint.
            settings: Of the request.
            prefixes: Text K/V of the conditional branch, then of the unconditional one if `settings.guided`.
            anchor: The latent frames `settings.clean_frames`, `[1, C, t, H, W]`, or None if there are none.
            actions: `[chunk_size, width]` if they are given, else None.
            device: Where the latents live.
        """
        if len(prefixes) != (2 if settings.guided else 1):
            raise ValueError(f"guidance {settings.guidance_scale} does not go with {len(prefixes)} prompts")
        self.settings = settings
        self._device = device
        self._prefixes = list(prefixes)
        self._layouts = [_layout(snapshot, settings, prefix.num_tokens) for prefix in prefixes]
        self._generator = torch.Generator("cpu").manual_seed(settings.seed)
        noise = {name: _noise(segment.shape, self._generator) for name, segment in self._segments.items()}
        self.latents: Latents = {name: latents.to(device) for name, latents in noise.items()}
        self._anchor = anchor.to(device, torch.float32) if anchor is not None else None
        self._pin_clean_frames()
        if settings.action is not None:
            if actions is not None:
                self.latents["action"][:, : settings.action.width] = actions.to(device, torch.float32)
            self.latents["action"][:, settings.action.width :] = 0
        given: set[Modality] = {"action"} if settings.action is not None and settings.action.given else set()
        self.solvers = {name: solver_for(snapshot, settings.schedule) for name in self.latents if name not in given}

    @property
    def _segments(self) -> dict[Modality, Segment]:
        """Shapes do not depend on the branch."""
        return dict(self._layouts[0].segments)

    @property
    def step_index(self) -> int:
        """Steps done."""
        return self.solvers["vision"].step_index

    @property
    def num_steps(self) -> int:
        return self.solvers["vision"].num_steps

    @property
    def sigmas(self) -> list[float]:
        """All sigmas, the final one included."""
        return self.solvers["vision"].sigmas

    @property
    def done(self) -> bool:
        return self.step_index == self.num_steps

    def branches(self) -> list[Branch]:
        """What the generation tower must run for the next step: conditional first, alone where guidance is off."""
        timestep = self.solvers["vision"].timestep
        branches = [
            Branch(self.latents, timestep, layout, prefix)
            for layout, prefix in zip(self._layouts, self._prefixes, strict=True)
        ]
        interval = self.settings.guidance_interval
        on = interval is None or interval[0] <= timestep <= interval[1]
        return branches if on else branches[:1]

    def advance(self, velocities: Sequence[Latents]) -> None:
        """Take one solver step with the velocities of `branches()`, in their order.

        Raises:
            NonFiniteError: the latents after the step are not all finite.
        """
        for name, solver in self.solvers.items():
            velocity = velocities[0][name]
            if len(velocities) == 2:
                velocity = velocities[1][name] + self.settings.guidance_scale * (velocity - velocities[1][name])
            self.latents[name] = solver.step(velocity, self.latents[name], self._generator)
        if self.settings.schedule.sigmas is not None:
            self._pin_clean_frames()  # these steps add noise everywhere
        self._clear_unused_channels()
        # A sum is finite only if every term is; one number crosses to the host instead of a mask.
        if not math.isfinite(float(sum(latents.abs().sum() for latents in self.latents.values()))):
            raise NonFiniteError(f"latents are not finite after step {self.step_index} of {self.num_steps}")

    def results(self) -> Latents:
        """The latents of each modality that was made; of actions the numbers that mean something."""
        results: Latents = {name: self.latents[name] for name in self.solvers}
        if "action" in results and self.settings.action is not None:
            results["action"] = results["action"][:, : self.settings.action.width].contiguous()
        return results

    def state(self) -> dict[str, Any]:
        """Latents and solver memory after the last step."""
        return {
            "latents": dict(self.latents),
            "solvers": {name: solver.state() for name, solver in self.solvers.items()},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from another sampler's `state`; the rest of the run is the same bit for bit."""
        # To a tensor of its own: what arrives may be a read-only view of somebody else's memory.
        self.latents = {name: latents.to(self._device, copy=True) for name, latents in state["latents"].items()}
        for name, solver in self.solvers.items():
            solver.load_state(state["solvers"][name])
            solver.skip_noise(self._segments[name].shape, solver.step_index, self._generator)

    def _pin_clean_frames(self) -> None:
        if self._anchor is not None:
            self.latents["vision"][:, :, list(self.settings.clean_frames)] = self._anchor

    def _clear_unused_channels(self) -> None:
        """Channels beyond an action's width are zero at every step; solvers never mix channels."""
        if self.settings.action is not None:
            self.latents["action"][:, self.settings.action.width :] = 0


def _noise(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Float32 noise drawn on the CPU whatever the device, so that a seed means the same everywhere."""
    return torch.randn(shape, generator=generator, dtype=torch.float32)


def _layout(snapshot: SnapshotConfig, settings: SamplingSettings, text_tokens: int) -> Layout:
    """The segments of a branch in the order in which their noise is drawn, too."""
    config, compression = snapshot.transformer, snapshot.temporal_compression
    segments: dict[Modality, Segment] = {
        "vision": vision_segment(
            config,
            settings.latent_shape,
            text_tokens=text_tokens,
            fps=settings.fps,
            clean_frames=settings.clean_frames,
            temporal_compression=compression,
        )
    }
    if settings.sound_shape is not None:
        segments["sound"] = sound_segment(config, settings.sound_shape, text_tokens=text_tokens)
    if settings.action is not None:
        segments["action"] = action_segment(
            config,
            settings.action.chunk_size,
            text_tokens=text_tokens,
            fps=settings.fps,
            domain_id=settings.action.domain_id,
            given=settings.action.given,
            temporal_compression=compression,
        )
    return Layout(segments)
