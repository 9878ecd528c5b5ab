"""PyTorch's scaled dot product attention: runs everywhere, and is the reference for the other backends."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from .base import AttentionBackend, KVPrefix


class SDPABackend(AttentionBackend):
    """Each sequence is attended by itself, so its result does not depend on what it was packed with."""

    name = "sdpa"

    def causal(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return _attend(q, k, v, is_causal=True)

    def with_prefix(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        lengths: Sequence[int],
        prefixes: Sequence[KVPrefix],
    ) -> torch.Tensor:
        out = torch.empty_like(q)
        start = 0
        for length, prefix in zip(lengths, prefixes, strict=True):
            own = slice(start, start + length)
            text_k, text_v = prefix.layer(layer)
            out[own] = _attend(q[own], torch.cat((text_k, k[own])), torch.cat((text_v, v[own])), is_causal=False)
            start += length
        return out


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool) -> torch.Tensor:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)
