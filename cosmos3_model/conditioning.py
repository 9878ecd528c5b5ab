"""A user's picture or clip to the pixels that the VAE encodes, each kind as diffusers prepares it.

An *image* is the first frame of a clip to come. A *clip* gives several clean latent frames. A *scene* is what a robot
sees: it is never cropped or enlarged, but set onto a canvas of one of the sizes that the model was trained with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from PIL import Image

from .actions import CANVASES

Kind = Literal["image", "clip", "scene"]
LATENT = 16  # pixels that scenes are rounded to: a latent row or column


@dataclass(frozen=True)
class Conditioning:
    """How the given frames become clean latent frames.

    Attributes:
        kind: See the module.
        height: Of the canvas, in pixels.
        width: Likewise.
        num_frames: Pixel frames to encode; where fewer are given, the last one is repeated.
        latent_frames: Which of the latent frames stay clean; `num_frames` reaches no further than they need, because
            the VAE's encoder looks only backwards in time.
        content: Rows and columns of the canvas that hold the picture (of a scene; else all of it).
    """

    kind: Kind
    height: int
    width: int
    num_frames: int
    latent_frames: tuple[int, ...]
    content: tuple[int, int] | None = None

    @property
    def latent_content(self) -> tuple[int, int] | None:
        """Latent rows and columns of `content`; what lies beyond is padding and is cut off."""
        return (max(self.content[0] // LATENT, 1), max(self.content[1] // LATENT, 1)) if self.content else None


def scene_conditioning(
    source: tuple[int, int], tier: int, num_frames: int, latent_frames: tuple[int, ...]
) -> Conditioning:
    """The canvas for a scene of `source` rows and columns, and the place that the scene takes on it."""
    rows, columns = (side // LATENT * LATENT for side in source)
    height, width = min(CANVASES[tier], key=lambda size: abs(size[0] / size[1] - rows / columns))
    scale = min(width / columns, height / rows, 1.0)
    content = (max(1, int(scale * rows + 0.5)), max(1, int(scale * columns + 0.5)))
    return Conditioning("scene", height, width, num_frames, latent_frames, content)


def prepare(frames: np.ndarray, conditioning: Conditioning) -> torch.Tensor:
    """RGB8 `[F, h, w, 3]` of any size to float32 `[1, 3, num_frames, height, width]` in [-1, 1]."""
    frames = frames[: conditioning.num_frames]
    if conditioning.kind == "image":
        pixels = fit_image(frames[0], conditioning.height, conditioning.width)
    elif conditioning.kind == "clip":
        pixels = _fit_clip(frames, conditioning.height, conditioning.width)
    else:
        pixels = _fit_scene(frames, conditioning)
    missing = conditioning.num_frames - len(pixels)
    return torch.cat([pixels, pixels[-1:].expand(missing, -1, -1, -1)]).movedim(0, 1)[None]


def fit_image(image: np.ndarray, height: int, width: int) -> torch.Tensor:
    """RGB8 `[h, w, 3]` to `[1, 3, height, width]` in [-1, 1]: cover-scale, antialiased, centre crop, 8 bits."""
    pixels = torch.from_numpy(np.array(image, dtype=np.uint8)).permute(2, 0, 1)[None].float()
    source_height, source_width = pixels.shape[-2:]
    scale = max(width / source_width, height / source_height)
    size = (math.ceil(scale * source_height), math.ceil(scale * source_width))
    pixels = torch.nn.functional.interpolate(pixels, size=size, mode="bilinear", align_corners=False, antialias=True)
    top, left = round((size[0] - height) / 2), round((size[1] - width) / 2)
    return pixels[:, :, top : top + height, left : left + width].round().clamp(0, 255) / 127.5 - 1.0


def _fit_clip(frames: np.ndarray, height: int, width: int) -> torch.Tensor:
    """Cover-scale and centre crop with PIL's antialiased filter, as diffusers resizes clips of the canvas's shape."""
    rows, columns = frames.shape[1:3]
    scale = max(width / columns, height / rows)
    kept_columns, kept_rows = min(width / scale, columns), min(height / scale, rows)
    left, top = (columns - kept_columns) / 2, (rows - kept_rows) / 2
    return _resize(frames, height, width, (left, top, left + kept_columns, top + kept_rows))


def _fit_scene(frames: np.ndarray, conditioning: Conditioning) -> torch.Tensor:
    """Shrink to the content's size, then mirror (or repeat) to the right and below until the canvas is full."""
    assert conditioning.content is not None
    rows, columns = (side // LATENT * LATENT for side in frames.shape[1:3])
    pixels = _resize(frames, rows, columns)
    if conditioning.content != (rows, columns):
        pixels = torch.nn.functional.interpolate(
            pixels, size=conditioning.content, mode="bicubic", align_corners=False, antialias=True
        )
    right, below = conditioning.width - conditioning.content[1], conditioning.height - conditioning.content[0]
    # Mirroring needs more pixels than it adds.
    mode = "replicate" if right >= conditioning.content[1] or below >= conditioning.content[0] else "reflect"
    return torch.nn.functional.pad(pixels, (0, right, 0, below), mode=mode) if right or below else pixels


def _resize(
    frames: np.ndarray, height: int, width: int, box: tuple[float, float, float, float] | None = None
) -> torch.Tensor:
    """`[F, h, w, 3]`, or the part of it in `box`, to `[F, 3, height, width]` in [-1, 1], through 8 bits."""
    images = [Image.fromarray(frame).resize((width, height), Image.Resampling.BILINEAR, box) for frame in frames]
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2)
    return 2.0 * (pixels.float() / 255.0) - 1.0
