"""Which sigmas a request denoises along, and the solver that walks them (diffusers' UniPC).

One `Solver` belongs to one request and one modality: UniPC is a multistep method with a memory, and sharing it
between requests would mix their histories. Its memory can be taken out and put back, so that a request can go on
in another process with the same result.
"""

from __future__ import annotations

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
    """

    num_inference_steps: int
    flow_shift: float
    use_karras_sigmas: bool

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
        shift would do nothing.
        """
        if use_karras_sigmas is None:
            use_karras_sigmas = flow_shift is None and bool(snapshot.scheduler.get("use_karras_sigmas", False))
        if flow_shift is None:
            flow_shift = float(snapshot.scheduler.get("flow_shift", 1.0))
        return cls(num_inference_steps, flow_shift, use_karras_sigmas)


class Solver:
    """UniPC over one request's latents."""

    def __init__(self, snapshot: SnapshotConfig, settings: ScheduleSettings) -> None:
        # Imported here: diffusers costs seconds, and only processes that denoise need it.
        from diffusers import UniPCMultistepScheduler

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
        self.step_index = 0

    @property
    def num_steps(self) -> int:
        return len(self._scheduler.timesteps)

    @property
    def timestep(self) -> int:
        """Timestep of the next step, on the scale of 0 to 1000."""
        return int(self._scheduler.timesteps[self.step_index])

    @property
    def sigmas(self) -> list[float]:
        """All sigmas, the final one included."""
        return self._scheduler.sigmas.tolist()

    def step(self, velocity: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        """Latents after this step, from float32 `velocity` and `latents` of one shape."""
        timestep = self._scheduler.timesteps[self.step_index]
        # UniPC's einsum wants a batch axis in front of the latents' own.
        (stepped,) = self._scheduler.step(velocity[None], timestep, latents[None], return_dict=False)
        self.step_index += 1
        return stepped[0]

    def state(self) -> dict[str, Any]:
        """The solver's memory: plain values and tensors, enough to go on elsewhere."""
        scheduler = self._scheduler
        return {
            "step_index": self.step_index,
            "lower_order_nums": scheduler.lower_order_nums,
            "this_order": getattr(scheduler, "this_order", 0),
            "model_outputs": list(scheduler.model_outputs),
            "timestep_list": [None if t is None else int(t) for t in scheduler.timestep_list],
            "last_sample": scheduler.last_sample,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from `state`, which a solver with the same settings gave."""
        scheduler = self._scheduler
        self.step_index = state["step_index"]
        scheduler.lower_order_nums = state["lower_order_nums"]
        scheduler.this_order = state["this_order"]
        scheduler.model_outputs = list(state["model_outputs"])
        scheduler.timestep_list = list(state["timestep_list"])
        scheduler.last_sample = state["last_sample"]
        # Where the scheduler starts counting; None lets it find the first step by itself.
        scheduler._step_index = self.step_index or None
