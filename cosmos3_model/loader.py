"""Streams safetensors into a module that was built on the meta device, strict in both directions.

A tower asks for its own keys only, so a prefill worker never reads a generation weight and the other way
round; the *names* of the whole checkpoint are checked all the same, because a key that no tower knows means
that the checkpoint is not what the config says it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from .config import SnapshotError, read_json

INDEX_SUFFIX = ".safetensors.index.json"
Header = dict[str, tuple[Path, tuple[int, ...]]]


def read_header(folder: Path) -> Header:
    """Map every key under `folder` to its file and shape, reading headers only.

    Raises:
        SnapshotError: no weights, a shard that the index names is absent, or a file that is cut short.
    """
    indexes = sorted(folder.glob(f"*{INDEX_SUFFIX}"))
    placed: dict[str, str] = {}
    if indexes:
        placed = read_json(indexes[0]).get("weight_map", {})
        if not isinstance(placed, dict) or not all(isinstance(name, str) for name in placed.values()):
            raise SnapshotError(f"{indexes[0]}: weight_map must place each key in a file")
        files = sorted({folder / name for name in placed.values()})
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise SnapshotError(f"{folder}: no .safetensors file")
    header: Header = {}
    for file in files:
        if not file.is_file():
            raise SnapshotError(f"{file}: shard is missing, though the index names it")
        with _open(file) as stream:
            for key in stream.keys():  # noqa: SIM118 - not a dict, and not iterable
                header[key] = (file, tuple(stream.get_slice(key).get_shape()))
    for key, name in placed.items():
        if key not in header:
            raise SnapshotError(f"{folder / name}: key {key} is missing, though the index places it there")
    return header


def check_keys(header: Header, expected: dict[str, tuple[int, ...]], folder: Path) -> None:
    """Compare a header with the keys and shapes that a model expects; the first difference is the error."""
    for key, shape in expected.items():
        if key not in header:
            raise SnapshotError(f"{folder}: key {key} is missing")
        if header[key][1] != shape:
            raise SnapshotError(f"{header[key][0]}: key {key} has shape {list(header[key][1])}, expected {list(shape)}")
    for key in header:
        if key not in expected:
            raise SnapshotError(f"{header[key][0]}: unexpected key {key}")


def load_weights(
    module: nn.Module,
    header: Header,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    keep_float32: Iterable[str] = (),
) -> None:
    """Fill a meta-built `module` with its keys from `header`, converted to `dtype` one tensor at a time.

    Args:
        module: Its `state_dict` keys are checkpoint keys. Every one must be in `header`.
        header: From `read_header`, already checked.
        device: Where the tensors end up.
        dtype: Type of floating-point weights.
        keep_float32: Key prefixes whose tensors stay in float32 whatever `dtype` says.
    """
    kept = tuple(keep_float32)
    tensors: dict[str, torch.Tensor] = {}
    with ExitStack() as stack:
        streams: dict[Path, Any] = {}
        for key in module.state_dict():
            file = header[key][0]
            if file not in streams:
                streams[file] = stack.enter_context(_open(file))
            tensor = streams[file].get_tensor(key)
            target = torch.float32 if key.startswith(kept or "\0") else dtype
            tensors[key] = tensor.to(device=device, dtype=target if tensor.is_floating_point() else tensor.dtype)
    module.load_state_dict(tensors, strict=True, assign=True)
    module.requires_grad_(False).eval()


def shapes_of(build: Callable[[], nn.Module]) -> dict[str, tuple[int, ...]]:
    """Keys and shapes of the module that `build` makes, without allocating it."""
    with torch.device("meta"):
        return {key: tuple(value.shape) for key, value in build().state_dict().items()}


def _open(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise SnapshotError(f"{file}: not a complete safetensors file ({error})") from None
