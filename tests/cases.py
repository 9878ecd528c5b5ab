"""A small request of each mode, for every test that goes through all of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from cosmos3_model.snapshot import RECIPES
from graph.defaults import ACTIONS, WITH_SOUND

TEXTS = {"prompt": "A red cube turns. ", "negative_prompt": "blurry, dark."}
CLIP = {**TEXTS, "num_frames": 13, "height": 48, "width": 80, "fps": 24.0}
ROBOT = {**TEXTS, "fps": 5.0, "use_system_prompt": False}
STEPS = 4


def has(family: str, mode: str, guidance: float) -> bool:
    """Whether a family was trained for it; `test_families.py` holds the product to the same."""
    recipe = RECIPES[family]
    distilled = recipe.pipeline_class is None
    if mode in ACTIONS or mode.endswith(WITH_SOUND):
        return not distilled and (recipe.action if mode in ACTIONS else recipe.sound)
    return guidance == 1.0 or not distilled


def request_of(family: str, mode: str, guidance: float, picture: np.ndarray, clip: np.ndarray) -> dict[str, Any]:
    """Its fields, with nothing left to a default that a reference might not share."""
    fields = _content(mode, picture, clip) | {"seed": 5}
    if RECIPES[family].pipeline_class is None:
        return {name: value for name, value in fields.items() if name != "negative_prompt"}
    return fields | {"num_inference_steps": STEPS, "guidance_scale": guidance, "flow_shift": 10.0}


def _content(mode: str, picture: np.ndarray, clip: np.ndarray) -> dict[str, Any]:
    if mode == "policy":
        action = {"mode": "policy", "domain_name": "droid_lerobot", "chunk_size": 9, "resolution_tier": 256}
        return ROBOT | {"image": picture, "action": action}
    if mode == "forward-dynamics":
        given = np.random.default_rng(3).normal(size=(5, 2)).tolist()
        action = {"mode": "forward_dynamics", "domain_name": "pusht", "chunk_size": 8, "resolution_tier": 256}
        return ROBOT | {"image": picture, "action": action | {"raw_actions": given, "view_point": "wrist_view"}}
    if mode == "inverse-dynamics":
        action = {"mode": "inverse_dynamics", "domain_name": "hand_pose", "chunk_size": 10, "resolution_tier": 256}
        return ROBOT | {"video": clip, "action": action}
    fields = CLIP | ({"num_frames": 1} if mode == "text-to-image" else {})
    if mode.startswith("image"):
        fields |= {"image": picture}
    if mode.startswith("video"):
        fields |= {"video": clip}
    return fields | ({"enable_sound": True} if mode.endswith(WITH_SOUND) else {})
