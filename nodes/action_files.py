"""Actions in and out: JSON, NPY and msgpack files of `[T, D]` numbers."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from .media import MediaError

MAX_NUMBERS = 1 << 20
SUFFIXES = (".json", ".npy", ".msgpack")


def load_actions(source: Any) -> np.ndarray:
    """Actions as float32 `[T, D]`, T and D at least 1.

    Args:
        source: An array, nested lists, or the path of a `.json`, `.npy` or `.msgpack` file. A file holds the rows
            themselves or, as `encode_actions` writes it, a map with the rows under `actions`.

    Raises:
        MediaError: it is not there, damaged, or not a table of finite numbers.
    """
    name = str(source) if isinstance(source, str | Path) else "the actions"
    if isinstance(source, str | Path):
        source = _read(Path(source))
    if isinstance(source, dict):
        if "actions" not in source:
            raise MediaError(f"{name}: a map without the key 'actions'")
        source = source["actions"]
    try:
        actions = np.array(source, dtype=np.float64)
    except (TypeError, ValueError):
        raise MediaError(f"{name}: not a table of numbers, every row as long as the others") from None
    if actions.ndim != 2 or 0 in actions.shape or actions.size > MAX_NUMBERS:
        raise MediaError(f"{name}: must be [T, D] with at most {MAX_NUMBERS} numbers, got {list(actions.shape)}")
    with np.errstate(over="ignore"):
        single = actions.astype(np.float32)
    if not np.isfinite(single).all():
        raise MediaError(f"{name}: holds a number that is not finite")
    return single


def _read(path: Path) -> Any:
    readers: dict[str, Callable[[bytes], Any]] = {
        ".json": json.loads,
        ".npy": lambda data: np.load(io.BytesIO(data), allow_pickle=False),
        ".msgpack": msgpack.unpackb,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise MediaError(f"{path}: suffix {path.suffix!r} is not one of {', '.join(readers)}")
    try:
        return reader(path.read_bytes())
    except FileNotFoundError:
        raise MediaError(f"{path}: no such file") from None
    except OSError as error:
        raise MediaError(f"{path}: {error.strerror or error}") from None
    except Exception as error:  # noqa: BLE001 - three parsers, each with errors of its own
        raise MediaError(f"{path}: not a {path.suffix} file ({' '.join(str(error).split())[:80]})") from None


def encode_actions(actions: np.ndarray, domain_name: str, suffix: str) -> bytes:
    """The bytes of a `.json`, `.npy` or `.msgpack` file of actions `[T, D]`; `load_actions` reads it back exactly.

    Raises:
        MediaError: another suffix.
    """
    if suffix not in SUFFIXES:
        raise MediaError(f"actions go into {', '.join(SUFFIXES)} files, not {suffix!r}")
    if suffix == ".npy":
        stream = io.BytesIO()
        np.save(stream, actions)
        return stream.getvalue()
    values = {"domain_name": domain_name, "actions": actions.tolist()}
    if suffix == ".msgpack":
        return msgpack.packb(values)
    return (json.dumps(values, indent=1) + "\n").encode()
