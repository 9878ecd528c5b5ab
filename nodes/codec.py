"""Tensors between processes as plain bytes.

Pickling a torch tensor into the object store is ten times slower than a numpy view of its bytes, and brings the
sender's device along. So a tensor travels as uint8 bytes, shape and dtype, and arrives as a read-only view of the
receiver's copy on the CPU, without another copy.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class PackedTensor:
    """A tensor's bytes `[nbytes]` uint8, with what is needed to read them."""

    data: np.ndarray
    shape: tuple[int, ...]
    dtype: torch.dtype


def pack(value: Any) -> Any:
    """Replace every tensor in nested dicts, lists and tuples by a `PackedTensor`."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        return PackedTensor(flat.view(torch.uint8).numpy(), tuple(value.shape), value.dtype)
    return _map(value, pack)


def unpack(value: Any) -> Any:
    """The inverse of `pack`. The tensors must not be written to: their bytes may be shared."""
    if isinstance(value, PackedTensor):
        if value.data.size == 0:
            return torch.empty(value.shape, dtype=value.dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(value.data).view(value.dtype).view(value.shape)
    return _map(value, unpack)


def _map(value: Any, function: Any) -> Any:
    if isinstance(value, dict):
        return {key: function(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(function(item) for item in value)
    return value
