"""Pictures in, pictures, clips and sound out: what a user has becomes RGB8, and RGB8 the file that they want."""

from __future__ import annotations

import io
import tempfile
import wave
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from .job import OutputFormat

PIL_FORMATS = {"png": "PNG", "jpeg": "JPEG", "webp": "WEBP"}
SUFFIXES: dict[str, OutputFormat] = {
    ".png": "png",
    ".jpg": "jpeg",
    ".jpeg": "jpeg",
    ".webp": "webp",
    ".mp4": "mp4",
    ".npy": "npy",
    "": "png_frames",
}
JPEG_QUALITY = 95
AAC_BIT_RATE = 192_000
MAX_PIXELS = 1 << 26
ImageSource = str | Path | bytes | np.ndarray | Image.Image


class MediaError(ValueError):
    """A picture or clip that cannot be read or written; the message says which and why."""


def load_image(source: ImageSource) -> np.ndarray:
    """A picture from a path, a file's bytes, a PIL image or an RGB8 array to RGB8 `[h, w, 3]`.

    EXIF orientation is applied, alpha is composited on black, 16-bit greys are scaled to 8.

    Raises:
        MediaError: not a picture, or one of more than 67 million pixels.
    """
    if isinstance(source, np.ndarray):
        if source.dtype != np.uint8 or source.ndim != 3 or source.shape[2] != 3 or 0 in source.shape:
            raise MediaError(f"an image array must be uint8 [h, w, 3], got {source.dtype} {list(source.shape)}")
        return source.copy()  # the caller may go on to write into theirs
    name = "the image" if isinstance(source, bytes | Image.Image) else str(source)
    try:
        if isinstance(source, Image.Image):
            return to_rgb8(source)
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            if image.width * image.height > MAX_PIXELS:
                raise MediaError(f"{name}: {image.width}x{image.height} is more than {MAX_PIXELS} pixels")
            return to_rgb8(image)
    except FileNotFoundError:
        raise MediaError(f"{name}: no such file") from None
    except IsADirectoryError:
        raise MediaError(f"{name}: a folder and not a picture") from None
    except UnidentifiedImageError:
        raise MediaError(f"{name}: not a picture that can be read (PNG, JPEG, WebP, GIF, ...)") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        if isinstance(error, MediaError):
            raise
        raise MediaError(f"{name}: the picture is damaged ({error})") from None


def to_rgb8(image: Image.Image) -> np.ndarray:
    """A PIL image of any mode as RGB8 `[h, w, 3]`; `load_image` says how."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        grey = (np.asarray(image).astype(np.float64) / 257).round().clip(0, 255).astype(np.uint8)
        return np.repeat(grey[..., None], 3, axis=2)
    if "transparency" in image.info or "A" in image.getbands() or "a" in image.getbands():
        rgba = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", rgba.size, (0, 0, 0, 255)), rgba)
    return np.asarray(image.convert("RGB")).copy()


def encode_frames(frames: np.ndarray, output: OutputFormat, fps: float) -> Any:
    """RGB8 frames `[T, H, W, 3]` in the form called `output`; the same frames give the same bytes.

    Returns:
        The frames for `np`, a list of PNG files for `png_frames`, else the bytes of one file.
    """
    if output == "np":
        return frames
    if output == "png_frames":
        return [_encode_picture(frame, "png") for frame in frames]
    if output == "mp4":
        return _encode_mp4(frames, fps)
    if output == "npy":
        stream = io.BytesIO()
        np.save(stream, frames)
        return stream.getvalue()
    if len(frames) != 1:
        raise MediaError(f"a {output} file holds one frame, not {len(frames)}")
    return _encode_picture(frames[0], output)


def _encode_picture(frame: np.ndarray, output: str) -> bytes:
    stream = io.BytesIO()
    options = {"quality": JPEG_QUALITY} if output != "png" else {}
    Image.fromarray(frame).save(stream, PIL_FORMATS[output], **options)
    return stream.getvalue()


def _encode_mp4(frames: np.ndarray, fps: float) -> bytes:
    """H.264, yuv420p, index in front: plays in a browser while it loads."""
    import av

    # In a file, because moving the index to the front reads back what was written.
    with tempfile.TemporaryDirectory(prefix="cosmoray-") as folder:
        path = Path(folder) / "clip.mp4"
        with av.open(str(path), "w", options={"movflags": "faststart"}) as container:
            rate = Fraction(fps).limit_denominator(1001)
            # Same frames, same bytes: x264's output depends on the number of threads, and its macroblock tree
            # on what happened to be in memory.
            options = {"crf": "18", "threads": "1", "x264-params": "mbtree=0"}
            video: Any = container.add_stream("libx264", rate=rate, options=options)
            video.height, video.width, video.pix_fmt = frames.shape[1], frames.shape[2], "yuv420p"
            for frame in frames:
                container.mux(video.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            container.mux(video.encode())
        return path.read_bytes()


def mux_sound(mp4: bytes, sound: np.ndarray, rate: int) -> bytes:
    """An MP4 file with samples `[channels, N]` in [-1, 1] beside its pictures, which are copied as they are.

    AAC at `rate`, stereo (or mono); the same input gives the same bytes.
    """
    import av

    with tempfile.TemporaryDirectory(prefix="cosmoray-") as folder:
        path = Path(folder) / "clip.mp4"
        with (
            av.open(io.BytesIO(mp4)) as silent,
            av.open(str(path), "w", options={"movflags": "faststart"}) as container,
        ):
            video = container.add_stream_from_template(silent.streams.video[0])
            audio: Any = container.add_stream("aac", rate=rate, options={"threads": "1"})
            audio.layout, audio.bit_rate = ("stereo" if len(sound) == 2 else "mono"), AAC_BIT_RATE
            audio.codec_context.flags |= av.codec.context.Flags.bitexact
            for packet in silent.demux(video=0):
                if packet.dts is not None:  # the last one is empty and only flushes
                    packet.stream = video
                    container.mux(packet)
            frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(sound), format="fltp", layout=audio.layout.name)
            frame.sample_rate, frame.pts = rate, 0
            for frames in (frame, None):
                container.mux(audio.encode(frames))
        return path.read_bytes()


def encode_wav(sound: np.ndarray, rate: int) -> bytes:
    """A WAV file, 16 bits a sample, of samples `[channels, N]` in [-1, 1]."""
    stream = io.BytesIO()
    with wave.open(stream, "wb") as file:
        file.setnchannels(len(sound))
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((sound.T * 32767).round().clip(-32768, 32767).astype("<i2").tobytes())
    return stream.getvalue()


def missing_encoder(output: OutputFormat) -> str | None:
    """Why files of this kind cannot be written here, or None if they can."""
    if output != "mp4":
        return None
    try:
        import av

        for codec in ("libx264", "aac"):
            av.Codec(codec, "w")
    except ImportError:
        return "mp4 needs PyAV: pip install av"
    except ValueError:
        return "mp4 needs a PyAV built with libx264 and aac: pip install --force-reinstall av"
    return None
