"""The command line as a user meets it: a process, its output, its exit code."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from conftest import SIZE
from PIL import Image

from graph.pipeline import Pipeline
from graph.reference import ReferencePipeline
from nodes.action_files import load_actions
from nodes.media import encode_frames, encode_wav, mux_sound
from serving.cli import main

ROOT = Path(__file__).parents[1]
TINY = ["--height", str(SIZE["height"]), "--width", str(SIZE["width"]), "--steps", "3"]


def cosmoray(*arguments: str | Path, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "serving.cli", *map(str, arguments)]
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")} | environment
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=240, check=False)


def test_a_picture_from_the_command_line_equals_the_fused_run(
    snapshot: Path, reference: ReferencePipeline, tmp_path: Path
) -> None:
    out = tmp_path / "new folder" / "cube.png"
    run = cosmoray("generate", "--model", snapshot, "--prompt", "A red cube.", *TINY, "--seed", "5", "--out", out)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(f"wrote {out}: text-to-image, 1 frame(s) of 96x64, seed 5")
    assert "3/3" in run.stderr, "no progress bar"
    assert "Traceback" not in run.stderr
    frames = reference(prompt="A red cube.", num_frames=1, **SIZE, num_inference_steps=3, seed=5).frames
    assert np.array_equal(np.asarray(Image.open(out)), frames[0])
    assert not (Path.home() / ".ray" / "auth_token").exists()


def test_a_clip_from_an_image_with_every_option(
    snapshot: Path, reference: ReferencePipeline, tmp_path: Path, picture: np.ndarray
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
    expected = reference(
        prompt="A cube.", negative_prompt="dark", image=picture, num_frames=5, **SIZE, num_inference_steps=3,
        guidance_scale=3.0, flow_shift=10.0, fps=12.0, seed=6,
    )  # fmt: skip
    assert np.array_equal(np.load(out), expected.frames)
    assert "image-to-video, 5 frame(s)" in run.stdout


@pytest.fixture
def command(
    clean: Pipeline, snapshot: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """`cosmoray generate` in this process, on the nodes that run already: starting them is tested above. Its output."""

    @contextlib.contextmanager
    def launch(model: Path, placement: Any, *, modes: list[str], on_ready: Callable[[str], None]) -> Iterator[Pipeline]:
        assert (model, placement) == (snapshot, None)
        assert set(modes) <= clean.modes
        on_ready("snapshot")
        yield clean

    monkeypatch.setattr("serving.show.Pipeline.launch", launch)

    def run(*arguments: str | Path) -> str:
        monkeypatch.setattr("sys.argv", ["cosmoray", "generate", "--model", str(snapshot), *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert not ended.value.code, err
        return out

    return run


def test_a_clip_goes_on_with_sound(command: Any, reference: ReferencePipeline, tmp_path: Path) -> None:
    """From a folder of frames, the end of it; the sound in the file and beside it."""
    folder, out = tmp_path / "frames", tmp_path / "clip.mp4"
    folder.mkdir()
    video = np.random.default_rng(0).integers(0, 256, (12, 64, 96, 3), dtype=np.uint8)
    for index, frame in enumerate(video):
        Image.fromarray(frame).save(folder / f"{index}.png")
    said = command(
        *("--prompt", "A bell.", *TINY, "--seed", "7", "--frames", "13"),
        *("--video", folder, "--condition-frames", "0,2", "--keep", "last", "--fps", "12"),
        *("--guidance-interval", "400,1000", "--karras", "--sound-out", tmp_path / "bell.wav", "--out", out),
    )
    assert said.startswith(f"wrote {out}, {tmp_path}/bell.wav: video-to-video-with-sound, 13 frame(s) of 96x64")
    expected = reference(
        prompt="A bell.", video=video, condition_frame_indexes_vision=[0, 2], condition_video_keep="last",
        num_frames=13, **SIZE, num_inference_steps=3, fps=12.0, seed=7, enable_sound=True,
        guidance_interval=(400.0, 1000.0), use_karras_sigmas=True,
    )  # fmt: skip
    assert expected.sound is not None
    assert (tmp_path / "bell.wav").read_bytes() == encode_wav(expected.sound.numpy(), 48000)
    frames = encode_frames(expected.frames, "mp4", 12.0)
    silence = round(13 / 12 * 48000)
    assert out.read_bytes() == mux_sound(frames, expected.sound.numpy()[:, :silence], 48000)


def test_a_robot_is_driven_there_and_back(
    command: Any, reference: ReferencePipeline, tmp_path: Path, picture: np.ndarray
) -> None:
    """Policy to a clip and actions, forward dynamics from those, inverse dynamics of the clip."""
    scene, clip = tmp_path / "scene.png", tmp_path / "clip"
    Image.fromarray(picture).save(scene)
    common = ["--prompt", "Push it.", "--steps", "2", "--seed", "3", "--domain", "pusht"]
    robot = [*common, "--chunk-size", "8", "--resolution-tier", "256"]
    first = tmp_path / "policy.json"
    said = command(*robot, "--action", "policy", "--image", scene, "--out", first, "--video-out", clip)
    assert said.startswith(f"wrote {clip}, {first}: policy, 8 action(s) of 2, seed 3")
    action = {"mode": "policy", "domain_name": "pusht", "chunk_size": 8, "resolution_tier": 256}
    expected = reference(prompt="Push it.", image=picture, action=action, num_inference_steps=2, seed=3)
    assert expected.actions is not None
    assert np.array_equal(load_actions(first), expected.actions.numpy())
    assert np.array_equal(np.stack([np.asarray(Image.open(file)) for file in sorted(clip.iterdir())]), expected.frames)

    frames = tmp_path / "forward.npy"
    command(
        *(*robot, "--action", "forward_dynamics", "--image", scene, "--actions", first),
        *("--view-point", "wrist_view", "--out", frames),
    )
    assert np.load(frames).shape == expected.frames.shape

    last = tmp_path / "inverse.msgpack"
    command(*robot, "--action", "inverse_dynamics", "--video", clip, "--out", last)
    assert load_actions(last).shape == (8, 2)


def test_the_readme_s_commands_run_as_they_stand(
    command: Any, snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its order, each with the files that those before it made."""
    text = (ROOT / "README.md").read_text().replace("\\\n", " ")
    commands = [shlex.split(line)[2:] for line in text.splitlines() if line.startswith(".venv/bin/cosmoray generate")]
    assert len(commands) == 6
    monkeypatch.chdir(tmp_path)
    for arguments in commands:
        assert arguments[:2] == ["--model", "out/tiny"]
        said = command(*arguments[2:])
        for option in ("--out", "--video-out", "--sound-out"):
            if option in arguments:
                path = arguments[arguments.index(option) + 1]
                assert path in said
                assert (tmp_path / path).stat().st_size > 100


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


def test_an_interrupt_while_a_class_is_made_keeps_the_exit_code(tmp_path: Path) -> None:
    """Dataclasses run code in strings, and `python -m` remembers a plain KeyboardInterrupt that came out of one."""
    (tmp_path / "interrupted.py").write_text(
        "import os, signal, serving.cli\n"
        "def app(standalone_mode):\n"
        "    exec('os.kill(os.getpid(), signal.SIGINT)')\n"
        "serving.cli.app = app\n"
        "serving.cli.main()\n"
    )
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    command = [sys.executable, "-m", "interrupted"]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stderr) == (130, "cosmoray: interrupted\n")


def test_an_interrupt_while_ray_starts_waits_for_it_and_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from graph.cluster import start_ray

    happened: list[str] = []

    def init(**options: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        happened.append("started")

    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", init)
    monkeypatch.setattr("ray.shutdown", lambda: happened.append("ended"))
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        start_ray()
    assert happened == ["started", "ended"]
    assert signal.getsignal(signal.SIGINT) is handler


GENERATE = ["generate", "--prompt", "x", "--out", "OUT.png"]
CLIP = ["generate", "--prompt", "x", "--out", "OUT.mp4"]
POLICY = ["generate", "--prompt", "x", "--out", "OUT.json", "--model", "SNAP", "--action", "policy"]
ERRORS = [
    (["generate", "--prompt", "x", "--out", "a.png"], 2, "Missing option '--model'"),
    ([*GENERATE, "--model", "absent"], 1, "absent: no such snapshot folder"),
    (["generate", "--prompt", "x", "--out", "OUT.npy", "--model", "SNAP", "--sound"], 1, "only MP4 files hold sound"),
    ([*POLICY[:-2], "--action", "policy", "--video-out", "OUT.json"], 1, "two results cannot go into one file"),
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
    ([*GENERATE, "--model", "SNAP", "--guidance-interval", "low"], 1, "--guidance-interval: 'low' is not a list"),
    ([*GENERATE, "--model", "SNAP", "--guidance-interval", "5"], 1, "--guidance-interval: has too few values"),
    ([*GENERATE, "--model", "SNAP", "--condition-frames", "0,x"], 1, "--condition-frames: '0,x' is not a list"),
    ([*GENERATE, "--model", "SNAP", "--keep", "middle"], 1, "--keep: "),
    ([*GENERATE, "--model", "SNAP", "--sound"], 1, "--out: OUT.png: only MP4 files hold sound; add --sound-out"),
    ([*GENERATE, "--model", "SNAP", "--sound", "--sound-out", "a.wav"], 1, "--sound: needs num_frames over 1"),
    ([*GENERATE, "--model", "SNAP", "--sound-out", "a.mp3"], 1, "--sound-out: a.mp3: suffix '.mp3' is not .wav"),
    ([*GENERATE, "--model", "SNAP", "--video-out", "a.mp4"], 1, "--video-out: only --action policy"),
    ([*GENERATE, "--model", "SNAP", "--domain", "umi"], 1, "--domain: needs --action"),
    ([*GENERATE, "--model", "SNAP", "--action", "policy"], 1, "--out: OUT.png: actions go into .json, .npy, .msgpack"),
    ([*POLICY, "--domain", "toaster"], 1, "--domain: 'toaster' is not one of av, "),
    (POLICY, 1, "--domain: is required"),
    ([*POLICY, "--domain", "umi"], 1, "--image: policy needs an image"),
    ([*POLICY, "--domain", "umi", "--chunk-size", "0"], 1, "--chunk-size: "),
    ([*POLICY, "--domain", "umi", "--actions", "absent.npy"], 1, "--actions: absent.npy: no such file"),
    ([*POLICY, "--domain", "umi", "--video", "README.md"], 1, "--video: README.md: not a clip that can be read"),
    ([*POLICY, "--domain", "umi", "--video", "absent.mp4"], 1, "--video: absent.mp4: no such file or folder"),
    ([*POLICY, "--domain", "umi", "--video-out", "a.json"], 1, "--video-out: a.json: suffix '.json' is not one of"),
    ([*CLIP, "--model", "EDGE", "--sound"], 1, "--sound: this checkpoint (edge) was trained without sound"),
    ([*CLIP, "--model", "FOUR", "--guidance", "6"], 1, "--guidance: this checkpoint has guidance built in"),
    ([*CLIP, "--model", "FOUR", "--steps", "8"], 1, "--steps: this checkpoint takes 4 steps, got 8"),
    (["info", "absent"], 1, "absent: no such snapshot folder"),
    (["info", "tests"], 1, "tests/model_index.json: file is missing"),
    (["graph", "text-to-smell"], 2, "'text-to-smell' is not one of text-to-image"),
    (["snapshot", "tests"], 1, "tests: exists and is not an empty folder"),
    (["snapshot", "OUT", "--family", "mega"], 1, "family: 'mega' is not one of nano, super, edge"),
    (["snapshot", "OUT", "--size", "huge"], 1, "size: 'huge' is not one of tiny, small"),
    (["dance"], 2, "No such command 'dance'"),
]


@pytest.mark.parametrize(("arguments", "code", "message"), ERRORS, ids=[case[2][:40] for case in ERRORS])
def test_errors_are_one_line_and_leave_nothing(
    arguments: list[str],
    code: int,
    message: str,
    families: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """In this process: starting one costs seconds, and what comes out is the same."""
    names = {"SNAP": families["nano"], "EDGE": families["edge"], "FOUR": families["super-i2v-4step"]}
    for name, path in {**names, "OUT": tmp_path / "out"}.items():
        arguments = [argument.replace(name, str(path)) for argument in arguments]
    message = message.replace("OUT", str(tmp_path / "out"))
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


@pytest.mark.parametrize("command", [[], ["snapshot"], ["generate"], ["info"], ["graph"], ["check"]])
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
