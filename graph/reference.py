"""A request through the single-process reference run: what the pipeline's result is compared with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cosmos3_model.fused import FusedOutput, FusedPipeline

from .request import GenerationRequest
from .resolve import resolve, sources_of


class ReferencePipeline:
    """Takes the fields of `GenerationRequest`, as `Pipeline.generate` does, and runs them in this process."""

    def __init__(
        self, snapshot: str | Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        self.fused = FusedPipeline(snapshot, dtype=dtype, device=device)
        self.snapshot = self.fused.snapshot

    def __call__(self, *, on_step: Callable[[int, torch.Tensor], None] | None = None, **fields: Any) -> FusedOutput:
        """Run a request; `on_step` is called after each step with its index and the vision latents.

        Raises:
            RequestError: a field is wrong.
        """
        request = GenerationRequest.parse(**fields)
        job = resolve(request, self.snapshot)
        return self.fused(
            job.prompt, job.sampling, conditioning=job.conditioning, on_step=on_step, **sources_of(request)
        )
