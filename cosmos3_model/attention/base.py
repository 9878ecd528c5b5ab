"""The one interface between towers and attention kernels, and between attention and cached text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class KVPrefix(Protocol):
    """Frozen K/V that generation tokens read ahead of their own. Where it lives is not the tower's business."""

    @property
    def num_tokens(self) -> int: ...

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer, each `[num_tokens, kv_heads, head_dim]`, K normed and rotated."""
        ...


@dataclass(frozen=True)
class DensePrefix:
    """A prefix held as plain tensors, one `(K, V)` pair a layer: what the understanding tower returns."""

    layers: list[tuple[torch.Tensor, torch.Tensor]]

    @property
    def num_tokens(self) -> int:
        return self.layers[0][0].shape[0]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layers[index]


class AttentionBackend(ABC):
    """Grouped-query attention over packed sequences. All tensors are `[N, heads, head_dim]`."""

    name: str

    @abstractmethod
    def causal(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Text over text: each token sees itself and those before it."""

    @abstractmethod
    def with_prefix(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        lengths: Sequence[int],
        prefixes: Sequence[KVPrefix],
    ) -> torch.Tensor:
        """Generation over [its prefix | itself], unmasked, for several packed sequences.

        Args:
            layer: Index of the layer, to ask the prefixes for.
            q: Queries of all sequences, one after the other.
            k: Likewise the keys, normed and rotated.
            v: Likewise the values.
            lengths: Tokens of each sequence; they add up to N.
            prefixes: The frozen prefix of each sequence.
        """
