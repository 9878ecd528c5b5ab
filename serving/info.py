"""What a snapshot is and needs, from its configs and the headers of its weights. No weight is read."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from cosmos3_model.config import SnapshotConfig
from cosmos3_model.families import family_of, lacks_sound
from cosmos3_model.loader import read_header
from cosmos3_model.prompts import check_tokenizer
from cosmos3_model.transformer import check_transformer, count_parameters
from graph.defaults import Defaults, defaults_of
from graph.document import defaults_cells
from graph.modes import MODES, modes_of, refusal
from graph.placement import StorePlacement
from kvstore.handle import ITEMSIZE

STYLE: dict[str, Any] = {"box": box.SIMPLE_HEAD, "pad_edge": False}


def describe(folder: Path) -> dict[str, Any]:
    """Family, parameters, modes, defaults and memory of a snapshot, as plain values.

    Raises:
        SnapshotError: it is not usable.
    """
    snapshot = SnapshotConfig.from_folder(folder)
    check_tokenizer(snapshot.root)
    check_transformer(snapshot)
    family, config = family_of(snapshot), snapshot.transformer
    parameters = count_parameters(snapshot) | {"vae": _numbers(folder / "vae", "")}
    float32 = parameters.pop("generation_float32")
    if lacks_sound(snapshot) is None:
        parameters["sound_decoder"] = _numbers(folder / "sound_tokenizer", "decoder.")
    kv_numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    nodes = {"encoder": "vae", "prefill": "understanding", "denoise": "generation", "vae_decode": "vae"}
    if "sound_decoder" in parameters:
        nodes["sound_decode"] = "sound_decoder"
    pool_tokens = StorePlacement().pool_tokens
    modes = modes_of(snapshot)
    return {
        "family": family,
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "heads": f"{config.num_attention_heads} query, {config.num_key_value_heads} K/V, of {config.head_dim}",
        "parameters": parameters,
        "modes": modes,
        "refused": {mode: refusal(snapshot, mode) for mode in MODES if mode not in modes},
        "defaults": {mode: asdict(defaults_of(family, mode)) for mode in modes},
        "memory_bytes": {
            dtype: {
                node: parameters[part] * size + (float32 * (4 - size) if node == "denoise" else 0)
                for node, part in nodes.items()
            }
            | {"kvstore": pool_tokens * kv_numbers * size}
            for dtype, size in ITEMSIZE.items()
            if dtype != "float16"
        },
        "kv_bytes_per_token": kv_numbers * ITEMSIZE["bfloat16"],
        "pool_tokens": pool_tokens,
    }


def show(found: dict[str, Any], console: Console) -> None:
    """Print what `describe` found."""
    console.print(f"family      {found['family']}")
    console.print(f"network     {found['layers']} layers, hidden {found['hidden_size']}, heads: {found['heads']}")
    parts = ", ".join(f"{name} {_count(numbers)}" for name, numbers in found["parameters"].items())
    console.print(f"parameters  {parts}")
    reasons = dict.fromkeys(found["refused"].values())
    for reason in reasons:
        modes = [mode for mode, why in found["refused"].items() if why == reason]
        console.print(f"refused     {', '.join(modes)}: {reason}")
    table = Table("mode", "size", "frames", "steps", "guidance", "shift", "fps", **STYLE)
    for mode, row in found["defaults"].items():
        table.add_row(mode, *defaults_cells(Defaults(**row)))
    console.print(table)
    memory = Table("memory of node", *found["memory_bytes"], **STYLE)
    for node in next(iter(found["memory_bytes"].values())):
        memory.add_row(node, *(_bytes(column[node]) for column in found["memory_bytes"].values()))
    console.print(memory)
    per_token = _bytes(found["kv_bytes_per_token"])
    console.print(
        f"Weights, and the store's default pool of {found['pool_tokens']} tokens; a request's own need comes on top."
    )
    console.print(f"Text K/V takes {per_token} a token and branch in bfloat16.")


def _numbers(folder: Path, prefix: str) -> int:
    return sum(math.prod(shape) for key, (_, shape) in read_header(folder).items() if key.startswith(prefix))


def _count(numbers: float) -> str:
    return _short(numbers, 1000, ("", " K", " M", " B"))


def _bytes(size: float) -> str:
    return _short(size, 1024, (" bytes", " KiB", " MiB", " GiB"))


def _short(value: float, step: int, units: tuple[str, ...]) -> str:
    """Four digits and the largest of the units that leaves a whole."""
    power = min(int(math.log(max(value, 1), step)), len(units) - 1)
    return f"{value / step**power:.4g}{units[power]}"
