"""The driver script and the demo, run as a reader of the README runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import av
import numpy as np
from PIL import Image

from graph.reference import ReferencePipeline
from nodes.action_files import load_actions

ROOT = Path(__file__).parents[1]


def run(*arguments: str | Path, cwd: Path) -> str:
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_eight_requests_of_mixed_sizes_are_saved(snapshot: Path, reference: ReferencePipeline, tmp_path: Path) -> None:
    printed = run(ROOT / "examples" / "batch.py", "--model", snapshot, "--out", tmp_path, cwd=tmp_path)
    assert len(printed.splitlines()) == 8
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["0.png", "1.png", "2.mp4", "3.png", "4.mp4", "5.mp4", "6.png", "7.png"]
    expected = reference(
        prompt="A blue ball.", num_frames=1, height=48, width=80, num_inference_steps=8, seed=1
    ).frames[0]
    assert np.array_equal(np.asarray(Image.open(tmp_path / "1.png")), expected)
    with av.open(str(tmp_path / "5.mp4")) as clip:
        assert clip.streams.video[0].frames == 17


def test_the_demo_says_bit_exact_and_leaves_no_page_in_use(tmp_path: Path) -> None:
    printed = run(ROOT / "examples" / "demo.py", cwd=tmp_path)
    assert printed.count("against the fused run: bit-exact") == 3
    assert printed.count("pages in use after: 0") == 3
    assert "vae_decode.decode      (latents=denoise.vision) -> media" in printed
    assert Image.open(tmp_path / "out" / "demo.png").size == (160, 96)
    with av.open(str(tmp_path / "out" / "demo.mp4")) as clip:
        assert clip.streams.video[0].frames == 17
        assert clip.streams.audio[0].rate == 48000
    assert load_actions(tmp_path / "out" / "demo.json").shape == (16, 2)
