"""What a snapshot folder says about itself, read once into frozen dataclasses.

Nothing here has a default of our own: a value that differs by checkpoint comes from the checkpoint's files, and
a key that a file may leave out takes the value that diffusers' `Cosmos3OmniTransformer` gives it.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any


class SnapshotError(ValueError):
    """A snapshot folder that cannot be used. The message is one line and names the file or key."""


@dataclass(frozen=True)
class TransformerConfig:
    """`transformer/config.json`; names and defaults as in diffusers' `Cosmos3OmniTransformer`."""

    attention_bias: bool = False
    head_dim: int = 128
    hidden_size: int = 4096
    intermediate_size: int = 12288
    base_fps: float = 24
    enable_fps_modulation: bool = True
    latent_channel: int = 48
    unified_3d_mrope_reset_spatial_ids: bool = True
    unified_3d_mrope_temporal_modality_margin: int = 15000
    latent_patch_size: int = 2
    num_attention_heads: int = 32
    num_hidden_layers: int = 36
    num_key_value_heads: int = 8
    patch_latent_dim: int = 192
    rms_norm_eps: float = 1e-6
    rope_theta: float = 5_000_000.0
    rope_axes_dim: tuple[int, int, int] = (24, 20, 20)
    action_dim: int | None = None
    action_gen: bool = False
    num_embodiment_domains: int = 32
    sound_dim: int | None = None
    sound_gen: bool = False
    sound_latent_fps: float = 25.0
    timestep_scale: float = 0.001
    vocab_size: int = 151936
    hidden_act: str = "silu"
    qk_norm_for_text: bool = True
    use_und_k_norm_for_gen: bool = False

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TransformerConfig:
        """Build from the parsed JSON. Keys that only diffusers' own bookkeeping uses are passed over.

        Raises:
            SnapshotError: a value that the network has no code for.
        """
        known = {f.name for f in fields(cls)}
        picked = {name: value for name, value in values.items() if name in known and value is not None}
        if "rope_axes_dim" not in picked:
            scaling = values.get("rope_scaling") or {}
            picked["rope_axes_dim"] = scaling.get("mrope_section", cls.rope_axes_dim)
        for name, value in picked.items():
            if not _usable(name, value):
                raise SnapshotError(f"transformer/config.json: {name} holds an unusable value, {value!r}")
        picked["rope_axes_dim"] = tuple(picked["rope_axes_dim"])
        config = cls(**picked)
        if config.hidden_act not in ("silu", "relu2"):
            raise SnapshotError(f"transformer/config.json: hidden_act {config.hidden_act!r} is not silu or relu2")
        if sum(config.rope_axes_dim) * 2 != config.head_dim:
            raise SnapshotError(
                f"transformer/config.json: rope_axes_dim {list(config.rope_axes_dim)} must add up to "
                f"head_dim / 2 = {config.head_dim // 2}"
            )
        if config.num_attention_heads % config.num_key_value_heads:
            raise SnapshotError("transformer/config.json: num_attention_heads is no multiple of num_key_value_heads")
        return config


def _usable(name: str, value: Any) -> bool:
    """Whether a value of the JSON has the type of its field; numbers must be positive, a margin may be 0."""
    if name == "rope_axes_dim":
        return isinstance(value, list | tuple) and len(value) == 3 and all(type(size) is int for size in value)
    kind = type(getattr(TransformerConfig, name))  # of the field's default
    if kind in (bool, str):
        return isinstance(value, kind)
    fits = isinstance(value, int | float) if kind is float else type(value) is int
    return fits and (value > 0 or (value == 0 and name.endswith("margin")))


@dataclass(frozen=True)
class SnapshotConfig:
    """A snapshot folder: where it is and what its JSON files say."""

    root: Path
    transformer: TransformerConfig
    scheduler: dict[str, Any] = field(hash=False)
    vae: dict[str, Any] = field(hash=False)
    sound: dict[str, Any] | None = field(default=None, hash=False)
    default_use_system_prompt: bool = True
    use_native_flow_schedule: bool = False
    distilled_sigmas: tuple[float, ...] | None = None

    @classmethod
    def from_folder(cls, root: str | Path) -> SnapshotConfig:
        """Read the JSON files of the snapshot folder `root`.

        Raises:
            SnapshotError: the folder or one of its files is absent, is not JSON, or holds an unusable value.
        """
        root = Path(root)
        if not root.is_dir():
            raise SnapshotError(f"{root}: no such snapshot folder")
        index = _read_index(root)
        vae = read_json(root / "vae" / "config.json")
        for name in ("latents_mean", "latents_std"):
            if not isinstance(vae.get(name), list) or not all(isinstance(item, int | float) for item in vae[name]):
                raise SnapshotError(f"{root / 'vae' / 'config.json'}: {name} must be a list of numbers")
        sound = root / "sound_tokenizer" / "config.json"
        return cls(
            root=root,
            transformer=TransformerConfig.from_dict(read_json(root / "transformer" / "config.json")),
            scheduler=read_json(root / "scheduler" / "scheduler_config.json"),
            vae=vae,
            sound=read_json(sound) if sound.exists() else None,
            default_use_system_prompt=bool(index.get("default_use_system_prompt", True)),
            use_native_flow_schedule=bool(index.get("use_native_flow_schedule", False)),
            distilled_sigmas=_distilled_sigmas(root, index),
        )

    @property
    def spatial_compression(self) -> int:
        """Pixels per latent row or column."""
        return int(self.vae.get("scale_factor_spatial", 8))

    @property
    def temporal_compression(self) -> int:
        """Frames per latent frame, after the first, which stands alone."""
        return int(self.vae.get("scale_factor_temporal", 4))

    @property
    def latent_channels(self) -> int:
        return int(self.vae.get("z_dim", 16))

    def latent_shape(self, num_frames: int, height: int, width: int) -> tuple[int, int, int, int, int]:
        """`[1, channels, frames, rows, columns]` of the latents of a clip of that size in pixels."""
        frames = (num_frames - 1) // self.temporal_compression + 1
        s = self.spatial_compression
        return (1, self.latent_channels, frames, height // s, width // s)

    @property
    def sampling_rate(self) -> int:
        """Sound samples per second."""
        return int((self.sound or {}).get("sampling_rate", 48000))

    @property
    def hop_size(self) -> int:
        """Sound samples per sound latent."""
        sound = self.sound or {}
        return int(sound.get("hop_size") or math.prod(sound.get("dec_strides", (2, 4, 5, 6, 8))))

    def sound_shape(self, num_frames: int, fps: float) -> tuple[int, int]:
        """`[channels, length]` of the sound latents that cover a clip; the last one may reach beyond its end."""
        samples = int(num_frames / fps * self.sampling_rate)
        return (self.transformer.sound_dim or 0, -(-samples // self.hop_size))

    @cached_property
    def fingerprint(self) -> str:
        """Names the transformer's weights: of every file its size, its header, and a sample of its bytes.

        Reading 30 GB to name them would take as long as loading them. The sample is the first and last 64 KiB
        of each file, so that two checkpoints of one architecture differ.
        """
        digest = hashlib.sha256()
        for file in sorted((self.root / "transformer").iterdir()):
            if file.suffix not in (".json", ".safetensors"):
                continue
            size = file.stat().st_size
            digest.update(f"{file.name}:{size}:".encode())
            with file.open("rb") as stream:
                digest.update(stream.read(65536))
                stream.seek(max(0, size - 65536))
                digest.update(stream.read())
        return digest.hexdigest()[:32]


def _read_index(root: Path) -> dict[str, Any]:
    """The pipeline's own settings: `model_index.json`, or `modular_model_index.json`, or both."""
    files = [root / "model_index.json", root / "modular_model_index.json"]
    found = [read_json(file) for file in files if file.exists()]
    if not found:
        raise SnapshotError(f"{files[0]}: file is missing from the snapshot, and so is {files[1].name}")
    return {key: value for index in reversed(found) for key, value in index.items()}


def _distilled_sigmas(root: Path, index: dict[str, Any]) -> tuple[float, ...] | None:
    sigmas = index.get("distilled_sigmas")
    if not sigmas:
        return None
    if not isinstance(sigmas, list) or not all(isinstance(sigma, int | float) for sigma in sigmas):
        raise SnapshotError(f"{root / 'modular_model_index.json'}: distilled_sigmas must be a list of numbers")
    return tuple(float(sigma) for sigma in sigmas)


def read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON object; a missing or broken file is a `SnapshotError` that names it."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SnapshotError(f"{path}: file is missing from the snapshot") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise SnapshotError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(values, dict):
        raise SnapshotError(f"{path}: expected a JSON object")
    return values
