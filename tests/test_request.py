"""What is refused, each with the name of the field, before any work."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cosmos3_model.config import SnapshotConfig
from graph.request import GenerationRequest, RequestError
from graph.resolve import mode_of, resolve, sources_of
from nodes.job import Job

GOOD = {"prompt": "A red cube.", "num_frames": 1, "height": 64, "width": 96}
CLIP = GOOD | {"num_frames": 5}
PICTURES = np.zeros((3, 20, 30, 3), np.uint8)
LARGE = np.zeros((720, 1280, 3), np.uint8)

BAD = [
    ({"num_frames": 16}, "num_frames", "the nearest are 13 and 17"),
    ({"num_frames": 2}, "num_frames", "the nearest are 1 and 5"),
    ({"num_frames": 0}, "num_frames", "from 1 to"),
    ({"num_frames": -3}, "num_frames", "from 1 to"),
    ({"num_frames": "5"}, "num_frames", "got '5'"),
    ({"num_frames": 5.0}, "num_frames", "valid integer"),
    ({"num_frames": True}, "num_frames", "valid integer"),
    ({"num_frames": 4097, "height": 4096, "width": 4096}, "num_frames", "tokens"),
    ({"height": 50}, "height", "multiple of 16"),
    ({"height": 0}, "height", "multiple of 16"),
    ({"width": 1 << 20}, "width", "to 4096"),
    ({"width": -16}, "width", "multiple of 16"),
    ({"fps": 0.0}, "fps", "greater than or equal to 1"),
    (
        {"enable_sound": True, "num_frames": 4097, "fps": 1.0, "height": 512, "width": 512},
        "num_frames",
        "tokens, at most",
    ),
    (
        {"image": np.zeros((4000, 1, 3), np.uint8), "num_frames": 5, "height": 1280, "width": 1280},
        "image",
        "crop it first",
    ),
    (
        {"video": np.zeros((9, 48, 80, 3), np.uint8), "num_frames": 5},
        "condition_frame_indexes_vision",
        "all of them are given",
    ),
    ({"condition_video_keep": "last"}, "condition_video_keep", "video-to-video alone"),
    ({"fps": float("inf")}, "fps", "finite"),
    ({"num_inference_steps": 0}, "num_inference_steps", "greater than or equal to 1"),
    ({"num_inference_steps": 10**9}, "num_inference_steps", "less than or equal to 1000"),
    ({"guidance_scale": float("nan")}, "guidance_scale", "finite"),
    ({"guidance_scale": -1.0}, "guidance_scale", "greater than or equal to 0"),
    ({"guidance_scale": "six"}, "guidance_scale", "valid number"),
    ({"flow_shift": 0.0}, "flow_shift", "greater than 0"),
    ({"flow_shift": float("nan")}, "flow_shift", ""),
    ({"seed": -1}, "seed", "greater than or equal to 0"),
    ({"seed": 1 << 63}, "seed", "less than"),
    ({"prompt": ""}, "prompt", "must not be empty"),
    ({"prompt": " \n"}, "prompt", "must not be empty"),
    ({"prompt": "x" * 70_000}, "prompt", "at most 65536"),
    ({"prompt": 3}, "prompt", "valid string"),
    ({"prompt": "\ud800"}, "prompt", "unicode"),
    ({"output": "gif"}, "output", "'np', 'npy'"),
    ({"output": "png", "num_frames": 5}, "output", "holds one frame"),
    ({"output": "actions"}, "output", "only policy and inverse_dynamics"),
    ({"guidance_interval": (400.0,)}, "guidance_interval", "too few values"),
    ({"guidance_interval": (400.0, "x")}, "guidance_interval", "valid number, got 'x'"),
    ({"guidance_interval": (1000.0, 400.0)}, "guidance_interval", "the smaller first"),
    ({"guidance_interval": (-1.0, 400.0)}, "guidance_interval", "from 0 to 1000"),
    ({"enable_sound": True}, "enable_sound", "needs num_frames over 1"),
    ({"enable_sound": 1}, "enable_sound", "valid boolean"),
    ({"condition_frame_indexes_vision": []}, "condition_frame_indexes_vision", "at least one"),
    ({"condition_frame_indexes_vision": [0, 0]}, "condition_frame_indexes_vision", "different"),
    ({"condition_frame_indexes_vision": [-1]}, "condition_frame_indexes_vision", "from 0 to"),
    ({"condition_frame_indexes_vision": "0"}, "condition_frame_indexes_vision", "valid tuple"),
    ({"condition_video_keep": "middle"}, "condition_video_keep", "'first' or 'last'"),
    ({"video": PICTURES, "num_frames": 1}, "video", "needs num_frames over 1"),
    ({"video": PICTURES, "image": PICTURES[0], "num_frames": 5}, "video", "not both"),
    (
        {"video": PICTURES, "num_frames": 5, "condition_frame_indexes_vision": [2]},
        "condition_frame_indexes_vision",
        "there is no 2",
    ),
    ({"video": PICTURES[0], "num_frames": 5}, "video", "uint8 [F, h, w, 3]"),
    ({"video": b"not a clip", "num_frames": 5}, "video", "not a clip that can be read"),
    ({"image": b"\x89PNG not really", "num_frames": 5}, "image", "not a picture"),
    ({"image": np.zeros((4, 4), np.uint8), "num_frames": 5}, "image", "uint8"),
    ({"image": 7, "num_frames": 5}, "image", ""),
    ({"image": np.zeros((4, 4, 3), np.uint8)}, "image", "needs num_frames over 1"),
    ({"timeout": 0.0}, "timeout", "greater than 0"),
    ({"steps": 3}, "steps", "unknown field; there are prompt, "),
]


POLICY = {"mode": "policy", "domain_name": "pusht"}
FORWARD = {"mode": "forward_dynamics", "domain_name": "pusht", "raw_actions": [[1.0, 2.0]]}
INVERSE = {"mode": "inverse_dynamics", "domain_name": "pusht"}
BAD_ACTIONS = [
    (POLICY | {"mode": "dance"}, {}, "action.mode", "'policy', 'forward_dynamics'"),
    (POLICY | {"domain_name": "toaster"}, {}, "action.domain_name", "'toaster' is not one of av, "),
    (POLICY | {"domain_name": "libero"}, {}, "action.domain_name", "no action width"),
    (POLICY | {"chunk_size": 0}, {}, "action.chunk_size", "greater than or equal to 1"),
    (POLICY | {"chunk_size": 5000}, {}, "action.chunk_size", "less than"),
    (POLICY | {"resolution_tier": 123}, {}, "action.resolution_tier", "123 is not one of 256, 480"),
    (POLICY | {"view_point": "below"}, {}, "action.view_point", "'below' is not one of ego_view"),
    (POLICY | {"raw_actions": [[1.0, 2.0]]}, {}, "action.raw_actions", "only forward_dynamics takes actions"),
    (POLICY | {"steps": 3}, {}, "action.steps", "unknown field; there are mode, domain_name"),
    ({"mode": "policy"}, {}, "action.domain_name", "is required"),
    (FORWARD | {"raw_actions": None}, {}, "action.raw_actions", "needs them"),
    (FORWARD | {"raw_actions": [[1.0]]}, {}, "action.raw_actions", "1 numbers an action, but pusht has 2"),
    (FORWARD | {"raw_actions": [[1.0, 2.0], [1.0]]}, {}, "action.raw_actions", "not a table of numbers"),
    (FORWARD | {"raw_actions": [1.0, 2.0]}, {}, "action.raw_actions", "must be [T, D]"),
    (FORWARD | {"raw_actions": [[1.0, float("nan")]]}, {}, "action.raw_actions", "not finite"),
    (FORWARD | {"raw_actions": "absent.json"}, {}, "action.raw_actions", "absent.json: no such file"),
    (POLICY, {"image": None}, "image", "policy needs an image"),
    (POLICY, {"video": PICTURES}, "video", "not both"),
    (POLICY, {"image": PICTURES[0, :15]}, "image", "16 pixels or more"),
    (INVERSE, {}, "video", "inverse_dynamics needs the clip"),
    (INVERSE, {"image": None, "video": PICTURES, "output": "mp4"}, "output", "gives actions only, not mp4"),
    (FORWARD, {"output": "actions"}, "output", "only policy and inverse_dynamics"),
    (POLICY, {"output": "png"}, "output", "holds one frame"),
    (POLICY, {"num_frames": 17}, "num_frames", "not with action"),
    (POLICY, {"height": 64}, "height", "not with action"),
    (POLICY, {"enable_sound": True}, "enable_sound", "without sound"),
    (POLICY | {"chunk_size": 4000, "resolution_tier": 720}, {"image": LARGE}, "action.chunk_size", "fewer actions"),
]


def ask(snapshot: Path, **fields: Any) -> Job:
    return resolve(GenerationRequest.parse(**fields), SnapshotConfig.from_folder(snapshot))


@pytest.mark.parametrize(("change", "field", "message"), BAD, ids=lambda value: str(value)[:40])
def test_it_is_refused_by_name(snapshot: Path, change: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        ask(snapshot, **GOOD | change)
    assert caught.value.field == field
    assert message in caught.value.message
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(("action", "change", "field", "message"), BAD_ACTIONS, ids=lambda value: str(value)[:40])
def test_a_robot_is_refused_by_name(
    snapshot: Path, action: dict[str, Any], change: dict[str, Any], field: str, message: str
) -> None:
    with pytest.raises(RequestError) as caught:
        ask(snapshot, **{"prompt": "Push.", "image": PICTURES[0], "action": action} | change)
    assert caught.value.field == field
    assert message in caught.value.message
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_missing_prompt_is_named() -> None:
    with pytest.raises(RequestError, match="prompt: is required"):
        GenerationRequest.parse(num_frames=1)


def test_an_image_file_that_is_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    file.write_text("not a picture")
    with pytest.raises(RequestError, match=r"image: .*picture.png: not a picture"):
        GenerationRequest.parse(**CLIP, image=file)
    with pytest.raises(RequestError, match=r"image: .*absent.png: no such file"):
        GenerationRequest.parse(**CLIP, image=tmp_path / "absent.png")


def test_the_mode_follows_from_the_fields() -> None:
    def mode(family: str = "nano", **fields: Any) -> str:
        return mode_of(GenerationRequest.parse(prompt="x", **fields), family)

    assert mode(num_frames=1) == "text-to-image"
    assert mode(output="png") == "text-to-image"
    assert mode() == "text-to-video"
    assert mode("super-t2i-4step") == "text-to-image"
    assert mode("super-t2i-4step", num_frames=5) == "text-to-video"
    assert mode(image=PICTURES[0]) == "image-to-video"
    assert mode(video=PICTURES) == "video-to-video"
    assert mode(video=PICTURES, enable_sound=True) == "video-to-video-with-sound"
    assert mode(image=PICTURES[0], action=POLICY) == "policy"
    assert mode(image=PICTURES[0], action=FORWARD) == "forward-dynamics"
    assert mode(video=PICTURES, action=INVERSE) == "inverse-dynamics"


def test_what_is_left_open_is_settled_from_the_checkpoint(families: dict[str, Path]) -> None:
    """A smaller checkpoint does not get a larger one's defaults, nor a mode another's."""

    def settled(family: str, **fields: Any) -> tuple[Any, ...]:
        job = ask(families[family], **{"prompt": "x"} | fields)
        prompt, sampling = job.prompt, job.sampling
        schedule = sampling.schedule
        return (
            (prompt.width, prompt.height, prompt.num_frames, prompt.use_system_prompt),
            (schedule.num_inference_steps, sampling.guidance_scale, schedule.flow_shift, schedule.use_karras_sigmas),
        )

    still, robot = {"num_frames": 1}, {"image": LARGE, "action": POLICY}
    assert settled("nano") == ((1280, 720, 189, True), (35, 6.0, 10.0, False))
    assert settled("nano", **still) == ((1280, 720, 1, True), (50, 6.0, 1.0, True))
    assert settled("nano", **robot) == ((832, 480, 17, False), (30, 1.0, 1.0, True))
    assert settled("super", image=LARGE) == settled("nano", video=PICTURES) == settled("nano")
    assert settled("edge") == ((832, 480, 121, True), (20, 6.0, 12.0, False))
    assert settled("edge", **still) == ((832, 480, 1, True), (20, 6.0, 12.0, False))
    assert settled("nano-policy-droid", **robot) == ((832, 480, 17, False), (4, 3.0, 5.0, False))
    assert settled("super-t2i-4step") == ((1280, 720, 1, True), (4, 1.0, 1.0, False))
    assert settled("super-i2v-4step") == ((1280, 720, 189, True), (4, 1.0, 1.0, False))
    assert settled("nano", use_karras_sigmas=True)[1] == (35, 6.0, 1.0, True)
    assert settled("nano", flow_shift=3.0, use_karras_sigmas=True)[1] == (35, 6.0, 3.0, True)
    assert ask(families["nano"], prompt="x").sampling.latent_shape == (1, 48, 48, 45, 80)


def test_a_seed_is_drawn_and_kept(snapshot: Path) -> None:
    assert len({ask(snapshot, prompt="x").sampling.seed for _ in range(8)}) == 8
    assert ask(snapshot, prompt="x", seed=5).sampling.seed == 5


def test_guidance_one_takes_no_second_branch(snapshot: Path) -> None:
    assert ask(snapshot, **GOOD).sampling.guided
    assert not ask(snapshot, **GOOD, guidance_scale=1.0).sampling.guided


ABSENT = [
    ("edge", {"enable_sound": True}, "enable_sound", r"\(edge\) was trained without sound"),
    ("nano-policy-droid", {"enable_sound": True}, "enable_sound", "trained without sound"),
    ("super-t2i-4step", {"enable_sound": True}, "enable_sound", "pictures and clips only"),
    ("super-i2v-4step", {"enable_sound": True}, "enable_sound", "pictures and clips only"),
    ("super-i2v-4step", {"image": PICTURES[0], "action": POLICY}, "action", "pictures and clips only"),
    ("super-i2v-4step", {"guidance_scale": 6.0}, "guidance_scale", "guidance built in: 1, got 6.0"),
    ("super-i2v-4step", {"num_inference_steps": 5}, "num_inference_steps", "takes 4 steps, got 5"),
    ("super-i2v-4step", {"negative_prompt": "dark"}, "negative_prompt", "built in; leave it out"),
    ("super-i2v-4step", {"guidance_interval": (400, 1000)}, "guidance_interval", "leave it out"),
    ("super-i2v-4step", {"flow_shift": 3.0}, "flow_shift", "leave it out"),
    ("super-i2v-4step", {"use_karras_sigmas": True}, "use_karras_sigmas", "leave it out"),
]


@pytest.mark.parametrize(("family", "fields", "field", "message"), ABSENT)
def test_what_a_checkpoint_has_not_is_refused_by_name(
    families: dict[str, Path], family: str, fields: dict[str, Any], field: str, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        ask(families[family], prompt="x", **fields)
    assert caught.value.field == field
    assert ask(families[family], prompt="x").request_id


def test_a_snapshot_without_its_sound_folder_is_refused_by_name(snapshot: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(snapshot, tmp_path / "silent", ignore=shutil.ignore_patterns("sound_tokenizer"))
    with pytest.raises(RequestError, match="enable_sound: the snapshot has no sound_tokenizer folder"):
        ask(tmp_path / "silent", prompt="x", enable_sound=True)


def test_given_actions_become_exactly_the_chunk() -> None:
    def given(**action: Any) -> Any:
        request = GenerationRequest.parse(prompt="x", image=PICTURES[0], action=FORWARD | action)
        return sources_of(request)["actions"].tolist()

    rows = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    assert given(raw_actions=rows) == rows
    assert given(raw_actions=rows, chunk_size=2) == rows[:2]
    assert given(raw_actions=rows, chunk_size=5) == [*rows, rows[-1], rows[-1]]


def test_only_the_frames_that_are_needed_are_kept() -> None:
    long = np.arange(40, dtype=np.uint8)[:, None, None, None].repeat(16, 1).repeat(16, 2).repeat(3, 3)

    def kept(**fields: Any) -> list[int]:
        frames = GenerationRequest.parse(prompt="x", video=long, **fields).frames
        assert frames is not None
        return frames[:, 0, 0, 0].tolist()

    assert kept() == [0, 1, 2, 3, 4]
    assert kept(condition_frame_indexes_vision=[0]) == [0]
    assert kept(condition_frame_indexes_vision=[2], condition_video_keep="last") == list(range(31, 40))
    assert kept(action=POLICY) == [0]
    assert kept(action=INVERSE | {"chunk_size": 6}) == [0, 1, 2, 3, 4, 5, 6]


def test_a_file_that_cannot_be_encoded_here_is_refused_before_any_work(
    snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(RequestError, match="output: mp4 needs PyAV: pip install av"):
        ask(snapshot, **CLIP, output="mp4")
    with pytest.raises(RequestError, match="video: the clip: reading video needs PyAV: pip install av"):
        ask(snapshot, **CLIP, video=b"\0\0\0\x20ftypisom")
    assert ask(snapshot, **CLIP, output="npy").output == "npy"
