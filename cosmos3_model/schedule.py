"""Which sigmas a request denoises along, and the solvers that walk them (diffusers' UniPC and Euler schedulers).

One `Solver` belongs to one request and one modality: UniPC is a multistep method with a memory, and sharing it
between requests would mix their histories. Its memory can be taken out and put back, so that a request can go on
in another process with the same result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .config import SnapshotConfig


@dataclass(frozen=True)
class ScheduleSettings:
    """A schedule with nothing left open.

    Attributes:
        num_inference_steps: Steps asked for.
        flow_shift: Of the flow sigmas; without effect on Karras sigmas.
        use_karras_sigmas: Karras sigmas instead of shifted flow sigmas.
        sigmas: Those of a 4-step checkpoint, which fixes them; then the shift and Karras mean nothing.
    """

    num_inference_steps: int
    flow_shift: float
    use_karras_sigmas: bool
    sigmas: tuple[float, ...] | None = None

    @classmethod
    def resolve(
        cls,
        snapshot: SnapshotConfig,
        num_inference_steps: int,
        flow_shift: float | None = None,
        use_karras_sigmas: bool | None = None,
    ) -> ScheduleSettings:
        """Fill what was not asked for from the checkpoint's scheduler file.

        Asking for a flow shift turns Karras sigmas off unless they are asked for too, because with them the
        shift would do nothing. A 4-step checkpoint has its own sigmas, whatever is asked for.
        """
        if snapshot.distilled_sigmas is not None:
            return cls(len(snapshot.distilled_sigmas), 1.0, False, snapshot.distilled_sigmas)
        if use_karras_sigmas is None:
            use_karras_sigmas = flow_shift is None and bool(snapshot.scheduler.get("use_karras_sigmas", False))
        if flow_shift is None:
            flow_shift = float(snapshot.scheduler.get("flow_shift", 1.0))
        return cls(num_inference_steps, flow_shift, use_karras_sigmas)


class Solver(ABC):
    """One request's and one modality's walk along the sigmas."""

    _scheduler: Any

    def __init__(self) -> None:
        self.step_index = 0

    @property
    def num_steps(self) -> int:
        return len(self._scheduler.timesteps)

    @property
    def timestep(self) -> float:
        """Timestep of the next step, on the scale of 0 to 1000."""
        return float(self._scheduler.timesteps[self.step_index])

    @property
    def sigmas(self) -> list[float]:
        """All sigmas, the final one included."""
        return self._scheduler.sigmas.tolist()

    def step(self, velocity: torch.Tensor, latents: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Latents after this step, from float32 `velocity` and `latents` of one shape.

        `generator` gives the noise of solvers that add some.
        """
        timestep = self._scheduler.timesteps[self.step_index]
        # UniPC's einsum wants a batch axis in front of the latents' own.
        stepped = self._step(velocity[None], timestep, latents[None], generator)[0]
        self.step_index += 1
        return stepped

    @abstractmethod
    def _step(
        self, velocity: torch.Tensor, timestep: torch.Tensor, latents: torch.Tensor, generator: torch.Generator
    ) -> torch.Tensor: ...

    def skip_noise(self, shape: tuple[int, ...], steps: int, generator: torch.Generator) -> None:  # noqa: B027
        """Bring `generator` to where it stands after `steps` steps over latents of that shape."""

    def state(self) -> dict[str, Any]:
        """The solver's memory: plain values and tensors, enough to go on elsewhere."""
        return {"step_index": self.step_index}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from `state`, which a solver with the same settings gave."""
        self.step_index = state["step_index"]
        # Where the scheduler starts counting; None lets it find the first step by itself.
        self._scheduler._step_index = self.step_index or None


class UniPCSolver(Solver):
    """UniPC over flow sigmas, deterministic."""

    def __init__(self, snapshot: SnapshotConfig, settings: ScheduleSettings) -> None:
        # Imported here: diffusers costs seconds, and only processes that denoise need it.
        from diffusers import UniPCMultistepScheduler

        super().__init__()
        config = dict(snapshot.scheduler) | {
            "flow_shift": settings.flow_shift,
            "use_karras_sigmas": settings.use_karras_sigmas,
        }
        self._scheduler = UniPCMultistepScheduler.from_config(config)
        steps = settings.num_inference_steps
        if snapshot.use_native_flow_schedule:
            train_steps = self._scheduler.config.num_train_timesteps
            sigmas = np.linspace(1.0 - 1.0 / train_steps, 0.0, steps + 1)[:-1]
            self._scheduler.set_timesteps(steps, sigmas=sigmas)
        else:
            self._scheduler.set_timesteps(steps)

    def _step(
        self, velocity: torch.Tensor, timestep: torch.Tensor, latents: torch.Tensor, generator: torch.Generator
    ) -> torch.Tensor:
        return self._scheduler.step(velocity, timestep, latents, return_dict=False)[0]

    def state(self) -> dict[str, Any]:
        scheduler = self._scheduler
        return super().state() | {
            "lower_order_nums": scheduler.lower_order_nums,
            "this_order": getattr(scheduler, "this_order", 0),
            "model_outputs": list(scheduler.model_outputs),
            "timestep_list": [None if t is None else int(t) for t in scheduler.timestep_list],
            "last_sample": scheduler.last_sample,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        scheduler = self._scheduler
        scheduler.lower_order_nums = state["lower_order_nums"]
        scheduler.this_order = state["this_order"]
        scheduler.model_outputs = list(state["model_outputs"])
        scheduler.timestep_list = list(state["timestep_list"])
        scheduler.last_sample = state["last_sample"]


class EulerSolver(Solver):
    """The Euler steps of 4-step checkpoints: back to the clean estimate, and fresh noise on top of it."""

    def __init__(self, snapshot: SnapshotConfig, settings: ScheduleSettings) -> None:
        from diffusers import FlowMatchEulerDiscreteScheduler

        super().__init__()
        self._scheduler = FlowMatchEulerDiscreteScheduler.from_config(snapshot.scheduler)
        self._scheduler.set_timesteps(sigmas=list(settings.sigmas or ()))

    def _step(
        self, velocity: torch.Tensor, timestep: torch.Tensor, latents: torch.Tensor, generator: torch.Generator
    ) -> torch.Tensor:
        return self._scheduler.step(velocity, timestep, latents, generator=generator, return_dict=False)[0]

    def skip_noise(self, shape: tuple[int, ...], steps: int, generator: torch.Generator) -> None:
        if self._scheduler.config.stochastic_sampling:
            for _ in range(steps):
                torch.randn(shape, generator=generator)


def solver_for(snapshot: SnapshotConfig, settings: ScheduleSettings) -> Solver:
    """A new solver at its first step."""
    kind = UniPCSolver if settings.sigmas is None else EulerSolver
    return kind(snapshot, settings)
