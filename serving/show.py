"""A request on a terminal: what is being started, then a bar that moves with every step."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from cosmos3_model.config import SnapshotConfig
from graph.executor import Progress
from graph.pipeline import Pipeline
from graph.request import GenerationRequest
from graph.resolve import resolve
from graph.result import GenerationResult

NEXT = {"snapshot": "starting Ray on this machine", "ray": "starting nodes"}


def run_with_progress(
    model: Path, placement: Path | None, request: GenerationRequest, console: Console
) -> GenerationResult:
    """Launch a pipeline, run one request and close it, telling `console` what is going on.

    Nothing is shown before the snapshot was found to be usable for it, so that its error stands alone.
    """
    job = resolve(request, SnapshotConfig.from_folder(model))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Bar(*columns, console=console)
    start = bar.add_task("", total=None)
    ready: list[str] = []

    def on_ready(name: str) -> None:
        ready.append(name)
        bar.start()
        bar.update(start, completed=len(ready), description=NEXT.get(name, f"starting nodes ({name} is ready)"))

    try:
        with Pipeline.launch(model, placement, modes=[job.mode], on_ready=on_ready) as pipeline:
            bar.update(start, total=len(ready), description="all nodes are ready")
            steps = bar.add_task("waiting", total=job.sampling.schedule.num_inference_steps)

            def on_progress(progress: Progress) -> None:
                bar.update(steps, completed=progress.step or None, description=progress.node)

            return pipeline.generate(request, on_progress=on_progress)
    finally:
        if ready:
            bar.stop()
