"""A request on a terminal: what is being started, then a bar that moves with every step."""

from __future__ import annotations

from pathlib import Path

from graph.executor import Progress
from graph.pipeline import Pipeline
from graph.request import GenerationRequest
from graph.result import GenerationResult
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar


def run_with_progress(
    model: Path, placement: Path | None, request: GenerationRequest, console: Console
) -> GenerationResult:
    """Launch a pipeline, run one request and close it, telling `console` what is going on."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=console) as bar:
        start = bar.add_task("starting Ray on this machine", total=6)

        def on_ready(name: str) -> None:
            bar.update(start, advance=1, description=f"starting nodes ({name} ready)")

        with Pipeline.launch(model, placement, on_ready=on_ready) as pipeline:
            bar.update(start, completed=6, description="all nodes ready")
            steps = bar.add_task("waiting", total=request.num_inference_steps)

            def on_progress(progress: Progress) -> None:
                bar.update(steps, completed=progress.step or None, description=progress.node)

            return pipeline.generate(request, on_progress=on_progress)
