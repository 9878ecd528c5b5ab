"""Writes small random snapshots in the published layout, so that every code path runs without a download.

The weights are random but scaled so that activations keep their size from layer to layer: a prompt, a seed and a
step each change the result visibly, which tests rely on.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from .config import SnapshotConfig
from .families import FAMILIES
from .sound import audio_tokenizer
from .transformer import expected_shapes

SHARDS = 2
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


@dataclass(frozen=True)
class Size:
    """Dimensions of a random snapshot; what is not here is as published."""

    layers: int
    hidden: int
    ffn: int
    kv_heads: int
    head_dim: int
    rope_axes: tuple[int, int, int]
    vae_base: int
    sound_base: int


SIZES = {
    "tiny": Size(2, 64, 160, 2, 16, (4, 2, 2), 8, 4),
    "small": Size(4, 512, 1536, 2, 128, (24, 20, 20), 16, 8),
}


@dataclass(frozen=True)
class Family:
    """What tells the snapshots of one family from another's.

    Attributes:
        queries: Query heads per K/V head.
        pipeline_class: In `model_index.json`; None where there is `modular_model_index.json` instead.
        sound: Whether the transformer has sound weights and the snapshot a sound tokenizer.
        action: Whether the transformer has action weights.
        sharded: Several files of weights with an index; else one file and none.
        transformer: Where its config differs from Nano's.
        index: Settings of the pipeline.
    """

    queries: int
    pipeline_class: str | None = "Cosmos3OmniPipeline"
    sound: bool = True
    action: bool = True
    sharded: bool = True
    transformer: Mapping[str, Any] = field(default_factory=dict)
    index: Mapping[str, Any] = field(default_factory=dict)


_EDGE = {
    "hidden_act": "relu2",
    "qk_norm_for_text": False,
    "use_und_k_norm_for_gen": True,
    "rope_theta": 1e8,
    "rms_norm_eps": 1e-5,
}
_DISTILLED = {"is_distilled": True, "distilled_sigmas": [1.0, 0.9375, 0.8333333333333334, 0.625]}
# Nano's published index still carries the class name that it had before diffusers took the pipeline in.
_OLD_CLASS = "Cosmos3OmniDiffusersPipeline"
RECIPES: dict[str, Family] = {
    "nano": Family(4, _OLD_CLASS),
    "super": Family(8),
    "edge": Family(2, sound=False, sharded=False, transformer=_EDGE, index={"use_native_flow_schedule": True}),
    "nano-policy-droid": Family(4, _OLD_CLASS, sound=False, sharded=False),
    "super-t2i-4step": Family(8, None, action=False, index=_DISTILLED),
    "super-i2v-4step": Family(8, None, sound=False, action=False, index=_DISTILLED),
}

UNIPC = {
    "_class_name": "UniPCMultistepScheduler",
    "num_train_timesteps": 1000,
    "solver_order": 2,
    "solver_type": "bh2",
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "use_karras_sigmas": True,
    "sigma_min": 0.147,
    "sigma_max": 200.0,
    "flow_shift": 1.0,
    "final_sigmas_type": "zero",
}
EULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "stochastic_sampling": True,
}


def write_snapshot(root: str | Path, *, family: str = "nano", size: str = "tiny", seed: int = 0) -> Path:
    """Write a random snapshot folder and return its path.

    Args:
        root: Folder to make. It must not exist, or be empty.
        family: One of `FAMILIES`.
        size: One of `SIZES`: `tiny` runs a request in under a second on one core, `small` has the published
            head_dim of 128 for GPU kernels.
        seed: Of the weights.

    Raises:
        ValueError: an unknown family or size.
        FileExistsError: the folder holds something already.
    """
    if family not in FAMILIES:
        raise ValueError(f"family: {family!r} is not one of {', '.join(FAMILIES)}")
    if size not in SIZES:
        raise ValueError(f"size: {size!r} is not one of {', '.join(SIZES)}")
    root = Path(root)
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise FileExistsError(f"{root}: exists and is not an empty folder")
    root.parent.mkdir(parents=True, exist_ok=True)
    # Written aside and renamed, so that an interrupted run leaves no half snapshot behind.
    draft = Path(tempfile.mkdtemp(prefix=f".{root.name}-", dir=root.parent))
    try:
        _fill(draft, RECIPES[family], SIZES[size], seed)
        draft.chmod(0o755)
        if root.exists():
            root.rmdir()
        draft.rename(root)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return root


def _fill(root: Path, family: Family, size: Size, seed: int) -> None:
    vocab_size = _write_tokenizer(root / "text_tokenizer")
    _write_index(root, family)
    scheduler = EULER if family.pipeline_class is None else UNIPC
    _write_json(root / "scheduler" / "scheduler_config.json", scheduler)
    _write_json(root / "transformer" / "config.json", _transformer_config(family, size, vocab_size))
    _write_vae(root / "vae", size, seed)
    if family.sound:
        _write_sound(root / "sound_tokenizer", size, seed)
    snapshot = SnapshotConfig.from_folder(root)
    shards = SHARDS if family.sharded else 1
    _write_transformer(root / "transformer", expected_shapes(snapshot), shards, seed)


def _write_index(root: Path, family: Family) -> None:
    parts: dict[str, list[str | None]] = {
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "sound_tokenizer": ["diffusers", "Cosmos3AVAEAudioTokenizer"] if family.sound else [None, None],
        "text_tokenizer": ["transformers", "Qwen2Tokenizer"],
        "transformer": ["diffusers", "Cosmos3OmniTransformer"],
        "vae": ["diffusers", "AutoencoderKLWan"],
    }
    if family.pipeline_class is not None:
        _write_json(root / "model_index.json", {"_class_name": family.pipeline_class, **parts, **family.index})
        return
    parts["scheduler"] = ["diffusers", "FlowMatchEulerDiscreteScheduler"]
    modular = {
        "_class_name": "Cosmos3DistilledModularPipeline",
        "_blocks_class_name": "Cosmos3DistilledBlocks",
        "default_use_system_prompt": True,
        "enable_safety_checker": True,
        **{
            name: [*kind, {"type_hint": kind, "pretrained_model_name_or_path": None, "subfolder": name}]
            for name, kind in parts.items()
            if name != "sound_tokenizer"
        },
        **family.index,
    }
    _write_json(root / "modular_model_index.json", modular)


def _transformer_config(family: Family, size: Size, vocab_size: int) -> dict[str, Any]:
    values: dict[str, Any] = {
        "_class_name": "Cosmos3OmniTransformer",
        "attention_bias": False,
        "base_fps": 24,
        "enable_fps_modulation": True,
        "head_dim": size.head_dim,
        "hidden_act": "silu",
        "hidden_size": size.hidden,
        "intermediate_size": size.ffn,
        "latent_channel": 48,
        "latent_patch_size": 2,
        "num_attention_heads": size.kv_heads * family.queries,
        "num_hidden_layers": size.layers,
        "num_key_value_heads": size.kv_heads,
        "patch_latent_dim": 192,
        "qk_norm_for_text": True,
        "rms_norm_eps": 1e-6,
        "rope_axes_dim": list(size.rope_axes),
        "rope_theta": 5_000_000.0,
        "action_gen": family.action,
        "num_embodiment_domains": 32,
        "sound_gen": family.sound,
        "sound_latent_fps": 25.0,
        "timestep_scale": 0.001,
        "unified_3d_mrope_reset_spatial_ids": True,
        "unified_3d_mrope_temporal_modality_margin": 15000,
        "use_und_k_norm_for_gen": False,
        "vocab_size": vocab_size,
    }
    if family.action:
        values["action_dim"] = 64
    if family.sound:
        values["sound_dim"] = 64
    return values | dict(family.transformer)


def _write_tokenizer(folder: Path) -> int:
    """A byte-level Qwen2 tokenizer: every text encodes, one token a byte. Returns the padded vocabulary size."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    vocab = {char: index for index, char in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer: Any = Qwen2Tokenizer(vocab=vocab, merges=[], eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL_TOKENS)})
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return -(-len(tokenizer) // 64) * 64


def _write_transformer(folder: Path, shapes: dict[str, tuple[int, ...]], shards: int, seed: int) -> None:
    generator = torch.Generator("cpu").manual_seed(seed)
    tensors = {key: _random(key, shapes[key], generator).to(torch.bfloat16) for key in sorted(shapes)}
    if shards == 1:
        save_file(tensors, folder / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for number, keys in enumerate(_split(list(tensors), shards), start=1):
        name = f"diffusion_pytorch_model-{number:05}-of-{shards:05}.safetensors"
        save_file({key: tensors[key] for key in keys}, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(keys, name)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(folder / "diffusion_pytorch_model.safetensors.index.json", index)


def _random(key: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Norm weights near 1, embeddings of unit size, products that keep the size of what goes through them."""
    noise = torch.randn(shape, generator=generator)
    if "norm" in key:
        return 1 + 0.1 * noise
    if key == "embed_tokens.weight":
        return noise
    if len(shape) == 1 or "bias" in key or "modality_embed" in key:
        return 0.1 * noise
    return noise * shape[-1] ** -0.5


def _write_vae(folder: Path, size: Size, seed: int) -> None:
    from diffusers import AutoencoderKLWan

    generator = torch.Generator("cpu").manual_seed(seed + 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + 1)
        vae: Any = AutoencoderKLWan(
            z_dim=48,
            base_dim=size.vae_base,
            decoder_base_dim=size.vae_base,
            dim_mult=[1, 2, 4, 4],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            is_residual=True,
            in_channels=12,
            out_channels=12,
            patch_size=2,
            scale_factor_spatial=16,
            scale_factor_temporal=4,
            latents_mean=(0.1 * torch.randn(48, generator=generator)).tolist(),
            latents_std=(0.5 + torch.rand(48, generator=generator)).tolist(),
        )
    vae.save_pretrained(folder)


def _write_sound(folder: Path, size: Size, seed: int) -> None:
    base = size.sound_base
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + 2)
        tokenizer = audio_tokenizer({"dec_dim": base, "enc_dim": base, "enc_num_blocks": 1})
        # Random weights make it so loud that nearly everything would be clipped.
        tokenizer.decoder.conv2.weight_g.data.mul_(0.2)
    tokenizer.save_pretrained(folder)


def _split(items: list[str], parts: int) -> Iterator[list[str]]:
    size = -(-len(items) // parts)
    return (items[start : start + size] for start in range(0, len(items), size))


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
