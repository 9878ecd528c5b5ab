"""What comes back: picture, clip, sound, actions, and how they were made."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nodes.action_files import encode_actions
from nodes.job import OutputFormat
from nodes.media import encode_wav


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
            `png_frames`, None for `actions`, else the bytes of one file.
        media: See `output`.
        metadata: The settings that were really used, sigmas and seed among them.
        timings: One per node of the graph, in order of finishing.
        sound: Samples `[channels, N]` float32 in [-1, 1] at `metadata["sampling_rate"]`, or None.
        actions: `[chunk_size, width]` float32, or None.
    """

    request_id: str
    mode: str
    output: OutputFormat
    media: Any
    metadata: dict[str, Any]
    timings: list[NodeTiming] = field(default_factory=list)
    sound: np.ndarray | None = None
    actions: np.ndarray | None = None

    def save(self, path: str | Path) -> Path:
        """Write the file, or the folder of frames, in one piece: aside first, then renamed.

        Raises:
            ValueError: the result is an array and no file.
            OSError: the target cannot be written.
        """
        if self.output in ("np", "latent", "actions"):
            raise ValueError(f"output {self.output!r} is an array in memory; ask for a file format to save it")
        if self.output != "png_frames":
            return _write(Path(path), self.media)
        return _write(Path(path), {f"{index:05}.png": frame for index, frame in enumerate(self.media)})

    def save_sound(self, path: str | Path) -> Path:
        """Write the sound as a WAV file; errors as in `save`."""
        if self.sound is None:
            raise ValueError(f"a {self.mode} result has no sound")
        return _write(Path(path), encode_wav(self.sound, self.metadata["sampling_rate"]))

    def save_actions(self, path: str | Path) -> Path:
        """Write the actions as JSON, NPY or msgpack, by the suffix; errors as in `save`."""
        if self.actions is None:
            raise ValueError(f"a {self.mode} result has no actions")
        path = Path(path)
        return _write(path, encode_actions(self.actions, self.metadata["domain_name"], path.suffix.lower()))


def _write(path: Path, content: bytes | dict[str, bytes]) -> Path:
    """A file, or a folder of files. An interruption leaves neither half of it nor a draft."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        target = draft / path.name
        if isinstance(content, bytes):
            target.write_bytes(content)
        else:
            target.mkdir()
            for name, data in content.items():
                (target / name).write_bytes(data)
        # Replaces a file or an empty folder; a folder that holds something is an OSError, and is left alone.
        target.replace(path)
        return path
    finally:
        shutil.rmtree(draft, ignore_errors=True)
