"""Pictures of every kind become RGB8, and what is no picture says so."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from nodes.media import MediaError, encode_frames, load_image

RGB = np.random.default_rng(3).integers(0, 256, (6, 9, 3), dtype=np.uint8)


def as_file(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "BMP", "TIFF"])
def test_lossless_files_come_in_as_they_are(kind: str, tmp_path: Path) -> None:
    data = as_file(Image.fromarray(RGB), kind, **({"lossless": True} if kind == "WEBP" else {}))
    file = tmp_path / "wrong_name.jpg"
    file.write_bytes(data)
    for source in (data, file, str(file), Image.open(file)):
        assert np.array_equal(load_image(source), RGB)


def test_exif_orientation_is_applied() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned a quarter clockwise
    data = as_file(Image.fromarray(RGB), "PNG", exif=exif)
    assert np.array_equal(load_image(data), np.rot90(RGB, -1))


def test_alpha_is_composited_on_black() -> None:
    rgba = np.dstack([RGB, np.where(np.arange(9) < 4, 0, 255)[None].repeat(6, 0).astype(np.uint8)])
    loaded = load_image(as_file(Image.fromarray(rgba)))
    assert loaded[:, :4].sum() == 0
    assert np.array_equal(loaded[:, 4:], RGB[:, 4:])


@pytest.mark.parametrize("kind", ["JPEG", "TIFF", "WEBP"])
def test_photographs_that_say_how_to_turn_them_are_turned(kind: str) -> None:
    turned, whole = Image.fromarray(RGB.repeat(16, 0).repeat(16, 1)), Image.Exif()
    whole[0x0112] = 8  # a quarter against the clock
    data = as_file(turned, kind, exif=whole)
    assert load_image(data).shape == (9 * 16, 6 * 16, 3)
    assert np.abs(load_image(data).astype(int) - np.rot90(np.asarray(turned), 1).astype(int)).mean() < 24


def test_what_a_file_is_called_does_not_matter(tmp_path: Path) -> None:
    for name, kind in (("a.jpg", "PNG"), ("b.png", "GIF"), ("c", "BMP"), ("d.mp4", "PNG")):
        (tmp_path / name).write_bytes(as_file(Image.fromarray(RGB).quantize(256), kind))
        assert np.abs(load_image(tmp_path / name).astype(int) - RGB.astype(int)).mean() < 8, name


def test_printers_colours_become_rgb8_from_jpeg_too() -> None:
    cmyk = Image.fromarray(RGB.repeat(16, 0).repeat(16, 1)).convert("CMYK")
    loaded = load_image(as_file(cmyk, "JPEG", quality=98))
    assert np.abs(loaded.astype(int) - np.asarray(cmyk.convert("RGB")).astype(int)).mean() < 24


def test_sixteen_bit_colours_are_scaled() -> None:
    """Written by hand, because PIL reads such files and does not write them."""
    import struct
    import zlib

    row = b"\0" + b"".join(struct.pack(">HHH", value, 0, 65535) for value in (0, 257 * 100, 65535))

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 3, 1, 16, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(row)) + chunk(b"IEND", b"")
    assert load_image(b"\x89PNG\r\n\x1a\n" + parts)[0].tolist() == [[0, 0, 255], [100, 0, 255], [255, 0, 255]]


@pytest.mark.parametrize("mode", ["L", "P", "1", "CMYK", "LA", "RGBA"])
def test_every_mode_becomes_rgb8(mode: str) -> None:
    image = Image.fromarray(RGB).convert(mode)
    loaded = load_image(as_file(image, "TIFF" if mode == "CMYK" else "PNG"))
    assert loaded.shape == (6, 9, 3)
    assert loaded.dtype == np.uint8
    assert np.array_equal(loaded, np.asarray(image.convert("RGB")))


def test_sixteen_bit_grey_is_scaled_and_not_clipped() -> None:
    grey = np.array([[0, 257 * 100, 257 * 200, 65535]], dtype=np.uint16)
    assert load_image(as_file(Image.fromarray(grey)))[0, :, 0].tolist() == [0, 100, 200, 255]


@pytest.mark.parametrize(
    "data", [b"", b"text", as_file(Image.fromarray(RGB))[:60], as_file(Image.fromarray(RGB), "JPEG")[:200]]
)
def test_what_is_no_whole_picture_is_refused(data: bytes) -> None:
    with pytest.raises(MediaError) as caught:
        load_image(data)
    assert "\n" not in str(caught.value)


def test_a_picture_file_takes_one_frame() -> None:
    with pytest.raises(MediaError, match="a png file holds one frame, not 2"):
        encode_frames(np.stack([RGB, RGB]), "png", 24.0)
