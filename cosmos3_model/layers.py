"""The parts that both towers are made of. Parameter names are the checkpoint's."""

from __future__ import annotations

import math

import torch
from torch import nn

from .config import TransformerConfig


class Linear(nn.Linear):
    """`nn.Linear` that leaves its weights alone: they always come from a checkpoint.

    Drawing random ones for a module on the meta device would import torch's tracing stack, over a second for nothing.
    """

    def reset_parameters(self) -> None:
        pass


class Embedding(nn.Embedding):
    """`nn.Embedding`, likewise."""

    def reset_parameters(self) -> None:
        pass


class RMSNorm(nn.Module):
    """Root-mean-square norm with its statistics in float32.

    Two published forms differ in where they leave float32: silu checkpoints scale in the input's type, relu2
    (Nemotron) checkpoints scale in float32 first. `config.hidden_act` tells them apart.
    """

    def __init__(self, size: int, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = config.rms_norm_eps
        self.scale_in_float32 = config.hidden_act == "relu2"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., size]` to the same shape and type."""
        wide = x.float()
        inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.scale_in_float32:
            return (self.weight.float() * (wide * inverse)).to(x.dtype)
        return (x * inverse).to(x.dtype) * self.weight


class MLP(nn.Module):
    """Gated silu, or squared relu without a gate, as the checkpoint has it."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.gated = config.hidden_act == "silu"
        if self.gated:
            self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[N, hidden]` to `[N, hidden]`."""
        if self.gated:
            return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return self.down_proj(torch.relu(self.up_proj(x)).square())


class TimestepEmbedder(nn.Module):
    """Sinusoid of 256 (cosines first), then a two-layer MLP; both in float32."""

    WIDTH = 256

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear_1 = Linear(self.WIDTH, hidden_size)
        self.linear_2 = Linear(hidden_size, hidden_size)

    def forward(self, timesteps: torch.Tensor) -> torch.Tensor:
        """`[B]` scaled timesteps to `[B, hidden]` float32."""
        half = self.WIDTH // 2
        ladder = torch.arange(half, dtype=torch.float32, device=timesteps.device)
        angles = timesteps.float()[:, None] * torch.exp(-math.log(10_000) * ladder / half)
        wave = torch.cat((angles.cos(), angles.sin()), dim=-1)
        return self.linear_2(nn.functional.silu(self.linear_1(wave)))


class DomainLinear(nn.Module):
    """One weight and bias per robot embodiment, stored as two embeddings (diffusers' `DomainAwareLinear`)."""

    def __init__(self, size_in: int, size_out: int, domains: int) -> None:
        super().__init__()
        self.fc = Embedding(domains, size_in * size_out)
        self.bias = Embedding(domains, size_out)

    def forward(self, x: torch.Tensor, domain_id: int) -> torch.Tensor:
        """`[N, size_in]` to `[N, size_out]` with the weights of one domain."""
        bias = self.bias.weight[domain_id]
        return torch.addmm(bias, x, self.fc.weight[domain_id].view(-1, len(bias)))
