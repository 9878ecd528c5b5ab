"""diffusers on the same snapshot: what it makes of the fields of a `GenerationRequest`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

PASSED_ON = (
    "prompt", "negative_prompt", "num_frames", "height", "width", "fps", "num_inference_steps", "guidance_scale",
    "enable_sound", "use_system_prompt", "add_resolution_template", "add_duration_template",
    "condition_frame_indexes_vision", "condition_video_keep",
)  # fmt: skip


@dataclass(frozen=True)
class OracleOutput:
    """Vision latents or RGB8 frames; sound samples; actions."""

    video: Any
    sound: torch.Tensor | None = None
    actions: torch.Tensor | None = None


@cache
def load(snapshot: Path) -> Any:
    from diffusers import Cosmos3DistilledModularPipeline, Cosmos3OmniPipeline

    if (snapshot / "modular_model_index.json").exists():
        modular = Cosmos3DistilledModularPipeline.from_pretrained(str(snapshot))
        modular.load_components(dtype=torch.float32)
        modular.disable_safety_checker()
        modular.set_progress_bar_config(disable=True)
        return modular
    pipe = Cosmos3OmniPipeline.from_pretrained(
        snapshot, dtype=torch.float32, safety_checker=None, enable_safety_checker=False
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def ask(snapshot: Path, *, frames: bool = False, **fields: Any) -> OracleOutput:
    """Run a request, its scheduler set as diffusers' users set it. `frames` asks for RGB8 instead of latents."""
    pipe = load(snapshot)
    arguments = {name: fields[name] for name in PASSED_ON if name in fields}
    arguments["generator"] = torch.Generator("cpu").manual_seed(fields["seed"])
    arguments["output_type"] = "np" if frames else "latent"
    scene = {}
    if fields.get("image") is not None:
        scene["image"] = Image.fromarray(fields["image"])
    if fields.get("video") is not None:
        scene["video"] = [Image.fromarray(frame) for frame in fields["video"]]
    if (snapshot / "modular_model_index.json").exists():
        return OracleOutput(_frames(pipe(**arguments, **scene, output="videos"), frames))
    _set_schedule(pipe, snapshot, fields)
    if fields.get("action") is not None:
        arguments["action"] = _action(fields["action"], scene)
    else:
        arguments |= scene
    made = pipe(**arguments)
    return OracleOutput(_frames(made.video, frames), made.sound, made.action[0] if made.action else None)


def _frames(video: Any, wanted: bool) -> Any:
    return (video * 255).round().astype(np.uint8) if wanted else video


def _action(fields: dict[str, Any], scene: dict[str, Any]) -> Any:
    from diffusers.pipelines.cosmos.pipeline_cosmos3_omni import CosmosActionCondition

    given = dict(fields)
    if "raw_actions" in given:
        given["raw_actions"] = torch.tensor(given["raw_actions"], dtype=torch.float32)
    return CosmosActionCondition(**given, **scene)


def _set_schedule(pipe: Any, snapshot: Path, fields: dict[str, Any]) -> None:
    from diffusers import UniPCMultistepScheduler

    config = json.loads((snapshot / "scheduler" / "scheduler_config.json").read_text())
    if fields.get("use_karras_sigmas"):
        config["use_karras_sigmas"] = True
    if fields.get("flow_shift") is not None:
        config |= {"flow_shift": fields["flow_shift"], "use_karras_sigmas": False}
    pipe.scheduler = UniPCMultistepScheduler.from_config(config)
