"""Where `cosmoray generate` writes what, settled and checked before any work."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from graph.request import RequestError
from graph.result import GenerationResult
from nodes.action_files import SUFFIXES as ACTION_SUFFIXES
from nodes.job import OutputFormat
from nodes.media import SUFFIXES as MEDIA_SUFFIXES


@dataclass(frozen=True)
class Outputs:
    """The files of one request.

    Attributes:
        format: What the media is made into; `actions` for none.
        media: Picture, clip or folder of frames, or None.
        actions: JSON, NPY or msgpack file, or None.
        sound: WAV file, or None.
    """

    format: OutputFormat
    media: Path | None
    actions: Path | None
    sound: Path | None

    @classmethod
    def plan(
        cls, out: Path, video_out: Path | None, sound_out: Path | None, action: str | None, sound: bool = False
    ) -> Outputs:
        """Sort the paths by what the request makes.

        Raises:
            RequestError: a path that could not be written to after all the work, or of the wrong kind.
        """
        makes_actions = action in ("policy", "inverse_dynamics")
        for path in filter(None, (out, video_out, sound_out)):
            _check_place("output" if path is out else "video_out" if path is video_out else "sound_out", path)
        places = [path.absolute() for path in (out, video_out, sound_out) if path is not None]
        if len(set(places)) < len(places):
            raise RequestError("output", f"{out}: two results cannot go into one file")
        if sound_out is not None and sound_out.suffix.lower() != ".wav":
            raise RequestError("sound_out", f"{sound_out}: suffix {sound_out.suffix!r} is not .wav")
        if not makes_actions:
            if video_out is not None:
                raise RequestError("video_out", "only --action policy makes actions and a clip; use --out")
            kind = _media_format("output", out)
            if sound and sound_out is None and kind != "mp4":
                raise RequestError("output", f"{out}: only MP4 files hold sound; add --sound-out FILE.wav")
            return cls(kind, out, None, sound_out)
        if out.suffix.lower() not in ACTION_SUFFIXES:
            hint = "; the clip goes to --video-out" if action == "policy" else ""
            raise RequestError("output", f"{out}: actions go into {', '.join(ACTION_SUFFIXES)} files{hint}")
        if video_out is not None and action != "policy":
            raise RequestError("video_out", f"{action} makes no clip")
        media: OutputFormat = "actions" if video_out is None else _media_format("video_out", video_out)
        return cls(media, video_out, out, sound_out)

    def write(self, result: GenerationResult) -> list[Path]:
        """Save everything; the paths."""
        written = []
        if self.media is not None:
            written.append(result.save(self.media))
        if self.actions is not None:
            written.append(result.save_actions(self.actions))
        if self.sound is not None:
            written.append(result.save_sound(self.sound))
        return written


def _media_format(field: str, path: Path) -> OutputFormat:
    suffix = path.suffix.lower()
    if suffix not in MEDIA_SUFFIXES:
        kinds = ", ".join(key for key in MEDIA_SUFFIXES if key)
        raise RequestError(field, f"{path}: suffix {suffix!r} is not one of {kinds}, or none for a folder of PNGs")
    return MEDIA_SUFFIXES[suffix]


def _check_place(field: str, path: Path) -> None:
    if path.suffix == "" and path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise RequestError(field, f"{path}: exists and is not an empty folder")
    if path.suffix and path.is_dir():
        raise RequestError(field, f"{path}: is a folder")
    for parent in path.absolute().parents:
        if parent.exists():
            if not parent.is_dir():
                raise RequestError(field, f"{path}: {parent} is not a folder")
            if not os.access(parent, os.W_OK | os.X_OK):
                raise RequestError(field, f"{path}: {parent} may not be written to")
            break
