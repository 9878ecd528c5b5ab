"""Robot actions: embodiment domains with their widths, viewpoints, canvas sizes, and the caption that asks for them.

The facts are those of diffusers' `CosmosActionCondition`: Cosmos3 was trained with them, so they belong to the model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(frozen=True)
class Domain:
    """One embodiment: the row of the action projections that it uses, and the numbers of one action.

    `width` is 9 for each pose (translation, and rotation as six numbers), 1 for each gripper and 15 for each hand.
    """

    id: int
    width: int


DOMAINS: dict[str, Domain] = {
    "av": Domain(1, 9),
    "camera_pose": Domain(2, 9),
    "hand_pose": Domain(3, 57),
    "pusht": Domain(4, 2),
    "umi": Domain(6, 10),
    "bridge_orig_lerobot": Domain(7, 10),
    "droid_lerobot": Domain(8, 10),
    "robomind-franka": Domain(8, 10),
    "galbot": Domain(9, 30),
    "robomind-franka-dual": Domain(12, 20),
    "robomind-ur": Domain(13, 10),
    "agibotworld": Domain(15, 29),
    "agibot_gear_gripper": Domain(15, 29),
    "agibot_gear_gripper_ext": Domain(15, 29),
    "fractal": Domain(20, 10),
}
# Known to the model, but with no width of their own: nothing can be asked of them.
WIDTHLESS = ("no_action", "libero")

VIEW_POINTS: dict[str, str] = {
    "ego_view": "This video is captured from a first-person perspective looking at the scene.",
    "third_person_view": (
        "This video is captured from a third-person perspective looking towards the agent from the front."
    ),
    "wrist_view": "This video is captured from a wrist-mounted camera.",
    "concat_view": "This video contains concatenated views from multiple camera perspectives.",
}

# Heights and widths by tier. A scene goes onto the one whose aspect ratio is nearest.
CANVASES: dict[int, tuple[tuple[int, int], ...]] = {
    256: ((256, 256), (256, 320), (320, 256), (192, 320), (320, 192)),
    480: ((640, 640), (544, 736), (736, 544), (480, 832), (832, 480)),
    704: ((960, 960), (832, 1088), (1088, 832), (704, 1280), (1280, 704)),
    720: ((960, 960), (832, 1104), (1104, 832), (720, 1280), (1280, 720)),
}


@dataclass(frozen=True)
class ActionSettings:
    """The action tokens of a request.

    Attributes:
        chunk_size: Actions; the clip beside them has one frame more.
        domain_id: Row of the action projections.
        width: Numbers of one action that mean something; the rest up to the model's own width stays zero.
        given: The actions are conditioning (forward dynamics) and not made.
    """

    chunk_size: int
    domain_id: int
    width: int
    given: bool


def caption(description: str, *, view_point: str, num_frames: int, fps: float, height: int, width: int) -> str:
    """The JSON that action requests were trained on, around the user's description."""
    seconds = num_frames / fps
    minutes, rest = divmod(round(seconds), 60)
    text = description.strip()
    if text and not text.endswith((".", "!", "?")):
        text += "."
    ratios = {"1,1": 1.0, "4,3": 4 / 3, "3,4": 3 / 4, "16,9": 16 / 9, "9,16": 9 / 16}
    return json.dumps(
        {
            "cinematography": {"framing": VIEW_POINTS[view_point]},
            "actions": [{"time": f"0:00-{minutes}:{rest:02d}", "description": text}],
            "duration": f"{int(seconds)}s",
            "fps": float(fps),
            "resolution": {"H": height, "W": width},
            "aspect_ratio": min(ratios, key=lambda name: abs(ratios[name] - width / height)),
        }
    )
