"""Attention backends, chosen by name. A tower calls the interface and never asks which one it has."""

from .base import AttentionBackend, DensePrefix, KVPrefix
from .sdpa import SDPABackend

__all__ = ["BACKENDS", "AttentionBackend", "DensePrefix", "KVPrefix", "get_backend"]

BACKENDS: dict[str, type[AttentionBackend]] = {"sdpa": SDPABackend}


def get_backend(name: str) -> AttentionBackend:
    """The backend called `name`.

    Raises:
        ValueError: no such backend; the message lists those that there are.
    """
    if name not in BACKENDS:
        raise ValueError(f"attention backend {name!r} is not one of {sorted(BACKENDS)}")
    return BACKENDS[name]()
