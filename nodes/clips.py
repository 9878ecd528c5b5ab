"""Clips in: a file, a folder of frames or arrays become RGB8 frames, as many as are needed and no more.

What a file is called does not matter; what is in it does.
"""

from __future__ import annotations

import io
import re
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image, ImageSequence, UnidentifiedImageError

from .media import MAX_PIXELS, ImageSource, MediaError, load_image, to_rgb8

MAX_CLIP_BYTES = 1 << 31
# What Pillow raises over damaged files, depending on the format and the place.
PILLOW_ERRORS = (OSError, SyntaxError, ValueError, IndexError, struct.error)
Keep = Literal["first", "last"]
ClipSource = str | Path | bytes | np.ndarray | Sequence[ImageSource]


def load_clip(source: ClipSource, limit: int, keep: Keep = "first") -> np.ndarray:
    """The first or last `limit` frames of a clip as RGB8 `[F, h, w, 3]`, fewer if it has fewer.

    Frames are taken one after another, whatever their times say.

    Args:
        source: Path or bytes of a video file (MP4, MOV, WebM, ...) or an animated GIF, WebP or PNG; a folder of
            pictures, in the order of the numbers in their names; frames `[F, h, w, 3]` uint8; a list of pictures.
        limit: Frames wanted.
        keep: From which end. A damaged end does no harm to the first frames.

    Raises:
        MediaError: it cannot be read, or is too large; the message says which and why.
    """
    if isinstance(source, np.ndarray):
        if source.dtype != np.uint8 or source.ndim != 4 or source.shape[3] != 3 or 0 in source.shape:
            raise MediaError(f"a clip array must be uint8 [F, h, w, 3], got {source.dtype} {list(source.shape)}")
        return (source[:limit] if keep == "first" else source[-limit:]).copy()  # the caller may write into theirs
    if isinstance(source, str | Path) and Path(source).is_dir():
        name, frames = str(source), _folder(Path(source), limit, keep)
    elif isinstance(source, str | Path | bytes):
        name = "the clip" if isinstance(source, bytes) else str(source)
        frames = _file(source, name)
    else:
        name, frames = "the clip", (load_image(picture) for picture in source)
    return _collect(frames, name, limit, keep)


def _collect(frames: Iterable[np.ndarray], name: str, limit: int, keep: Keep) -> np.ndarray:
    kept: deque[np.ndarray] = deque(maxlen=limit)
    for frame in frames:
        if kept and frame.shape != kept[0].shape:
            sizes = " and ".join(f"{shape[1]}x{shape[0]}" for shape in (kept[0].shape, frame.shape))
            raise MediaError(f"{name}: its frames differ in size ({sizes})")
        kept.append(frame)
        if len(kept) * frame.nbytes > MAX_CLIP_BYTES:
            raise MediaError(f"{name}: {len(kept)} frames take more than {MAX_CLIP_BYTES >> 30} GiB in memory")
        if keep == "first" and len(kept) == limit:
            break
    if not kept:
        raise MediaError(f"{name}: there is no frame in it")
    return np.stack(kept)


def _folder(folder: Path, limit: int, keep: Keep) -> Iterator[np.ndarray]:
    files = sorted((file for file in folder.iterdir() if not file.name.startswith(".")), key=_by_number)
    chosen = files[:limit] if keep == "first" else files[-limit:]
    return (load_image(file) for file in chosen)


def _by_number(file: Path) -> list[Any]:
    """Frame 2 comes before frame 10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", file.name)]


def _file(source: str | Path | bytes, name: str) -> Iterator[np.ndarray]:
    """Frames of an animated picture or of a video, told apart by their content."""
    if not isinstance(source, bytes) and not Path(source).is_file():
        raise MediaError(f"{name}: no such file or folder")
    try:
        image = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
    except (UnidentifiedImageError, OSError):
        yield from _video(source, name)
        return
    except Image.DecompressionBombError as error:
        raise MediaError(f"{name}: {error}") from None
    with image:
        if image.width * image.height > MAX_PIXELS:
            raise MediaError(f"{name}: {image.width}x{image.height} is more than {MAX_PIXELS} pixels")
        try:
            if not getattr(image, "is_animated", False):
                raise MediaError(f"{name}: a picture and not a clip")
            for frame in ImageSequence.Iterator(image):
                yield to_rgb8(frame)
        except PILLOW_ERRORS as error:
            if isinstance(error, MediaError):
                raise
            raise MediaError(f"{name}: the clip is damaged ({error})") from None


def _video(source: str | Path | bytes, name: str) -> Iterator[np.ndarray]:
    try:
        import av
    except ImportError:
        raise MediaError(f"{name}: reading video needs PyAV: pip install av") from None
    count = 0
    try:
        with av.open(io.BytesIO(source) if isinstance(source, bytes) else str(source)) as container:
            if not container.streams.video:
                raise MediaError(f"{name}: there is no video in it")
            stream = container.streams.video[0]
            if stream.width * stream.height > MAX_PIXELS:
                raise MediaError(f"{name}: {stream.width}x{stream.height} is more than {MAX_PIXELS} pixels")
            stream.thread_type = "AUTO"
            for packet in container.demux(stream):
                cut = packet.is_corrupt  # the file ends inside it
                # An empty packet makes the decoder give what it has held back.
                for frame in stream.decode(None if cut else packet):
                    count += 1
                    # Phones store pictures as the sensor lies and say how to turn them.
                    yield np.ascontiguousarray(np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90))
                if cut:
                    raise MediaError(f"{name}: the clip is damaged after {count} frames (its end is missing)")
    except (av.FFmpegError, ValueError) as error:
        if isinstance(error, MediaError):
            raise
        reason = getattr(error, "strerror", None) or error
        if count == 0:
            raise MediaError(f"{name}: not a clip that can be read ({reason})") from None
        raise MediaError(f"{name}: the clip is damaged after {count} frames ({reason})") from None
