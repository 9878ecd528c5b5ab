"""Which published checkpoint a snapshot is one of, told by its structure: no file of a snapshot names its family."""

from __future__ import annotations

from .config import SnapshotConfig

FAMILIES = ("nano", "super", "edge", "nano-policy-droid", "super-t2i-4step", "super-i2v-4step")


def family_of(snapshot: SnapshotConfig) -> str:
    """One of `FAMILIES`.

    Fixed sigmas make a 4-step checkpoint, and sound weights tell its two apart. Edge alone uses relu2. Super has
    eight or more query heads per K/V head, Nano four. Nano without sound is the policy for DROID.
    """
    config = snapshot.transformer
    if snapshot.distilled_sigmas:
        return "super-t2i-4step" if config.sound_gen else "super-i2v-4step"
    if config.hidden_act == "relu2":
        return "edge"
    if config.num_attention_heads >= 8 * config.num_key_value_heads:
        return "super"
    return "nano" if config.sound_gen or not config.action_gen else "nano-policy-droid"


def lacks_sound(snapshot: SnapshotConfig) -> str | None:
    """Why the snapshot cannot make sound, or None if it can."""
    if snapshot.distilled_sigmas:
        return "a 4-step checkpoint makes pictures and clips only"
    if not snapshot.transformer.sound_gen:
        return f"this checkpoint ({family_of(snapshot)}) was trained without sound"
    return None if snapshot.sound is not None else "the snapshot has no sound_tokenizer folder"


def lacks_actions(snapshot: SnapshotConfig) -> str | None:
    """Why the snapshot cannot take or make actions, or None if it can."""
    if snapshot.distilled_sigmas:
        return "a 4-step checkpoint makes pictures and clips only"
    return None if snapshot.transformer.action_gen else f"this checkpoint ({family_of(snapshot)}) has no actions"
