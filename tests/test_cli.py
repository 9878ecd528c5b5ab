"""The command line as a user meets it: a process, its output, its exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from conftest import SIZE
from PIL import Image

from cosmos3_model.fused import FusedPipeline
from serving.cli import main

ROOT = Path(__file__).parents[1]
TINY = ["--height", str(SIZE["height"]), "--width", str(SIZE["width"]), "--steps", "3"]


def cosmoray(*arguments: str | Path, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "serving.cli", *map(str, arguments)]
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")} | environment
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=240, check=False)


def test_a_picture_from_the_command_line_equals_the_fused_run(
    snapshot: Path, fused: FusedPipeline, tmp_path: Path
) -> None:
    out = tmp_path / "new folder" / "cube.png"
    run = cosmoray("generate", "--model", snapshot, "--prompt", "A red cube.", *TINY, "--seed", "5", "--out", out)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(f"wrote {out}: text-to-image, 1 frame(s) of 96x64, seed 5")
    assert "3/3" in run.stderr, "no progress bar"
    assert "Traceback" not in run.stderr
    frames = fused("A red cube.", num_frames=1, **SIZE, num_inference_steps=3, seed=5).frames
    assert np.array_equal(np.asarray(Image.open(out)), frames[0])
    assert not (Path.home() / ".ray" / "auth_token").exists()


def test_a_clip_from_an_image_with_every_option(
    snapshot: Path, fused: FusedPipeline, tmp_path: Path, picture: np.ndarray
) -> None:
    """An array of the frames, from a running Ray that a placement file describes."""
    image, out = tmp_path / "first.webp", tmp_path / "clip.npy"
    Image.fromarray(picture).save(image, lossless=True)
    options = ["--negative-prompt", "dark", "--image", image, "--frames", "5", "--guidance", "3", "--flow-shift", "10"]
    run = cosmoray(
        *("generate", "--model", snapshot, "--prompt", "A cube.", *TINY, *options, "--fps", "12"),
        *("--seed", "6", "--placement", ROOT / "examples" / "placement.yaml", "--out", out),
    )
    assert run.returncode == 0, run.stderr
    expected = fused(
        "A cube.", negative_prompt="dark", image=picture, num_frames=5, **SIZE, num_inference_steps=3,
        guidance_scale=3.0, flow_shift=10.0, fps=12.0, seed=6,
    )  # fmt: skip
    assert np.array_equal(np.load(out), expected.frames)
    assert "image-to-video, 5 frame(s)" in run.stdout


def test_an_interrupt_is_one_line_and_leaves_nothing(snapshot: Path, tmp_path: Path) -> None:
    """Ctrl-C while it denoises: no file, no process, the conventional exit code."""
    size = ["--frames", "17", "--height", "320", "--width", "480", "--steps", "900"]
    options = ["--model", str(snapshot), "--prompt", "x", *size, "--out", str(tmp_path / "clip.mp4")]
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    command = [sys.executable, "-m", "serving.cli", "generate", *options]
    with subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True) as run:
        time.sleep(20)
        children = psutil.Process(run.pid).children(recursive=True)
        run.send_signal(signal.SIGINT)
        _, err = run.communicate(timeout=60)
    assert run.returncode == 130
    assert err.splitlines()[-1] == "cosmoray: interrupted"
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []
    assert children
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive


GENERATE = ["generate", "--prompt", "x", "--out", "OUT.png"]
ERRORS = [
    (["generate", "--prompt", "x", "--out", "a.png"], 2, "Missing option '--model'"),
    ([*GENERATE, "--model", "absent"], 1, "absent: no such snapshot folder"),
    ([*GENERATE, "--model", "SNAP", "--frames", "16"], 1, "--frames: must be 4k+1, got 16; the nearest are 13 and 17"),
    ([*GENERATE, "--model", "SNAP", "--frames", "0"], 1, "--frames: must be from 1 to"),
    ([*GENERATE, "--model", "SNAP", "--frames", "many"], 2, "'--frames'"),
    ([*GENERATE, "--model", "SNAP", "--frames", "5"], 1, "--out: a png file holds one frame"),
    ([*GENERATE, "--model", "SNAP", "--height", "50", "--width", "64"], 1, "--height: must be a multiple of 16"),
    ([*GENERATE, "--model", "SNAP", "--width", "99999"], 1, "--width: must be a multiple of 16 from 16 to 4096"),
    ([*GENERATE, "--model", "SNAP", "--steps", "0"], 1, "--steps: "),
    ([*GENERATE, "--model", "SNAP", "--guidance", "nan"], 1, "--guidance: "),
    ([*GENERATE, "--model", "SNAP", "--seed", "-1"], 1, "--seed: "),
    (["generate", "--prompt", " ", "--model", "SNAP", "--out", "a.png"], 1, "--prompt: must not be empty"),
    ([*GENERATE, "--model", "SNAP", "--image", "README.md"], 1, "--image: README.md: not a picture"),
    ([*GENERATE, "--model", "SNAP", "--placement", "absent.yaml"], 1, "absent.yaml: No such file"),
    (
        ["generate", "--prompt", "x", "--model", "SNAP", "--out", "a.gif"],
        1,
        "--out: a.gif: suffix '.gif' is not one of",
    ),
    (["generate", "--prompt", "x", "--model", "SNAP", "--out", "tests"], 1, "--out: tests: exists and is not an empty"),
    (["generate", "--prompt", "x", "--model", "SNAP", "--out", "Makefile/a.png"], 1, "is not a folder"),
    ([*GENERATE, "--model", "SNAP", "--colour", "red"], 2, "No such option: --colour"),
    (["graph", "text-to-smell"], 2, "'text-to-smell' is not one of text-to-image"),
    (["snapshot", "tests"], 1, "tests: exists and is not an empty folder"),
    (["snapshot", "OUT", "--family", "mega"], 1, "family: 'mega' is not one of nano"),
    (["snapshot", "OUT", "--size", "huge"], 1, "size: 'huge' is not one of tiny, small"),
    (["dance"], 2, "No such command 'dance'"),
]


@pytest.mark.parametrize(("arguments", "code", "message"), ERRORS, ids=[case[2][:40] for case in ERRORS])
def test_errors_are_one_line_and_leave_nothing(
    arguments: list[str],
    code: int,
    message: str,
    snapshot: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """In this process: starting one costs seconds, and what comes out is the same."""
    arguments = [
        argument.replace("SNAP", str(snapshot)).replace("OUT", str(tmp_path / "out")) for argument in arguments
    ]
    monkeypatch.setattr("sys.argv", ["cosmoray", *arguments])
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capfd.readouterr()
    assert ended.value.code == code, err
    assert message in err
    assert err.startswith("cosmoray: ")
    assert err.count("\n") == 1, err
    assert out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [[], ["snapshot"], ["generate"], ["graph"], ["check"]])
def test_help_has_an_example(command: list[str]) -> None:
    run = cosmoray(*command, "--help")
    assert run.returncode == 0
    assert "Example: cosmoray" in run.stdout


def test_graph_prints_text_and_mermaid() -> None:
    from graph.modes import MODES

    run = cosmoray("graph")
    for graph in MODES.values():
        assert graph.to_text() in run.stdout
        assert graph.to_mermaid() in run.stdout
    assert MODES["text-to-video"].to_text() not in cosmoray("graph", "image-to-video").stdout


def test_snapshot_writes_one_that_loads(tmp_path: Path) -> None:
    from cosmos3_model.config import SnapshotConfig
    from cosmos3_model.transformer import check_transformer

    folder = tmp_path / "deep" / "tiny"
    run = cosmoray("snapshot", folder, "--family", "nano", "--size", "tiny", "--seed", "3")
    assert (run.returncode, run.stdout) == (0, f"wrote {folder}\n"), run.stderr
    check_transformer(SnapshotConfig.from_folder(folder))


def test_check_says_yes_here_and_no_with_the_fix_where_ray_does_not_answer(tmp_path: Path) -> None:
    run = cosmoray("check")
    assert run.returncode == 0, run.stdout
    assert "this machine can make pictures and clips" in run.stdout
    (tmp_path / "av.py").write_text("raise ImportError('not here')")
    run = cosmoray("check", PYTHONPATH=str(tmp_path))
    assert run.returncode == 1
    assert "fix encoders: mp4 needs PyAV: pip install av" in run.stdout
