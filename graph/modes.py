"""The graph of each mode. A new mode is a new entry here; the executor knows none of them."""

from __future__ import annotations

from cosmos3_model.config import SnapshotConfig
from cosmos3_model.families import lacks_actions, lacks_sound
from nodes.job import Job

from .defaults import ACTIONS, CLIPS, PICTURES, WITH_SOUND
from .spec import Edge, Graph, NodeSpec

_ENCODE_TEXT = NodeSpec("encode_text", "encoder", "encode_text", {}, "token_ids")
_PREFILL = NodeSpec("prefill", "prefill", "prefill", {"ids": "token_ids"}, "kv_handles")
_ENCODE_VISION = NodeSpec("encode_vision", "encoder", "encode_vision", {"frames": "frames"}, "latents")
_DECODE = NodeSpec("decode", "vae_decode", "decode", {"latents": "latents"}, "media")
_DECODE_SOUND = NodeSpec("decode_sound", "sound_decode", "decode", {"latents": "sound_latents"}, "sound")
_MUX = NodeSpec("mux", "sound_decode", "mux", {"media": "media", "sound": "sound"}, "media")

_VISION, _SOUND, _ACTION = ("vision", "latents"), ("sound", "sound_latents"), ("action", "actions")


def _denoise(*gives: tuple[str, str], anchor: bool = False, actions: bool = False) -> NodeSpec:
    takes = {"handles": "kv_handles"}
    if anchor:
        takes["anchor"] = "latents"
    if actions:
        takes["actions"] = "actions"
    return NodeSpec("denoise", "denoise", "denoise", takes, dict(gives), streaming=True)


_FROM_TEXT = (Edge("encode_text", "prefill", "ids"), Edge("prefill", "denoise", "handles"))
# The frames are encoded while the text is prefilled: nothing connects the two before denoise.
_FROM_FRAMES = (Edge("request.frames", "encode_vision", "frames"), Edge("encode_vision", "denoise", "anchor"))
_FROM_ACTIONS = (Edge("request.actions", "denoise", "actions"),)
_TO_MEDIA = (Edge("denoise.vision", "decode", "latents"),)
# Pictures and sound are decoded side by side.
_TO_SOUND = (
    Edge("denoise.sound", "decode_sound", "latents"),
    Edge("decode", "mux", "media"),
    Edge("decode_sound", "mux", "sound"),
)
_TEXT_NODES, _FRAME_NODES = (_ENCODE_TEXT, _PREFILL), (_ENCODE_TEXT, _ENCODE_VISION, _PREFILL)

MODES: dict[str, Graph] = {
    graph.name: graph
    for graph in (
        *(
            Graph(name, (*_TEXT_NODES, _denoise(_VISION), _DECODE), (*_FROM_TEXT, *_TO_MEDIA), {"media": "decode"})
            for name in ("text-to-image", "text-to-video")
        ),
        *(
            Graph(
                name,
                (*_FRAME_NODES, _denoise(_VISION, anchor=True), _DECODE),
                (*_FROM_TEXT, *_FROM_FRAMES, *_TO_MEDIA),
                {"media": "decode"},
            )
            for name in ("image-to-video", "video-to-video")
        ),
        Graph(
            "text-to-video-with-sound",
            (*_TEXT_NODES, _denoise(_VISION, _SOUND), _DECODE, _DECODE_SOUND, _MUX),
            (*_FROM_TEXT, *_TO_MEDIA, *_TO_SOUND),
            {"media": "mux", "sound": "decode_sound"},
        ),
        *(
            Graph(
                name,
                (*_FRAME_NODES, _denoise(_VISION, _SOUND, anchor=True), _DECODE, _DECODE_SOUND, _MUX),
                (*_FROM_TEXT, *_FROM_FRAMES, *_TO_MEDIA, *_TO_SOUND),
                {"media": "mux", "sound": "decode_sound"},
            )
            for name in ("image-to-video-with-sound", "video-to-video-with-sound")
        ),
        Graph(
            "policy",
            (*_FRAME_NODES, _denoise(_VISION, _ACTION, anchor=True), _DECODE),
            (*_FROM_TEXT, *_FROM_FRAMES, *_TO_MEDIA),
            {"media": "decode", "actions": "denoise.action"},
        ),
        Graph(
            "forward-dynamics",
            (*_FRAME_NODES, _denoise(_VISION, anchor=True, actions=True), _DECODE),
            (*_FROM_TEXT, *_FROM_FRAMES, *_FROM_ACTIONS, *_TO_MEDIA),
            {"media": "decode"},
        ),
        Graph(
            "inverse-dynamics",
            (*_FRAME_NODES, _denoise(_ACTION, anchor=True)),
            (*_FROM_TEXT, *_FROM_FRAMES),
            {"actions": "denoise.action"},
        ),
    )
}


def graph_of(job: Job) -> Graph:
    """The graph of a job's mode, without the node whose work the job's output does not want."""
    graph = MODES[job.mode]
    if job.mode.endswith(WITH_SOUND) and job.output != "mp4":
        return graph.without("mux", {"media": "decode", "sound": "decode_sound"})
    if job.mode == "policy" and job.output == "actions":
        return graph.without("decode", {"actions": "denoise.action"})
    return graph


def refusal(snapshot: SnapshotConfig, mode: str) -> str | None:
    """Why a snapshot cannot run a mode, or None if it can."""
    if mode in ACTIONS:
        return lacks_actions(snapshot)
    return lacks_sound(snapshot) if mode.endswith(WITH_SOUND) else None


def modes_of(snapshot: SnapshotConfig) -> list[str]:
    """The modes that a snapshot can run."""
    return [mode for mode in MODES if refusal(snapshot, mode) is None]


assert {mode.removesuffix(WITH_SOUND) for mode in MODES} == {*PICTURES, *CLIPS, *ACTIONS}
