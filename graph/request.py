"""What a user may ask, checked once, before any work. Names follow diffusers' `Cosmos3OmniPipeline`."""

from __future__ import annotations

import math
import secrets
import time
import uuid
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from cosmos3_model.config import SnapshotConfig
from cosmos3_model.prompts import PromptSettings
from cosmos3_model.sampling import SamplingSettings
from cosmos3_model.schedule import ScheduleSettings
from nodes.job import Job, OutputFormat
from nodes.media import PIL_FORMATS, MediaError, load_image, missing_encoder

MAX_SIDE = 4096
MAX_FRAMES = 4097
MAX_GENERATION_TOKENS = 262_144
MAX_PROMPT_CHARACTERS = 65_536


class RequestError(ValueError):
    """A request that cannot be served as it stands. `field` is the name of what is wrong with it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message

    def __reduce__(self) -> Any:
        return (RequestError, (self.field, self.message))


class GenerationRequest(BaseModel):
    """One picture or clip to make. Unknown fields are refused.

    Attributes:
        prompt: What to show.
        negative_prompt: What guidance moves away from.
        image: First frame: a path, a file's bytes, a PIL image or RGB8 `[h, w, 3]`. Needs `num_frames` over 1.
        num_frames: 1 for a picture, else 4k+1.
        height: Pixels, a multiple of 16.
        width: Likewise.
        fps: Frame rate; it also sets the temporal positions.
        num_inference_steps: Denoise steps.
        guidance_scale: 1 runs no unconditional branch.
        flow_shift: Of the schedule; the checkpoint's own if None. Asking for one turns Karras sigmas off.
        use_karras_sigmas: The checkpoint's own choice if None.
        seed: Of the initial noise; drawn and reported if None.
        use_system_prompt: The checkpoint's own choice if None.
        add_resolution_template: Append the resolution sentence to the prompts.
        add_duration_template: Append the duration sentence to a clip's prompts.
        output: `np` RGB8 frames, `npy`, `png`, `jpeg`, `webp`, `mp4` one file, `png_frames` a list of files, `latent`.
        timeout: Seconds after which the request is given up; None for never.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, arbitrary_types_allowed=True)

    prompt: str = Field(max_length=MAX_PROMPT_CHARACTERS)
    negative_prompt: str = Field("", max_length=MAX_PROMPT_CHARACTERS)
    image: Any = None
    num_frames: int = 189
    height: int = 720
    width: int = 1280
    fps: float = Field(24.0, gt=0, le=240, allow_inf_nan=False)
    num_inference_steps: int = Field(35, ge=1, le=1000)
    guidance_scale: float = Field(6.0, ge=0, le=100, allow_inf_nan=False)
    flow_shift: float | None = Field(None, gt=0, le=1000, allow_inf_nan=False)
    use_karras_sigmas: bool | None = None
    seed: int | None = Field(None, ge=0, lt=1 << 63)
    use_system_prompt: bool | None = None
    add_resolution_template: bool = True
    add_duration_template: bool = True
    output: OutputFormat = "np"
    timeout: float | None = Field(None, gt=0, allow_inf_nan=False)

    @field_validator("prompt")
    @classmethod
    def _not_empty(cls, prompt: str) -> str:
        if not prompt.strip():
            raise ValueError("must not be empty")
        return prompt

    @field_validator("image", mode="before")
    @classmethod
    def _load_image(cls, image: Any) -> np.ndarray | None:
        if image is None:
            return None
        try:
            return load_image(image)
        except (MediaError, TypeError, AttributeError) as error:
            raise ValueError(str(error)) from None

    @field_validator("num_frames")
    @classmethod
    def _frames_in_fours(cls, frames: int) -> int:
        if not 1 <= frames <= MAX_FRAMES:
            raise ValueError(f"must be from 1 to {MAX_FRAMES}, got {frames}")
        if frames % 4 != 1:
            below = frames - (frames - 1) % 4
            raise ValueError(f"must be 4k+1, got {frames}; the nearest are {below} and {below + 4}")
        return frames

    @field_validator("height", "width")
    @classmethod
    def _side(cls, side: int) -> int:
        if not 16 <= side <= MAX_SIDE or side % 16:
            raise ValueError(f"must be a multiple of 16 from 16 to {MAX_SIDE}, got {side}")
        return side

    @model_validator(mode="after")
    def _fits_together(self) -> GenerationRequest:
        tokens = ((self.num_frames - 1) // 4 + 1) * math.ceil(self.height / 32) * math.ceil(self.width / 32)
        if tokens > MAX_GENERATION_TOKENS:
            raise ValueError(
                f"num_frames: {self.num_frames} frames of {self.width}x{self.height} are {tokens} tokens, "
                f"at most {MAX_GENERATION_TOKENS} can be made; ask for fewer frames or a smaller size"
            )
        if self.image is not None and self.num_frames == 1:
            raise ValueError("image: needs num_frames over 1; a single frame takes no conditioning image")
        if self.output in PIL_FORMATS and self.num_frames != 1:
            raise ValueError(f"output: a {self.output} file holds one frame; use mp4, npy or png_frames for clips")
        problem = missing_encoder(self.output)
        if problem:
            raise ValueError(f"output: {problem}")
        return self

    @classmethod
    def parse(cls, **fields: Any) -> GenerationRequest:
        """Build a request from keyword arguments.

        Raises:
            RequestError: one line that names the first field that is wrong.
        """
        try:
            return cls(**fields)
        except ValidationError as error:
            raise _request_error(error) from None

    def resolve(self, snapshot: SnapshotConfig) -> Job:
        """Settle everything that was left open, from the checkpoint."""
        use_system_prompt = self.use_system_prompt
        if use_system_prompt is None:
            use_system_prompt = snapshot.default_use_system_prompt
        prompt = PromptSettings(
            self.prompt,
            self.negative_prompt,
            self.num_frames,
            self.height,
            self.width,
            self.fps,
            use_system_prompt,
            self.add_resolution_template,
            self.add_duration_template,
        )
        sampling = SamplingSettings(
            snapshot.latent_shape(self.num_frames, self.height, self.width),
            self.fps,
            secrets.randbits(31) if self.seed is None else self.seed,
            self.guidance_scale,
            ScheduleSettings.resolve(snapshot, self.num_inference_steps, self.flow_shift, self.use_karras_sigmas),
        )
        deadline = None if self.timeout is None else time.time() + self.timeout
        return Job(uuid.uuid4().hex[:16], prompt, sampling, self.output, deadline)


def _request_error(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    field = ".".join(str(part) for part in first["loc"])
    if not field:
        field, _, message = message.partition(": ")
    if first["type"] == "extra_forbidden":
        message = f"unknown field; there are {', '.join(GenerationRequest.model_fields)}"
    elif first["type"] == "missing":
        message = "is required"
    elif first["type"] not in ("value_error",):
        shown = repr(first["input"])
        message = f"{message[0].lower()}{message[1:]}, got {shown if len(shown) < 60 else shown[:57] + '...'}"
    return RequestError(field, message)
