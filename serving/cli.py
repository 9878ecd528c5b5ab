"""The `cosmoray` command. Thin: it reads options, shows progress, and calls what the Python API calls.

torch and Ray are imported inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

app = typer.Typer(
    name="cosmoray",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# The base of typer's errors in use; newer releases of typer bring their own copy of click.
UsageError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
INTERRUPTED = 130
# What a request calls its fields, where the option is called otherwise.
OPTION_OF: dict[str, str] = {
    "num_frames": "--frames",
    "num_inference_steps": "--steps",
    "guidance_scale": "--guidance",
    "enable_sound": "--sound",
    "use_karras_sigmas": "--karras",
    "use_system_prompt": "--system-prompt",
    "condition_frame_indexes_vision": "--condition-frames",
    "condition_video_keep": "--keep",
    "action.mode": "--action",
    "action.domain_name": "--domain",
    "action.chunk_size": "--chunk-size",
    "action.raw_actions": "--actions",
    "action.resolution_tier": "--resolution-tier",
    "action.view_point": "--view-point",
    "output": "--out",
}
HIDE: Any = {"show_default": False}


@app.callback(invoke_without_command=True)
def root(context: typer.Context) -> None:
    """Serve NVIDIA Cosmos3 as a pipeline of model nodes on Ray.

    Example: cosmoray snapshot out/tiny
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def snapshot(
    folder: Annotated[Path, typer.Argument(help="Folder to make; must be new or empty.")],
    family: Annotated[str, typer.Option(help="Checkpoint family.")] = "nano",
    size: Annotated[str, typer.Option(help="tiny, or small (head_dim 128, as published).")] = "tiny",
    seed: Annotated[int, typer.Option(help="Of the random weights.")] = 0,
) -> None:
    """Write a random snapshot in the published layout, to try things without a download.

    Example: cosmoray snapshot out/tiny --family nano --size tiny
    """
    from cosmos3_model.snapshot import write_snapshot

    typer.echo(f"wrote {write_snapshot(folder, family=family, size=size, seed=seed)}")


@app.command()
def generate(
    model: Annotated[Path, typer.Option(help="Snapshot folder.")],
    prompt: Annotated[str, typer.Option(help="What to show.")],
    out: Annotated[
        Path,
        typer.Option(
            help="PNG, JPEG, WebP, MP4 or NPY file by suffix; no suffix: PNG frames. Actions: JSON, NPY or msgpack."
        ),
    ],
    negative_prompt: Annotated[str, typer.Option(help="What to move away from.")] = "",
    image: Annotated[Path | None, typer.Option(help="First frame, or the robot's scene.", **HIDE)] = None,
    video: Annotated[
        Path | None, typer.Option(help="Clip to go on from: MP4, MOV, WebM, GIF, or a folder of pictures.", **HIDE)
    ] = None,
    condition_frames: Annotated[
        str | None, typer.Option(help="Latent frames that --video gives. Default: 0,1.", **HIDE)
    ] = None,
    keep: Annotated[
        str | None, typer.Option(help="Which end of --video gives them: first (default) or last.", **HIDE)
    ] = None,
    sound: Annotated[bool, typer.Option("--sound", help="Make sound with the clip.")] = False,
    sound_out: Annotated[Path | None, typer.Option(help="Write the sound as a WAV file, too.", **HIDE)] = None,
    action: Annotated[
        str | None, typer.Option(help="policy, forward_dynamics or inverse_dynamics, of --image or --video.", **HIDE)
    ] = None,
    domain: Annotated[str | None, typer.Option(help="Embodiment, such as droid_lerobot.", **HIDE)] = None,
    chunk_size: Annotated[int | None, typer.Option(help="Actions. Default: as given, or 16.", **HIDE)] = None,
    actions: Annotated[
        Path | None, typer.Option(help="JSON, NPY or msgpack file, for forward_dynamics.", **HIDE)
    ] = None,
    resolution_tier: Annotated[int | None, typer.Option(help="256, 480, 704 or 720. Default: 480.", **HIDE)] = None,
    view_point: Annotated[str | None, typer.Option(help="Default: ego_view.", **HIDE)] = None,
    video_out: Annotated[Path | None, typer.Option(help="Write the clip of a policy here.", **HIDE)] = None,
    frames: Annotated[int | None, typer.Option(help="1, or 4k+1. Default: 1 for a picture's suffix.", **HIDE)] = None,
    height: Annotated[int | None, typer.Option(help="Pixels, a multiple of 16.", **HIDE)] = None,
    width: Annotated[int | None, typer.Option(help="Likewise.", **HIDE)] = None,
    steps: Annotated[int | None, typer.Option(help="Denoise steps.", **HIDE)] = None,
    guidance: Annotated[float | None, typer.Option(help="1 runs no unconditional branch.", **HIDE)] = None,
    guidance_interval: Annotated[
        str | None, typer.Option(help="Timesteps with guidance, such as 400,1000. Default: all.", **HIDE)
    ] = None,
    flow_shift: Annotated[float | None, typer.Option(help="Of the flow sigmas.", **HIDE)] = None,
    karras: Annotated[bool | None, typer.Option(help="Karras sigmas.", **HIDE)] = None,
    system_prompt: Annotated[bool | None, typer.Option(help="Begin with the system prompt.", **HIDE)] = None,
    fps: Annotated[float | None, typer.Option(help="Frame rate.", **HIDE)] = None,
    seed: Annotated[int | None, typer.Option(help="Default: drawn, and printed.", **HIDE)] = None,
    placement: Annotated[
        Path | None, typer.Option(help="YAML: which node runs where. Default: this machine.", **HIDE)
    ] = None,
) -> None:
    """Make a picture, a clip, a clip with sound, or a robot's actions.

    What is not given takes the checkpoint's defaults, which cosmoray info shows.

    Example: cosmoray generate --model out/tiny --prompt "A red cube." --height 64 --width 96 --steps 4 --out cube.png
    """
    from graph.request import GenerationRequest

    from .outputs import Outputs
    from .show import run_with_progress

    outputs = Outputs.plan(out, video_out, sound_out, action, sound)
    robot = {
        "domain_name": domain,
        "chunk_size": chunk_size,
        "raw_actions": actions,
        "resolution_tier": resolution_tier,
        "view_point": view_point,
    }
    fields: dict[str, Any] = {
        "prompt": prompt,
        "negative_prompt": negative_prompt,
        "image": image,
        "video": video,
        "num_frames": frames,
        "height": height,
        "width": width,
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "guidance_interval": guidance_interval and _numbers("guidance_interval", guidance_interval, float),
        "flow_shift": flow_shift,
        "use_karras_sigmas": karras,
        "use_system_prompt": system_prompt,
        "fps": fps,
        "seed": seed,
        "enable_sound": sound or sound_out is not None,
        "action": _action(action, robot),
        "output": outputs.format,
    }
    if condition_frames is not None:
        fields["condition_frame_indexes_vision"] = _numbers("condition_frame_indexes_vision", condition_frames, int)
    if keep is not None:
        fields["condition_video_keep"] = keep
    result = run_with_progress(model, placement, GenerationRequest.parse(**fields), Console(stderr=True))
    paths = ", ".join(str(path) for path in outputs.write(result))
    meta = result.metadata
    made = f"{meta['num_frames']} frame(s) of {meta['width']}x{meta['height']}"
    if result.actions is not None:
        made = f"{len(result.actions)} action(s) of {result.actions.shape[1]}"
    typer.echo(f"wrote {paths}: {result.mode}, {made}, seed {meta['seed']}, {meta['seconds']:.2f} s")


@app.command()
def info(
    folder: Annotated[Path, typer.Argument(help="Snapshot folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a snapshot is: family, parameters, modes, defaults, memory. Reads headers only.

    Example: cosmoray info out/tiny
    """
    import json

    from .info import describe, show

    found = describe(folder)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        # Wide enough for the tables where the output is no terminal.
        show(found, Console(highlight=False, width=None if sys.stdout.isatty() else 120))


@app.command()
def graph(
    mode: Annotated[str | None, typer.Argument(help="Mode; all of them if not given.", show_default=False)] = None,
) -> None:
    """Print the graph of a mode as text and as Mermaid.

    Example: cosmoray graph image-to-video
    """
    from graph.modes import MODES

    if mode is not None and mode not in MODES:
        raise typer.BadParameter(f"{mode!r} is not one of {', '.join(MODES)}", param_hint="MODE")
    for name in MODES if mode is None else [mode]:
        typer.echo(f"{MODES[name].to_text()}\n\n{MODES[name].to_mermaid()}\n")


@app.command()
def check() -> None:
    """Say what this machine can run: Python, torch, GPU, attention backends, media encoders, shared memory, Ray.

    Exits with 1, and the fix, when pictures and clips cannot be made here.

    Example: cosmoray check
    """
    from .check import report

    raise typer.Exit(0 if report(Console(highlight=False, soft_wrap=True)) else 1)


def _numbers(field: str, text: str, kind: Any) -> list[Any]:
    from graph.request import RequestError

    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise RequestError(field, f"{text!r} is not a list of numbers, such as 0,1") from None


def _action(mode: str | None, robot: dict[str, Any]) -> dict[str, Any] | None:
    from graph.request import RequestError

    given = {name: value for name, value in robot.items() if value is not None}
    if mode is not None:
        return {"mode": mode, **given}
    if given:
        raise RequestError(f"action.{next(iter(given))}", "needs --action")
    return None


class Interrupt(KeyboardInterrupt):
    """Ctrl-C. Of a plain one that hits code in a string, as dataclasses are made of, Python keeps a note, and ends by
    the signal although the interrupt was caught; the exit code would be lost."""


def main() -> None:
    """Entry point: every error that a user can cause is one line on stderr."""
    interrupted = False

    def interrupt(*_: object) -> None:
        nonlocal interrupted
        interrupted = True
        raise Interrupt

    # A library may make another error of an interrupt that comes while it starts; so it is noted here, too.
    signal.signal(signal.SIGINT, interrupt)
    try:
        code = app(standalone_mode=False)
        if code == INTERRUPTED:  # typer turns Ctrl-C into this code, and says nothing
            raise KeyboardInterrupt
        sys.exit(code)
    except UsageError as error:
        _fail(f"{' '.join(error.format_message().split())} (see cosmoray --help)", 2)
    except (typer.Abort, KeyboardInterrupt):
        _fail("interrupted", INTERRUPTED)
    except Exception as error:  # noqa: BLE001 - sorted by _explain, which raises what nobody expected
        if interrupted:
            _fail("interrupted", INTERRUPTED)
        _fail(_explain(error), 1)


def _explain(error: Exception) -> str:
    """One line for an expected error; anything else is a fault of ours and keeps its traceback."""
    from graph.request import RequestError

    if isinstance(error, RequestError):
        return f"{OPTION_OF.get(error.field, '--' + error.field.replace('_', '-'))}: {error.message}"
    from cosmos3_model.config import SnapshotError
    from cosmos3_model.sampling import NonFiniteError
    from graph.placement import PlacementError
    from graph.workers import PipelineError
    from kvstore.handle import StoreError
    from nodes.job import NodeError
    from nodes.media import MediaError

    expected = (
        SnapshotError,
        NonFiniteError,
        PlacementError,
        PipelineError,
        StoreError,
        NodeError,
        MediaError,
        OSError,
        ValueError,
    )
    if not isinstance(error, expected):
        raise error
    return " ".join(str(error).split())


def _fail(message: str, code: int) -> None:
    print(f"cosmoray: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
