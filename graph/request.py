"""What a user may ask, checked once, before any work. Names follow diffusers' `Cosmos3OmniPipeline`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from cosmos3_model.actions import CANVASES, DOMAINS, VIEW_POINTS, WIDTHLESS
from nodes.action_files import load_actions
from nodes.clips import load_clip
from nodes.job import OutputFormat
from nodes.media import PIL_FORMATS, MediaError, load_image, missing_encoder

from .defaults import CHUNK_SIZE

MAX_SIDE = 4096
MAX_FRAMES = 4097
MAX_PROMPT_CHARACTERS = 65_536
TEMPORAL = 4  # frames per latent frame

Text = Annotated[str, Field(max_length=MAX_PROMPT_CHARACTERS)]
ActionMode = Literal["policy", "forward_dynamics", "inverse_dynamics"]


class RequestError(ValueError):
    """A request that cannot be served as it stands. `field` is the name of what is wrong with it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message

    def __reduce__(self) -> Any:
        return (RequestError, (self.field, self.message))


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, arbitrary_types_allowed=True)


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


class ActionRequest(_Strict):
    """The part of a request that is about a robot; names follow diffusers' `CosmosActionCondition`.

    Attributes:
        mode: `policy` makes actions and the clip, `forward_dynamics` a clip from actions, `inverse_dynamics` actions
            from a clip.
        domain_name: Embodiment; it fixes how many numbers an action has.
        chunk_size: Actions; the clip has one frame more. If None, as many as are given, or 16.
        resolution_tier: Which canvas sizes the scene is set onto; it is never enlarged.
        view_point: Where the camera is; part of the caption.
        raw_actions: `[T, width]` to follow, of forward dynamics: an array, nested lists, or a JSON, NPY or msgpack
            file. The last one is repeated if there are fewer than `chunk_size`, those beyond it are left out.
    """

    mode: ActionMode
    domain_name: str
    chunk_size: int | None = Field(None, ge=1, lt=MAX_FRAMES)
    resolution_tier: int = 480
    view_point: str = "ego_view"
    raw_actions: Any = None

    @field_validator("domain_name")
    @classmethod
    def _known_domain(cls, name: str) -> str:
        if name in WIDTHLESS:
            raise ValueError(f"{name!r} has no action width of its own; there are {', '.join(DOMAINS)}")
        return _one_of(name, DOMAINS)

    @field_validator("resolution_tier")
    @classmethod
    def _known_tier(cls, tier: int) -> int:
        return _one_of(tier, CANVASES)

    @field_validator("view_point")
    @classmethod
    def _known_view(cls, name: str) -> str:
        return _one_of(name, VIEW_POINTS)

    @field_validator("raw_actions", mode="before")
    @classmethod
    def _load_actions(cls, actions: Any) -> np.ndarray | None:
        return None if actions is None else _media(load_actions, actions)

    @model_validator(mode="after")
    def _fits_together(self) -> ActionRequest:
        if self.mode != "forward_dynamics":
            if self.raw_actions is not None:
                raise ValueError(f"raw_actions: only forward_dynamics takes actions; {self.mode} makes them")
            return self
        width = DOMAINS[self.domain_name].width
        if self.raw_actions is None:
            raise ValueError("raw_actions: forward_dynamics needs them")
        if self.raw_actions.shape[1] != width:
            raise ValueError(
                f"raw_actions: {self.raw_actions.shape[1]} numbers an action, but {self.domain_name} has {width}"
            )
        return self

    @property
    def num_actions(self) -> int:
        if self.chunk_size is not None:
            return self.chunk_size
        return CHUNK_SIZE if self.raw_actions is None else len(self.raw_actions)


class GenerationRequest(_Strict):
    """One picture, clip or chunk of actions to make. Unknown fields are refused.

    What is left at None takes the value that `graph.defaults` has for the checkpoint and the mode.

    Attributes:
        prompt: What to show.
        negative_prompt: What guidance moves away from.
        image: First frame: a path, a file's bytes, a PIL image or RGB8 `[h, w, 3]`. Needs `num_frames` over 1.
        num_frames: 1 for a picture, else 4k+1. Not with `action`, which decides itself; nor are the next two.
        height: Pixels, a multiple of 16.
        width: Likewise.
        fps: Frame rate; it also sets the temporal positions.
        num_inference_steps: Denoise steps.
        guidance_scale: 1 runs no unconditional branch.
        guidance_interval: Timesteps, from 0 to 1000, between which guidance is on; None for all. Serving systems use
            400 to 1000 for pictures.
        flow_shift: Of the schedule. Asking for one turns Karras sigmas off.
        use_karras_sigmas: The checkpoint's own choice, unless a shift was asked for or is the default.
        seed: Of the initial noise; drawn and reported if None.
        enable_sound: Make sound with the clip.
        use_system_prompt: Begin with the system prompt.
        add_resolution_template: Append the resolution sentence to the prompts.
        add_duration_template: Append the duration sentence to a clip's prompts.
        action: What the robot does or shall do; then `image` or `video` is the scene.
        condition_frame_indexes_vision: Latent frames that `video` gives.
        condition_video_keep: Which end of a longer `video` gives them.
        video: Clip to go on from: a file's path or bytes, a folder of pictures, RGB8 `[F, h, w, 3]`, or a list of
            pictures. Only the frames that are needed are kept.
        output: `np` RGB8 frames, `npy`, `png`, `jpeg`, `webp`, `mp4` one file, `png_frames` a list of files, `latent`,
            `actions` nothing to look at (policy and inverse dynamics).
        timeout: Seconds after which the request is given up; None for never.
    """

    prompt: Text
    negative_prompt: Text = ""
    image: Any = None
    num_frames: int | None = None
    height: int | None = None
    width: int | None = None
    fps: float | None = Field(None, ge=1, le=240, allow_inf_nan=False)
    num_inference_steps: int | None = Field(None, ge=1, le=1000)
    guidance_scale: float | None = Field(None, ge=0, le=100, allow_inf_nan=False)
    guidance_interval: Annotated[tuple[float, float] | None, BeforeValidator(_as_tuple)] = None
    flow_shift: float | None = Field(None, gt=0, le=1000, allow_inf_nan=False)
    use_karras_sigmas: bool | None = None
    seed: int | None = Field(None, ge=0, lt=1 << 63)
    enable_sound: bool = False
    use_system_prompt: bool | None = None
    add_resolution_template: bool = True
    add_duration_template: bool = True
    action: ActionRequest | None = None
    condition_frame_indexes_vision: Annotated[tuple[int, ...], BeforeValidator(_as_tuple)] = (0, 1)
    condition_video_keep: Literal["first", "last"] = "first"
    video: Any = None  # after the fields that say how many frames of it are needed
    output: OutputFormat | None = None
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
        return None if image is None else _media(load_image, image)

    @field_validator("num_frames")
    @classmethod
    def _frames_in_fours(cls, frames: int | None) -> int | None:
        if frames is None:
            return None
        if not 1 <= frames <= MAX_FRAMES:
            raise ValueError(f"must be from 1 to {MAX_FRAMES}, got {frames}")
        if frames % TEMPORAL != 1:
            below = frames - (frames - 1) % TEMPORAL
            raise ValueError(f"must be 4k+1, got {frames}; the nearest are {below} and {below + TEMPORAL}")
        return frames

    @field_validator("height", "width")
    @classmethod
    def _side(cls, side: int | None) -> int | None:
        if side is not None and (not 16 <= side <= MAX_SIDE or side % 16):
            raise ValueError(f"must be a multiple of 16 from 16 to {MAX_SIDE}, got {side}")
        return side

    @field_validator("guidance_interval")
    @classmethod
    def _ordered(cls, interval: tuple[float, float] | None) -> tuple[float, float] | None:
        if interval is not None and not 0 <= interval[0] <= interval[1] <= 1000:
            raise ValueError(f"must be two timesteps from 0 to 1000, the smaller first, got {list(interval)}")
        return interval

    @field_validator("condition_frame_indexes_vision")
    @classmethod
    def _indexes(cls, indexes: tuple[int, ...]) -> tuple[int, ...]:
        last = (MAX_FRAMES - 1) // TEMPORAL
        if not indexes or len(set(indexes)) != len(indexes) or not all(0 <= index <= last for index in indexes):
            raise ValueError(f"must be different latent frames from 0 to {last}, at least one, got {list(indexes)}")
        return tuple(sorted(indexes))

    @field_validator("video", mode="before")
    @classmethod
    def _load_video(cls, video: Any, info: ValidationInfo) -> np.ndarray | None:
        if video is None:
            return None
        action: ActionRequest | None = info.data.get("action")
        if action is None:
            needed = max(info.data.get("condition_frame_indexes_vision", (0,))) * TEMPORAL + 1
            keep = info.data.get("condition_video_keep", "first")
        else:
            needed, keep = action.num_actions + 1 if action.mode == "inverse_dynamics" else 1, "first"
        return _media(load_clip, video, needed, keep)

    @model_validator(mode="after")
    def _fits_together(self) -> GenerationRequest:
        for field in ("condition_frame_indexes_vision", "condition_video_keep"):
            if field in self.model_fields_set and (self.video is None or self.action is not None):
                raise ValueError(f"{field}: says which part of a video is kept, in video-to-video alone")
        if self.action is not None:
            self._check_action(self.action)
        elif self.image is not None and self.video is not None:
            raise ValueError("video: give an image or a video to start from, not both")
        elif self.wants_one_picture:
            given = {
                "image": self.image is not None,
                "video": self.video is not None,
                "enable_sound": self.enable_sound,
            }
            for field, present in given.items():
                if present:
                    raise ValueError(f"{field}: needs num_frames over 1; a single frame takes none")
        if self.output == "actions" and (self.action is None or self.action.mode == "forward_dynamics"):
            raise ValueError("output: only policy and inverse_dynamics give actions")
        problem = missing_encoder(self.output or "np")
        if problem:
            raise ValueError(f"output: {problem}")
        return self

    def _check_action(self, action: ActionRequest) -> None:
        for field in ("num_frames", "height", "width"):
            if getattr(self, field) is not None:
                raise ValueError(f"{field}: not with action; the chunk size and the scene decide")
        if self.enable_sound:
            raise ValueError("enable_sound: actions come without sound")
        if self.image is not None and self.video is not None:
            raise ValueError("video: give an image or a video of the scene, not both")
        if action.mode == "inverse_dynamics":
            if self.video is None:
                raise ValueError("video: inverse_dynamics needs the clip whose actions are wanted")
            if self.output not in (None, "actions"):
                raise ValueError(f"output: inverse_dynamics gives actions only, not {self.output}")
        elif self.image is None and self.video is None:
            raise ValueError(f"image: {action.mode} needs an image (or a video, whose first frame counts) of the scene")
        scene = self.image if self.image is not None else self.video[0]
        if min(scene.shape[:2]) < 16:
            raise ValueError(f"{'image' if self.image is not None else 'video'}: the scene must be 16 pixels or more")

    @property
    def frames(self) -> np.ndarray | None:
        """RGB8 `[F, h, w, 3]` to start from, whether given as image or video."""
        return self.image[None] if self.image is not None else self.video

    @property
    def wants_one_picture(self) -> bool:
        """A picture's file format means one frame, where nothing else was said."""
        return self.num_frames == 1 or (self.num_frames is None and self.output in PIL_FORMATS)

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


def _media(load: Any, *arguments: Any) -> np.ndarray:
    try:
        return load(*arguments)
    except (MediaError, TypeError, AttributeError) as error:
        raise ValueError(str(error)) from None


def _one_of(value: Any, allowed: Any) -> Any:
    if value not in allowed:
        raise ValueError(f"{value!r} is not one of {', '.join(str(item) for item in allowed)}")
    return value


def _request_error(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    # Places within a list are left out: its field is the name that the user knows.
    field = ".".join(part for part in first["loc"] if isinstance(part, str))
    if first["type"] == "value_error" and field in ("", "action"):
        # From a validator of the whole, which begins its message with the field.
        inner, _, message = message.partition(": ")
        field = ".".join(filter(None, (field, inner)))
    if first["type"] == "extra_forbidden":
        model = ActionRequest if first["loc"][0] == "action" else GenerationRequest
        message = f"unknown field; there are {', '.join(model.model_fields)}"
    elif first["type"] == "missing":
        message = "has too few values" if isinstance(first["loc"][-1], int) else "is required"
    elif first["type"] not in ("value_error",):
        shown = repr(first["input"])
        message = f"{message[0].lower()}{message[1:]}, got {shown if len(shown) < 60 else shown[:57] + '...'}"
    return RequestError(field, message)
