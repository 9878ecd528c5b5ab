"""Clips of every kind become the frames that are needed; what is no clip says so. Every file is made here."""

from __future__ import annotations

import io
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from nodes import clips
from nodes.clips import load_clip
from nodes.media import MediaError, encode_frames, load_image


def greys(count: int, size: tuple[int, int] = (32, 48)) -> np.ndarray:
    """Frames that can be told apart after lossy coding: frame i is grey 10 * i + 10."""
    values = np.arange(count, dtype=np.uint8) * 10 + 10
    return np.broadcast_to(values[:, None, None, None], (count, *size, 3)).copy()


def seen(frames: np.ndarray) -> list[int]:
    """Which of `greys` these are."""
    return [round((float(frame.mean()) - 10) / 10) for frame in frames]


def video(
    container: str,
    codec: str,
    frames: np.ndarray,
    *,
    pixels: str = "yuv420p",
    times: list[int] | None = None,
    options: dict[str, str] | None = None,
) -> bytes:
    """A file of that container; `times` are presentation times in frames, where they are not even."""
    stream = io.BytesIO()
    with av.open(stream, "w", format=container, options=options or {}) as file:
        video: Any = file.add_stream(codec, rate=24)
        video.height, video.width, video.pix_fmt = frames.shape[1], frames.shape[2], pixels
        video.codec_context.time_base = Fraction(1, 24)
        for index, frame in enumerate(frames):
            picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
            picture.pts = times[index] if times else index
            picture.time_base = Fraction(1, 24)
            file.mux(video.encode(picture))
        file.mux(video.encode())
    return stream.getvalue()


def animation(kind: str, frames: np.ndarray) -> bytes:
    stream = io.BytesIO()
    first, *rest = [Image.fromarray(frame) for frame in frames]
    options = {"lossless": True} if kind == "WEBP" else {}
    first.save(stream, kind, save_all=True, append_images=rest, duration=40, **options)
    return stream.getvalue()


CLIP = greys(9)
FILES: dict[str, Callable[[], bytes]] = {
    "mp4": lambda: encode_frames(CLIP, "mp4", 24.0),
    "mov": lambda: video("mov", "libx264", CLIP),
    "webm": lambda: video("webm", "libvpx-vp9", CLIP),
    "mkv": lambda: video("matroska", "libx264", CLIP),
    "avi": lambda: video("avi", "mpeg4", CLIP),
    "ten bits": lambda: video("mp4", "libx264", CLIP, pixels="yuv420p10le"),
    "no duration": lambda: video("webm", "libvpx-vp9", CLIP, options={"live": "1"}),
    "raw stream": lambda: video("h264", "libx264", CLIP),
    "variable frame rate": lambda: video("mp4", "libx264", CLIP, times=[0, 1, 2, 10, 11, 40, 41, 90, 200]),
    "gif": lambda: animation("GIF", CLIP),
    "webp": lambda: animation("WEBP", CLIP),
    "apng": lambda: animation("PNG", CLIP),
}


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("suffix", [".mp4", ".png", ""])
def test_every_kind_of_file_gives_its_frames_whatever_it_is_called(kind: str, suffix: str, tmp_path: Path) -> None:
    data = FILES[kind]()
    file = tmp_path / f"clip{suffix}"
    file.write_bytes(data)
    for source in (file, str(file), data):
        assert seen(load_clip(source, 100)) == list(range(9))
        assert seen(load_clip(source, 4)) == [0, 1, 2, 3]
        assert seen(load_clip(source, 4, "last")) == [5, 6, 7, 8]
    assert load_clip(data, 1).shape == (1, 32, 48, 3)


def test_the_file_without_a_duration_has_none() -> None:
    """Else the case above would show nothing."""
    with av.open(io.BytesIO(FILES["no duration"]())) as container:
        assert container.duration is None
        assert container.streams.video[0].frames == 0
    with av.open(io.BytesIO(FILES["variable frame rate"]())) as container:
        assert len({packet.duration for packet in container.demux(video=0) if packet.dts is not None}) > 1


def test_a_folder_of_frames_is_read_in_the_order_of_its_numbers(tmp_path: Path) -> None:
    for index, frame in enumerate(greys(12)):
        Image.fromarray(frame).save(tmp_path / f"frame{index}.png")
    (tmp_path / ".hidden").write_text("not a picture")
    assert seen(load_clip(tmp_path, 100)) == list(range(12))
    assert seen(load_clip(tmp_path, 2, "last")) == [10, 11]
    (tmp_path / "frame3.png").write_text("not a picture")
    with pytest.raises(MediaError, match=r"frame3.png: not a picture"):
        load_clip(tmp_path, 5)
    assert seen(load_clip(tmp_path, 3)) == [0, 1, 2]


def test_arrays_and_lists_of_pictures_are_clips() -> None:
    assert seen(load_clip(CLIP, 3)) == [0, 1, 2]
    assert seen(load_clip(CLIP, 3, "last")) == [6, 7, 8]
    assert seen(load_clip([Image.fromarray(frame) for frame in CLIP], 2)) == [0, 1]
    assert seen(load_clip(list(CLIP), 2, "last")) == [7, 8]


@pytest.mark.parametrize("quarter_turns", [1, 2, 3])
def test_a_phone_that_was_held_otherwise_is_turned_back(quarter_turns: int) -> None:
    """The turn is written into the file as a display matrix, as phones do."""
    frames = greys(2)
    frames[:, :16, :24] = 255
    data = bytearray(video("mov", "libx264", frames))
    at = data.index(b"tkhd") + 44
    assert data[at : at + 4] == b"\x00\x01\x00\x00", "the identity matrix is not where the test looks for it"
    one, minus, zero = (value.to_bytes(4, "big", signed=True) for value in (1 << 16, -1 << 16, 0))
    turned = {1: (zero, one, minus, zero), 2: (minus, zero, zero, minus), 3: (zero, minus, one, zero)}[quarter_turns]
    data[at : at + 8], data[at + 12 : at + 20] = turned[0] + turned[1], turned[2] + turned[3]
    loaded = load_clip(bytes(data), 2)
    expected = np.rot90(frames, -quarter_turns, axes=(1, 2))
    assert loaded.shape == expected.shape
    assert np.abs(loaded.astype(int) - expected.astype(int)).mean() < 6


def test_a_truncated_tail_costs_the_frames_behind_it_and_no_others(tmp_path: Path) -> None:
    """The index is in front, the last third of the pictures is missing."""
    noise = np.random.default_rng(0).integers(0, 256, (30, 64, 64, 3), dtype=np.uint8)
    data = encode_frames(noise, "mp4", 24.0)
    file = tmp_path / "cut.mp4"
    file.write_bytes(data[: len(data) * 2 // 3])
    whole = load_clip(data, 30)
    assert np.array_equal(load_clip(file, 5), whole[:5])
    for limit, keep in ((30, "first"), (5, "last")):
        with pytest.raises(MediaError, match=r"cut.mp4: the clip is damaged after \d+ frames"):
            load_clip(file, limit, keep)


def a_file(name: str, content: bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


def silent_wav() -> bytes:
    from nodes.media import encode_wav

    return encode_wav(np.zeros((2, 4800), np.float32), 48000)


PICTURE = encode_frames(CLIP[:1], "png", 24.0)
NO_CLIP = [
    (a_file("notes.mp4", b"Dear diary"), "notes.mp4: not a clip that can be read"),
    (a_file("empty.mp4", b""), "empty.mp4: not a clip that can be read"),
    (a_file("picture.mp4", PICTURE), "picture.mp4: a picture and not a clip"),
    (a_file("sound.mp4", silent_wav()), "sound.mp4: there is no video in it"),
    (a_file("head.mp4", encode_frames(CLIP, "mp4", 24.0)[:40]), "head.mp4: there is no video in it"),
    (a_file("cut.gif", animation("GIF", CLIP)[:-200]), "cut.gif: "),
    (lambda folder: folder / "absent.mp4", "absent.mp4: no such file or folder"),
    (lambda folder: folder, "there is no frame in it"),
    (lambda folder: np.zeros((2, 4, 4), np.uint8), r"uint8 \[F, h, w, 3\], got uint8 \[2, 4, 4\]"),
    (lambda folder: [CLIP[0], CLIP[0, :4]], r"differ in size \(48x32 and 48x4\)"),
    (lambda folder: [], "there is no frame in it"),
]


@pytest.mark.parametrize(("make", "message"), NO_CLIP, ids=[case[1][:24] for case in NO_CLIP])
def test_what_is_no_clip_is_refused_by_name(make: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(MediaError, match=message) as caught:
        load_clip(make(tmp_path), 100)
    assert "\n" not in str(caught.value)


def test_a_clip_too_large_for_memory_is_refused_before_it_fills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clips, "MAX_CLIP_BYTES", 4 * CLIP[0].nbytes)
    assert len(load_clip(FILES["mp4"](), 4)) == 4
    with pytest.raises(MediaError, match="5 frames take more than"):
        load_clip(FILES["mp4"](), 5)
    monkeypatch.setattr(clips, "MAX_PIXELS", 100)
    for kind in ("mp4", "gif"):
        with pytest.raises(MediaError, match="48x32 is more than 100 pixels"):
            load_clip(FILES[kind](), 1)


@pytest.mark.parametrize("kind", ["gif", "webp", "apng"])
def test_an_animation_where_a_picture_is_wanted_gives_its_first_frame(kind: str) -> None:
    assert seen(load_image(FILES[kind]())[None]) == [0]


def test_a_video_or_a_folder_where_a_picture_is_wanted_says_so(tmp_path: Path) -> None:
    for data in (FILES["mp4"](), FILES["webm"]()):
        with pytest.raises(MediaError, match="not a picture that can be read"):
            load_image(data)
    with pytest.raises(MediaError, match="a folder and not a picture"):
        load_image(tmp_path)


def test_arrays_are_the_caller_s_to_write_into_again() -> None:
    camera = np.zeros((2, 4, 4, 3), np.uint8)
    clip, picture = load_clip(camera, 2), load_image(camera[0])
    camera[:] = 255
    assert (clip.max(), picture.max()) == (0, 0)


def test_a_gif_that_ends_inside_a_later_frame_is_damaged_and_its_first_frames_are_not() -> None:
    whole = animation("GIF", np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3), dtype=np.uint8))
    second = whole.index(b"\x2c", whole.index(b"\x2c") + 1)
    for end in range(second, len(whole) - 200, 97):
        try:
            assert len(load_clip(whole[:end], 1)) == 1
            load_clip(whole[:end], 4)
        except MediaError as error:
            assert "\n" not in str(error)


def test_a_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    (tmp_path / "large.gif").write_bytes(animation("GIF", np.zeros((2, 32, 32, 3), np.uint8)))
    with pytest.raises(MediaError, match=r"large\.gif"):
        load_clip(tmp_path / "large.gif", 1)
