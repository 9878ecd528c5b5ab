"""The graph of each mode. A new mode is a new entry here; the executor knows none of them."""

from __future__ import annotations

from .request import GenerationRequest
from .spec import Edge, Graph, NodeSpec

_ENCODE_TEXT = NodeSpec("encode_text", "encoder", "encode_text", {}, "token_ids")
_PREFILL = NodeSpec("prefill", "prefill", "prefill", {"ids": "token_ids"}, "kv_handles")
_DENOISE = NodeSpec("denoise", "denoise", "denoise", {"handles": "kv_handles"}, "latents", streaming=True)
_DECODE = NodeSpec("decode", "vae_decode", "decode", {"latents": "latents"}, "media")
_ENCODE_IMAGE = NodeSpec("encode_image", "encoder", "encode_image", {"image": "image"}, "latents")
_DENOISE_ANCHORED = NodeSpec(
    "denoise", "denoise", "denoise", {"handles": "kv_handles", "anchor": "latents"}, "latents", streaming=True
)

_CHAIN = (
    Edge("encode_text", "prefill", "ids"),
    Edge("prefill", "denoise", "handles"),
    Edge("denoise", "decode", "latents"),
)
_FROM_TEXT = (_ENCODE_TEXT, _PREFILL, _DENOISE, _DECODE)

MODES: dict[str, Graph] = {
    "text-to-image": Graph("text-to-image", _FROM_TEXT, _CHAIN),
    "text-to-video": Graph("text-to-video", _FROM_TEXT, _CHAIN),
    # The image is encoded while the text is prefilled: nothing connects the two before denoise.
    "image-to-video": Graph(
        "image-to-video",
        (_ENCODE_TEXT, _ENCODE_IMAGE, _PREFILL, _DENOISE_ANCHORED, _DECODE),
        (
            *_CHAIN,
            Edge("request.image", "encode_image", "image"),
            Edge("encode_image", "denoise", "anchor"),
        ),
    ),
}


def mode_of(request: GenerationRequest) -> str:
    """The mode that a request's fields amount to."""
    if request.image is not None:
        return "image-to-video"
    return "text-to-image" if request.num_frames == 1 else "text-to-video"
