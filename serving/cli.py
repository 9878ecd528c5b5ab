"""The `cosmoray` command. Thin: it reads options, shows progress, and calls what the Python API calls.

torch and Ray are imported inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

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
    "output": "--out",
}


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
    out: Annotated[Path, typer.Option(help="PNG, JPEG, WebP, MP4 or NPY file by suffix; no suffix: PNG frames.")],
    negative_prompt: Annotated[str, typer.Option(help="What to move away from.")] = "",
    image: Annotated[Path | None, typer.Option(help="First frame, for image-to-video.")] = None,
    frames: Annotated[
        int | None, typer.Option(help="1, or 4k+1. Default: 1 for a picture's suffix, else 189.", show_default=False)
    ] = None,
    height: Annotated[int, typer.Option(help="Pixels, a multiple of 16.")] = 720,
    width: Annotated[int, typer.Option(help="Likewise.")] = 1280,
    steps: Annotated[int, typer.Option(help="Denoise steps.")] = 35,
    guidance: Annotated[float, typer.Option(help="1 runs no unconditional branch.")] = 6.0,
    flow_shift: Annotated[
        float | None, typer.Option(help="Shifted flow sigmas. Default: the checkpoint's schedule.", show_default=False)
    ] = None,
    fps: Annotated[float, typer.Option(help="Frame rate.")] = 24.0,
    seed: Annotated[int | None, typer.Option(help="Default: drawn, and printed.", show_default=False)] = None,
    placement: Annotated[
        Path | None, typer.Option(help="YAML: which node runs where. Default: this machine.", show_default=False)
    ] = None,
) -> None:
    """Make one picture or clip. Defaults are those of diffusers' Cosmos3OmniPipeline.

    Example: cosmoray generate --model out/tiny --prompt "A red cube." --height 64 --width 96 --steps 4 --out cube.png
    """
    from nodes.media import PIL_FORMATS

    output = _output_of(out)
    if frames is None:
        frames = 1 if output in PIL_FORMATS else 189
    fields: dict[str, Any] = {
        "prompt": prompt,
        "negative_prompt": negative_prompt,
        "image": image,
        "num_frames": frames,
        "height": height,
        "width": width,
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "flow_shift": flow_shift,
        "fps": fps,
        "seed": seed,
        "output": output,
    }
    from graph.request import GenerationRequest

    from .show import run_with_progress

    request = GenerationRequest.parse(**fields)
    result = run_with_progress(model, placement, request, Console(stderr=True))
    path = result.save(out)
    meta = result.metadata
    typer.echo(
        f"wrote {path}: {result.mode}, {meta['num_frames']} frame(s) of {meta['width']}x{meta['height']}, "
        f"seed {meta['seed']}, {meta['seconds']:.2f} s"
    )


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


def _output_of(out: Path) -> Any:
    """The output format of a path, refusing what could not be saved there after all the work."""
    from graph.request import RequestError
    from nodes.media import SUFFIXES

    suffix = out.suffix.lower()
    if suffix not in SUFFIXES:
        kinds = ", ".join(key for key in SUFFIXES if key)
        raise RequestError("output", f"{out}: suffix {suffix!r} is not one of {kinds}, or none for a folder of PNGs")
    if suffix == "" and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RequestError("output", f"{out}: exists and is not an empty folder")
    if suffix and out.is_dir():
        raise RequestError("output", f"{out}: is a folder")
    for parent in out.absolute().parents:
        if parent.exists():
            if not parent.is_dir():
                raise RequestError("output", f"{out}: {parent} is not a folder")
            break
    return SUFFIXES[suffix]


def main() -> None:
    """Entry point: every error that a user can cause is one line on stderr."""
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
