"""The sound-decode node: samples equal the fused run's, and the clip's file holds them in time with the pictures."""

from __future__ import annotations

import io
import wave
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from conftest import PROMPTS, SIZE
from local import job_of, node

from cosmos3_model.sampling import NonFiniteError
from nodes.job import DeadlineExceeded
from nodes.media import encode_frames, encode_wav, mux_sound

FIELDS = {**PROMPTS, **SIZE, "num_frames": 17, "num_inference_steps": 2, "seed": 4, "enable_sound": True}
RATE = 48_000


@pytest.fixture(scope="module")
def decoder(snapshot: Path) -> Any:
    built = node("sound_decode", snapshot)
    built.warm_up()
    return built


def streams(mp4: bytes) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Pictures, samples and facts of a file, as a player has them."""
    with av.open(io.BytesIO(mp4)) as container:
        audio, video = container.streams.audio[0], container.streams.video[0]
        facts = {
            "codec": audio.codec.name,
            "rate": audio.rate,
            "layout": audio.layout.name,
            "audio seconds": float(audio.duration * audio.time_base),
            "video seconds": float(video.duration * video.time_base),
        }
        pictures = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video)])
        container.seek(0)
        samples = np.concatenate([frame.to_ndarray() for frame in container.decode(audio)], axis=1)
    return pictures, samples, facts


def test_samples_equal_the_fused_run(decoder: Any, fused_run: Any, snapshot: Path) -> None:
    run = fused_run(**FIELDS)
    samples = decoder.decode(job_of(snapshot, **FIELDS), run.sound_latents)
    assert np.array_equal(samples, run.sound.numpy())
    # 17 frames at 24 a second are 34000 samples, which take 18 latents of 1920.
    assert samples.shape == (2, 18 * 1920)


def test_a_job_out_of_time_is_not_started(decoder: Any, snapshot: Path) -> None:
    late = job_of(snapshot, **FIELDS, timeout=1e-9)
    for call in (lambda: decoder.decode(late, None), lambda: decoder.mux(late, None, None)):
        with pytest.raises(DeadlineExceeded):
            call()


def test_the_file_holds_both_and_is_as_long_as_the_clip(decoder: Any, fused_run: Any, snapshot: Path) -> None:
    run, job = fused_run(**FIELDS), job_of(snapshot, **FIELDS)
    silent = encode_frames(run.frames, "mp4", 24.0)
    data = decoder.mux(job, silent, run.sound.numpy())
    assert all(decoder.mux(job, silent, run.sound.numpy()) == data for _ in range(5)), "not the same bytes"
    assert data.index(b"moov") < data.index(b"mdat"), "the index is not in front"
    pictures, _, facts = streams(data)
    with av.open(io.BytesIO(silent)) as container:
        assert np.array_equal(pictures, [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    assert (facts["codec"], facts["rate"], facts["layout"]) == ("aac", RATE, "stereo")
    assert facts["video seconds"] == pytest.approx(17 / 24, abs=1e-3)
    assert facts["audio seconds"] == pytest.approx(17 / 24, abs=2e-3)


def tones() -> np.ndarray:
    """One second: silence, then 440 Hz from 0.2 s on the left and 880 Hz from 0.3 s on the right."""
    time = np.arange(RATE) / RATE
    left, right = np.sin(2 * np.pi * 440 * time) * (time > 0.2), np.sin(2 * np.pi * 880 * time) * (time > 0.3)
    return np.stack([left, right]).astype(np.float32) * 0.5


def test_the_sound_is_in_time_and_each_side_keeps_its_own() -> None:
    frames = np.zeros((25, 32, 32, 3), np.uint8)
    _, samples, _ = streams(mux_sound(encode_frames(frames, "mp4", 25.0), tones(), RATE))
    for side, (starts, heard) in enumerate(zip((0.2, 0.3), samples, strict=True)):
        first = np.argmax(np.abs(heard) > 0.05) / RATE
        assert first == pytest.approx(starts, abs=2e-3), side
    middle = slice(RATE // 2, RATE * 3 // 4)
    assert np.abs(samples[:, middle] - tones()[:, middle]).max() < 0.05


def test_one_channel_stays_one() -> None:
    frames = np.zeros((25, 32, 32, 3), np.uint8)
    _, _, facts = streams(mux_sound(encode_frames(frames, "mp4", 25.0), tones()[:1], RATE))
    assert facts["layout"] == "mono"


def test_a_wav_file_holds_the_samples() -> None:
    with wave.open(io.BytesIO(encode_wav(tones(), RATE))) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (2, 2, RATE)
        samples = np.frombuffer(file.readframes(RATE), "<i2").reshape(-1, 2).T
    assert np.abs(samples / 32767 - tones()).max() <= 1 / 32767
    loud = np.array([[2.0, -2.0]], dtype=np.float32)
    with wave.open(io.BytesIO(encode_wav(loud, RATE))) as file:
        assert np.frombuffer(file.readframes(2), "<i2").tolist() == [32767, -32768]


def test_samples_that_are_not_a_number_are_no_silence(snapshot: Path, fused_run: Any) -> None:
    broken = node("sound_decode", snapshot)
    for parameter in broken._decoder._tokenizer.parameters():
        parameter.data.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="sound decoder's samples are not finite"):
        broken.decode(job_of(snapshot, **FIELDS), fused_run(**FIELDS).sound_latents)
