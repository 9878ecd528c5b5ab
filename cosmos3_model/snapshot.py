"""Writes small random snapshots in the published layout, so that every code path runs without a download.

The weights are random but scaled so that activations keep their size from layer to layer: a prompt, a seed and a
step each change the result visibly, which tests rely on.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from .config import SnapshotConfig, TransformerConfig
from .transformer import expected_shapes

FAMILIES = ("nano",)
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
    heads: int
    kv_heads: int
    head_dim: int
    rope_axes: tuple[int, int, int]
    vae_base: int
    vae_decoder_base: int


SIZES = {
    "tiny": Size(2, 64, 160, 4, 2, 16, (4, 2, 2), 8, 8),
    "small": Size(4, 512, 1536, 4, 2, 128, (24, 20, 20), 16, 16),
}

SCHEDULER = {
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
        _fill(draft, SIZES[size], seed)
        draft.chmod(0o755)
        if root.exists():
            root.rmdir()
        draft.rename(root)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return root


def _fill(root: Path, size: Size, seed: int) -> None:
    vocab_size = _write_tokenizer(root / "text_tokenizer")
    _write_json(root / "model_index.json", MODEL_INDEX)
    _write_json(root / "scheduler" / "scheduler_config.json", SCHEDULER)
    _write_json(root / "transformer" / "config.json", _transformer_config(size, vocab_size))
    _write_vae(root / "vae", size, seed)
    snapshot = SnapshotConfig.from_folder(root)
    _write_transformer(root / "transformer", expected_shapes(snapshot), snapshot.transformer, seed)


# Nano's published index still carries the class name that it had before diffusers took the pipeline in.
MODEL_INDEX = {
    "_class_name": "Cosmos3OmniDiffusersPipeline",
    "scheduler": ["diffusers", "UniPCMultistepScheduler"],
    "text_tokenizer": ["transformers", "Qwen2Tokenizer"],
    "transformer": ["diffusers", "Cosmos3OmniTransformer"],
    "vae": ["diffusers", "AutoencoderKLWan"],
}


def _transformer_config(size: Size, vocab_size: int) -> dict[str, Any]:
    return {
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
        "num_attention_heads": size.heads,
        "num_hidden_layers": size.layers,
        "num_key_value_heads": size.kv_heads,
        "patch_latent_dim": 192,
        "qk_norm_for_text": True,
        "rms_norm_eps": 1e-6,
        "rope_axes_dim": list(size.rope_axes),
        "rope_theta": 5_000_000.0,
        "action_gen": True,
        "action_dim": 64,
        "num_embodiment_domains": 32,
        "sound_gen": True,
        "sound_dim": 64,
        "sound_latent_fps": 25.0,
        "timestep_scale": 0.001,
        "unified_3d_mrope_reset_spatial_ids": True,
        "unified_3d_mrope_temporal_modality_margin": 15000,
        "use_und_k_norm_for_gen": False,
        "vocab_size": vocab_size,
    }


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


def _write_transformer(folder: Path, shapes: dict[str, tuple[int, ...]], config: TransformerConfig, seed: int) -> None:
    generator = torch.Generator("cpu").manual_seed(seed)
    tensors = {key: _random(key, shapes[key], generator).to(torch.bfloat16) for key in sorted(shapes)}
    weight_map: dict[str, str] = {}
    for number, keys in enumerate(_split(list(tensors), SHARDS), start=1):
        name = f"diffusion_pytorch_model-{number:05}-of-{SHARDS:05}.safetensors"
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
            decoder_base_dim=size.vae_decoder_base,
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


def _split(items: list[str], parts: int) -> Iterator[list[str]]:
    size = -(-len(items) // parts)
    return (items[start : start + size] for start in range(0, len(items), size))


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
