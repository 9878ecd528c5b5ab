"""Results on disk: whole or not at all."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graph.result import GenerationResult
from nodes.action_files import load_actions


def result(output: Any, media: Any) -> GenerationResult:
    return GenerationResult("id", "text-to-image", output, media, {})


def test_a_file_is_written_in_one_piece_and_replaces_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.png"
    result("png", b"one").save(path)
    result("png", b"two").save(str(path))
    assert path.read_bytes() == b"two"
    assert [file.name for file in path.parent.iterdir()] == ["a.png"]


def test_frames_become_a_folder(tmp_path: Path) -> None:
    result("png_frames", [b"a", b"b"]).save(tmp_path / "frames")
    assert {file.name: file.read_bytes() for file in (tmp_path / "frames").iterdir()} == {
        "00000.png": b"a",
        "00001.png": b"b",
    }


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "precious").write_text("x")
    with pytest.raises(OSError):
        result("png_frames", [b"a"]).save(tmp_path / "kept")
    assert (tmp_path / "kept" / "precious").read_text() == "x"
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        result("png", b"data").save(tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("output", ["np", "latent", "actions"])
def test_an_array_is_no_file(output: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="array in memory"):
        result(output, None).save(tmp_path / "a")


def test_sound_and_actions_are_files_of_their_own(tmp_path: Path) -> None:
    actions, sound = np.ones((2, 3), np.float32), np.zeros((2, 100), np.float32)
    made = GenerationResult("id", "m", "np", None, {"sampling_rate": 48000, "domain_name": "umi"}, [], sound, actions)
    for suffix in (".json", ".npy", ".msgpack"):
        assert np.array_equal(load_actions(made.save_actions(tmp_path / f"a{suffix}")), actions)
    with wave.open(str(made.save_sound(tmp_path / "s.wav"))) as file:
        assert (file.getnchannels(), file.getframerate(), file.getnframes()) == (2, 48000, 100)
    with pytest.raises(ValueError, match="a text-to-image result has no sound"):
        result("np", None).save_sound(tmp_path / "t.wav")
    with pytest.raises(ValueError, match="a text-to-image result has no actions"):
        result("np", None).save_actions(tmp_path / "t.json")
    with pytest.raises(ValueError, match=r"not '.csv'"):
        made.save_actions(tmp_path / "a.csv")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.msgpack", "a.npy", "s.wav"]
