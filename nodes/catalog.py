"""The kinds of node that there are, by name. Imported only when built: a prefill actor must not pay for diffusers."""

from __future__ import annotations

import importlib

from .base import Node
from .job import NodeSettings

NODES = {
    "encoder": "nodes.encoder:EncoderNode",
    "prefill": "nodes.prefill:PrefillNode",
    "denoise": "nodes.denoise:DenoiseNode",
    "vae_decode": "nodes.vae_decode:VAEDecodeNode",
    "sound_decode": "nodes.sound_decode:SoundDecodeNode",
}


def build_node(kind: str, settings: NodeSettings) -> Node:
    """The node of that kind, in this process."""
    module, name = NODES[kind].split(":")
    return getattr(importlib.import_module(module), name)(settings)
