"""Prompt text to token ids: metadata sentences, chat template, closing tokens, as diffusers' `tokenize_prompt`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .actions import caption
from .config import SnapshotConfig, SnapshotError

SYSTEM_IMAGE = "You are a helpful assistant who will generate images from a give prompt."
SYSTEM_VIDEO = "You are a helpful assistant who will generate videos from a give prompt."


@dataclass(frozen=True)
class PromptSettings:
    """The two texts and what the templates say about the clip; switches are named as in diffusers.

    With an `action_view_point` the prompt becomes the JSON caption of action requests instead, and the negative
    prompt stays as it is.
    """

    prompt: str
    negative_prompt: str
    num_frames: int
    height: int
    width: int
    fps: float
    use_system_prompt: bool
    add_resolution_template: bool = True
    add_duration_template: bool = True
    action_view_point: str | None = None


def describe(settings: PromptSettings, *, negative: bool) -> str:
    """The text of one branch with its metadata sentences; the negative prompt gets their inverses."""
    image = settings.num_frames == 1
    verb = "is not" if negative else "is"
    text = settings.negative_prompt if negative else settings.prompt
    if settings.action_view_point is not None:
        return text if negative else _action_caption(settings, settings.action_view_point)
    if settings.add_duration_template and not image:
        seconds = settings.num_frames / settings.fps
        text = _append(text, f"The video {verb} {seconds:.1f} seconds long and {verb} of {settings.fps:.0f} FPS.")
    if settings.add_resolution_template:
        kind = "image" if image else "video"
        text = _append(text, f"This {kind} {verb} of {settings.height}x{settings.width} resolution.")
    return text


def _action_caption(settings: PromptSettings, view_point: str) -> str:
    return caption(
        settings.prompt,
        view_point=view_point,
        num_frames=settings.num_frames,
        fps=settings.fps,
        height=settings.height,
        width=settings.width,
    )


def _append(text: str, sentence: str) -> str:
    text = text.rstrip(".")
    return f"{text}. {sentence}" if text else sentence


class PromptTokenizer:
    """The snapshot's own tokenizer and chat template."""

    def __init__(self, snapshot: SnapshotConfig) -> None:
        """Load `text_tokenizer/`.

        Raises:
            SnapshotError: no tokenizer there, or one without the tokens that close a prompt.
        """
        folder = check_tokenizer(snapshot.root)
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise SnapshotError(f"{folder}: the tokenizer does not load ({_first_line(error)})") from None
        start = self._tokenizer.convert_tokens_to_ids("<|vision_start|>")
        if start is None or self._tokenizer.eos_token_id is None:
            raise SnapshotError(f"{folder}: the tokenizer has no eos token or no <|vision_start|>")
        self._closing = [self._tokenizer.eos_token_id, start]

    def __call__(self, settings: PromptSettings) -> tuple[list[int], list[int]]:
        """Token ids of the conditional and of the unconditional branch."""
        system = SYSTEM_IMAGE if settings.num_frames == 1 else SYSTEM_VIDEO
        conditional, unconditional = (
            self._encode(describe(settings, negative=negative), system if settings.use_system_prompt else None)
            for negative in (False, True)
        )
        return conditional, unconditional

    def _encode(self, text: str, system: str | None) -> list[int]:
        chat = [{"role": "system", "content": system}] if system else []
        chat.append({"role": "user", "content": text})
        encoded = self._tokenizer.apply_chat_template(
            chat, tokenize=True, add_generation_prompt=True, add_vision_id=False, return_dict=True
        )
        return list(encoded["input_ids"]) + self._closing


def check_tokenizer(root: Path) -> Path:
    """The tokenizer folder of a snapshot; its absence is a `SnapshotError`."""
    folder = root / "text_tokenizer"
    if not (folder / "tokenizer_config.json").is_file():
        raise SnapshotError(f"{folder}: no tokenizer (tokenizer_config.json is missing)")
    return folder


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
