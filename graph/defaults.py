"""What a request gets where it says nothing: one table, by checkpoint family and mode.

The values are those that NVIDIA and diffusers publish for each. `cosmoray info` prints the part that holds for a
snapshot, and docs/modes.md is made from all of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cosmos3_model.families import FAMILIES

PICTURES = ("text-to-image",)
CLIPS = ("text-to-video", "image-to-video", "video-to-video")
ACTIONS = ("policy", "forward-dynamics", "inverse-dynamics")
WITH_SOUND = "-with-sound"
CHUNK_SIZE = 16


@dataclass(frozen=True)
class Defaults:
    """Settings of one family in one mode.

    Attributes:
        height: Pixels; None where the given scene decides.
        width: Likewise.
        num_frames: 1 for a picture; None where the actions decide.
        num_inference_steps: Denoise steps.
        guidance_scale: 1 runs no unconditional branch.
        flow_shift: None leaves the schedule of the checkpoint's file as it is.
        use_system_prompt: None leaves it to the checkpoint.
        fps: Frame rate.
    """

    height: int | None
    width: int | None
    num_frames: int | None
    num_inference_steps: int
    guidance_scale: float
    flow_shift: float | None = None
    use_system_prompt: bool | None = None
    fps: float = 24.0


_PICTURE = Defaults(720, 1280, 1, 50, 6.0)
_CLIP = Defaults(720, 1280, 189, 35, 6.0, flow_shift=10.0)
_ACTION = Defaults(None, None, None, 30, 1.0, use_system_prompt=False)
_EDGE_CLIP = Defaults(480, 832, 121, 20, 6.0, flow_shift=12.0)
_USUAL = dict.fromkeys(PICTURES, _PICTURE) | dict.fromkeys(CLIPS, _CLIP) | dict.fromkeys(ACTIONS, _ACTION)
_EDGE = dict.fromkeys(PICTURES, replace(_EDGE_CLIP, num_frames=1)) | dict.fromkeys(CLIPS, _EDGE_CLIP)
_FOUR_STEPS = dict.fromkeys(PICTURES, Defaults(720, 1280, 1, 4, 1.0)) | dict.fromkeys(
    CLIPS, Defaults(720, 1280, 189, 4, 1.0)
)

DEFAULTS: dict[str, dict[str, Defaults]] = {
    "nano": _USUAL,
    "super": _USUAL,
    "edge": _USUAL | _EDGE,
    "nano-policy-droid": _USUAL
    | {"policy": replace(_ACTION, num_inference_steps=4, guidance_scale=3.0, flow_shift=5.0)},
    "super-t2i-4step": _FOUR_STEPS,
    "super-i2v-4step": _FOUR_STEPS,
}
assert tuple(DEFAULTS) == FAMILIES


def defaults_of(family: str, mode: str) -> Defaults:
    """The row of a mode; sound changes nothing in it."""
    return DEFAULTS[family][mode.removesuffix(WITH_SOUND)]
