"""What comes back: the picture or clip, and how it was made."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nodes.job import OutputFormat


@dataclass(frozen=True)
class NodeTiming:
    """When one node of the graph worked on the request, in seconds since it was submitted, and where."""

    node: str
    start: float
    end: float
    pid: int
    attempts: int

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class GenerationResult:
    """A finished request.

    Attributes:
        request_id: Also in the logs.
        mode: Name of the graph that it ran through.
        output: What `media` is: RGB8 frames `[T, H, W, 3]` for `np`, a tensor for `latent`, a list of PNG files for
            `png_frames`, else the bytes of one file.
        media: See `output`.
        metadata: The settings that were really used, sigmas and seed among them.
        timings: One per node of the graph, in order of finishing.
    """

    request_id: str
    mode: str
    output: OutputFormat
    media: Any
    metadata: dict[str, Any]
    timings: list[NodeTiming] = field(default_factory=list)

    def save(self, path: str | Path) -> Path:
        """Write the file, or the folder of frames, in one piece: aside first, then renamed.

        Raises:
            ValueError: the result is an array and no file.
            OSError: the target cannot be written.
        """
        if self.output in ("np", "latent"):
            raise ValueError(f"output {self.output!r} is an array in memory; ask for a file format to save it")
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        try:
            if self.output != "png_frames":
                (draft / path.name).write_bytes(self.media)
                (draft / path.name).replace(path)
                return path
            folder = draft / path.name
            folder.mkdir()
            for index, frame in enumerate(self.media):
                (folder / f"{index:05}.png").write_bytes(frame)
            # Replaces an empty folder; one that holds something is an OSError, and is left alone.
            folder.replace(path)
            return path
        finally:
            shutil.rmtree(draft, ignore_errors=True)
