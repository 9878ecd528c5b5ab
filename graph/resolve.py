"""A request and a checkpoint to a job: every setting that was left open is settled here, once.

It comes from the table of defaults, from the checkpoint's own files, or, for actions, from the given scene.
"""

from __future__ import annotations

import math
import secrets
import time
import uuid
from typing import Any

import numpy as np

from cosmos3_model.actions import DOMAINS, ActionSettings
from cosmos3_model.conditioning import Conditioning, scene_conditioning
from cosmos3_model.config import SnapshotConfig
from cosmos3_model.families import family_of
from cosmos3_model.prompts import PromptSettings
from cosmos3_model.sampling import SamplingSettings
from cosmos3_model.schedule import ScheduleSettings
from nodes.job import Job
from nodes.media import MAX_PIXELS, PIL_FORMATS

from .defaults import WITH_SOUND, Defaults, defaults_of
from .modes import refusal
from .request import TEMPORAL, ActionRequest, GenerationRequest, RequestError

MAX_GENERATION_TOKENS = 262_144


def mode_of(request: GenerationRequest, family: str) -> str:
    """The mode that a request's fields amount to. Where they leave it open, the family decides: picture or clip."""
    if request.action is not None:
        return request.action.mode.replace("_", "-")
    if request.video is not None:
        mode = "video-to-video"
    elif request.image is not None:
        mode = "image-to-video"
    elif request.wants_one_picture or (
        request.num_frames is None and family == "super-t2i-4step" and not request.enable_sound
    ):
        return "text-to-image"
    else:
        mode = "text-to-video"
    return mode + WITH_SOUND if request.enable_sound else mode


def resolve(request: GenerationRequest, snapshot: SnapshotConfig) -> Job:
    """Settle everything that a request leaves open.

    Raises:
        RequestError: the checkpoint cannot do what is asked; the message names the field.
    """
    family = family_of(snapshot)
    mode = mode_of(request, family)
    reason = refusal(snapshot, mode)
    if reason:
        raise RequestError("action" if request.action is not None else "enable_sound", reason)
    defaults = defaults_of(family, mode)
    if snapshot.distilled_sigmas is not None:
        _check_distilled(request, len(snapshot.distilled_sigmas))
    fps = defaults.fps if request.fps is None else request.fps
    if request.action is not None:
        conditioning: Conditioning | None = _scene(request, request.action)
        num_frames = request.action.num_actions + 1
        assert conditioning is not None and conditioning.latent_content is not None
        height, width = conditioning.height, conditioning.width
        rows, columns = conditioning.latent_content
        latent_shape = (1, snapshot.latent_channels, (num_frames - 1) // TEMPORAL + 1, rows, columns)
    else:
        num_frames, height, width = _size(request, defaults)
        conditioning = _conditioning(request, num_frames, height, width)
        latent_shape = snapshot.latent_shape(num_frames, height, width)
    sound_shape = snapshot.sound_shape(num_frames, fps) if request.enable_sound else None
    _check_size(request, latent_shape, 0 if sound_shape is None else sound_shape[1], num_frames, height, width)
    output = request.output or ("actions" if mode == "inverse-dynamics" else "np")
    if output in PIL_FORMATS and num_frames != 1:
        raise RequestError("output", f"a {output} file holds one frame; use mp4, npy or png_frames for clips")
    return Job(
        uuid.uuid4().hex[:16],
        mode,
        PromptSettings(
            request.prompt,
            request.negative_prompt,
            num_frames,
            height,
            width,
            fps,
            _first(request.use_system_prompt, defaults.use_system_prompt, snapshot.default_use_system_prompt),
            request.add_resolution_template,
            request.add_duration_template,
            None if request.action is None else request.action.view_point,
        ),
        SamplingSettings(
            latent_shape,
            fps,
            secrets.randbits(31) if request.seed is None else request.seed,
            _first(request.guidance_scale, defaults.guidance_scale),
            _schedule(request, defaults, snapshot),
            request.guidance_interval,
            () if conditioning is None else conditioning.latent_frames,
            sound_shape,
            None if request.action is None else _actions(request.action),
        ),
        output,
        conditioning,
        None if request.timeout is None else time.time() + request.timeout,
    )


def sources_of(request: GenerationRequest) -> dict[str, Any]:
    """What goes from the request into the graph as it is: frames, and actions of exactly the chunk's length."""
    sources: dict[str, Any] = {}
    if request.frames is not None:
        sources["frames"] = request.frames
    if request.action is not None and request.action.raw_actions is not None:
        given, wanted = request.action.raw_actions, request.action.num_actions
        sources["actions"] = np.concatenate([given, np.repeat(given[-1:], max(0, wanted - len(given)), 0)])[:wanted]
    return sources


def _schedule(request: GenerationRequest, defaults: Defaults, snapshot: SnapshotConfig) -> ScheduleSettings:
    """A default shift holds where nothing about the schedule was asked for."""
    shift = request.flow_shift
    if shift is None and not request.use_karras_sigmas:
        shift = defaults.flow_shift
    steps = _first(request.num_inference_steps, defaults.num_inference_steps)
    return ScheduleSettings.resolve(snapshot, steps, shift, request.use_karras_sigmas)


def _size(request: GenerationRequest, defaults: Defaults) -> tuple[int, int, int]:
    frames = 1 if request.wants_one_picture else _first(request.num_frames, defaults.num_frames)
    return frames, _first(request.height, defaults.height), _first(request.width, defaults.width)


def _conditioning(request: GenerationRequest, num_frames: int, height: int, width: int) -> Conditioning | None:
    if request.image is not None:
        rows, columns = request.image.shape[:2]
        scale = max(height / rows, width / columns)
        if scale * rows * scale * columns > MAX_PIXELS:
            shape = f"{columns}x{rows} pixels cannot be scaled to cover {width}x{height}"
            raise RequestError("image", f"{shape}: that would take over {MAX_PIXELS} pixels; crop it first")
        return Conditioning("image", height, width, 1, (0,))
    if request.video is None:
        return None
    indexes = request.condition_frame_indexes_vision
    if indexes[-1] > (num_frames - 1) // TEMPORAL:
        raise RequestError(
            "condition_frame_indexes_vision",
            f"{num_frames} frames are {(num_frames - 1) // TEMPORAL + 1} latent frames; there is no {indexes[-1]}",
        )
    if len(indexes) == (num_frames - 1) // TEMPORAL + 1:
        raise RequestError(
            "condition_frame_indexes_vision",
            f"{num_frames} frames are {len(indexes)} latent frames, and all of them are given; ask for more frames",
        )
    return Conditioning("clip", height, width, indexes[-1] * TEMPORAL + 1, indexes)


def _scene(request: GenerationRequest, action: ActionRequest) -> Conditioning:
    frames = request.frames
    assert frames is not None
    source = (frames.shape[1], frames.shape[2])
    if action.mode != "inverse_dynamics":
        return scene_conditioning(source, action.resolution_tier, 1, (0,))
    num_frames = action.num_actions + 1
    latent_frames = tuple(range((num_frames - 1) // TEMPORAL + 1))
    return scene_conditioning(source, action.resolution_tier, num_frames, latent_frames)


def _actions(action: ActionRequest) -> ActionSettings:
    domain = DOMAINS[action.domain_name]
    return ActionSettings(action.num_actions, domain.id, domain.width, action.mode == "forward_dynamics")


def _check_size(
    request: GenerationRequest,
    latent_shape: tuple[int, ...],
    sound_latents: int,
    num_frames: int,
    height: int,
    width: int,
) -> None:
    tokens = latent_shape[2] * math.ceil(latent_shape[3] / 2) * math.ceil(latent_shape[4] / 2) + sound_latents
    if tokens > MAX_GENERATION_TOKENS:
        field, less = ("num_frames", "frames") if request.action is None else ("action.chunk_size", "actions")
        raise RequestError(
            field,
            f"{num_frames} frames of {width}x{height} are {tokens} tokens, at most {MAX_GENERATION_TOKENS} can be "
            f"made; ask for fewer {less} or a smaller size",
        )


def _check_distilled(request: GenerationRequest, steps: int) -> None:
    """What a 4-step checkpoint has built in cannot be asked for."""
    if request.num_inference_steps not in (None, steps):
        raise RequestError(
            "num_inference_steps", f"this checkpoint takes {steps} steps, got {request.num_inference_steps}"
        )
    if request.guidance_scale not in (None, 1.0):
        raise RequestError("guidance_scale", f"this checkpoint has guidance built in: 1, got {request.guidance_scale}")
    for field in ("negative_prompt", "guidance_interval", "flow_shift", "use_karras_sigmas"):
        if getattr(request, field) not in (None, ""):
            raise RequestError(field, "this checkpoint has its schedule and guidance built in; leave it out")


def _first(*values: Any) -> Any:
    """The first that is not None."""
    return next(value for value in values if value is not None)
