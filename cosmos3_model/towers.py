"""The two towers of the mixture-of-transformers stack, each with its own weights and none of the other's.

`UnderstandingTower` runs once per prompt and leaves per-layer K/V behind. `GenerationTower` runs at every denoise
step and reads that K/V as a frozen prefix. Nothing else passes between them, which is what allows them to live in
different processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from .attention import AttentionBackend, DensePrefix, KVPrefix
from .config import TransformerConfig
from .layers import MLP, DomainLinear, Embedding, Linear, RMSNorm, TimestepEmbedder
from .layout import Latents, Layout, Modality, Segment, patchify, text_positions, unpatchify
from .rotary import RotaryEmbedding, apply_rotary

# Keys that every checkpoint holds and no tower needs: logits, and the norm after the last text layer.
UNUSED_KEYS = ("lm_head.weight", "norm.weight")

# Matrix products of fewer rows than this take other kernels on the CPU, which sum in another order. Shorter batches
# are padded to it, so that a small picture by itself equals the same picture in company.
MIN_ROWS = 16

# Queries, keys and values `[N, heads, head_dim]` to attention's output, of the queries' shape.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class UnderstandingAttention(nn.Module):
    """Causal self-attention of text tokens."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        hidden, dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.head_dim = dim
        self.to_q = Linear(hidden, config.num_attention_heads * dim, bias=bias)
        self.to_k = Linear(hidden, config.num_key_value_heads * dim, bias=bias)
        self.to_v = Linear(hidden, config.num_key_value_heads * dim, bias=bias)
        self.to_out = Linear(config.num_attention_heads * dim, hidden, bias=bias)
        if config.qk_norm_for_text:
            self.norm_q = RMSNorm(dim, config)
            self.norm_k = RMSNorm(dim, config)
        elif config.use_und_k_norm_for_gen:
            self.k_norm_und_for_gen = RMSNorm(dim, config)

    def keys_values(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """K for text, K for generation (the same tensor unless the checkpoint norms it apart), and V."""
        k = self.to_k(x).unflatten(-1, (-1, self.head_dim))
        v = self.to_v(x).unflatten(-1, (-1, self.head_dim))
        if hasattr(self, "norm_k"):
            k = self.norm_k(k)
        rotated = apply_rotary(k, cos, sin)
        if hasattr(self, "k_norm_und_for_gen"):
            return rotated, apply_rotary(self.k_norm_und_for_gen(k), cos, sin), v
        return rotated, rotated, v

    def queries(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q = self.to_q(x).unflatten(-1, (-1, self.head_dim))
        if hasattr(self, "norm_q"):
            q = self.norm_q(q)
        return apply_rotary(q, cos, sin)


class UnderstandingLayer(nn.Module):
    """One decoder layer of text."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.self_attn = UnderstandingAttention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """`[N, hidden]` to the next hidden states, and K/V for generation; without `attend` only the K/V counts."""
        normed = self.input_layernorm(x)
        k, k_for_generation, v = self.self_attn.keys_values(normed, cos, sin)
        if attend is not None:
            x = x + self.self_attn.to_out(attend(self.self_attn.queries(normed, cos, sin), k, v).flatten(1))
            x = x + self.mlp(self.post_attention_layernorm(x))
        return x, (k_for_generation, v)


class UnderstandingTower(nn.Module):
    """Token ids to the K/V that generation reads."""

    def __init__(self, config: TransformerConfig, backend: AttentionBackend) -> None:
        super().__init__()
        self.config = config
        self.backend = backend
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(UnderstandingLayer(config) for _ in range(config.num_hidden_layers))
        self.rotary = RotaryEmbedding(config.head_dim, config.rope_theta, config.rope_axes_dim)

    @torch.inference_mode()
    def forward(self, input_ids: torch.Tensor) -> DensePrefix:
        """`[N]` token ids to K and V of every layer, each `[N, kv_heads, head_dim]`.

        What follows the last layer's K/V feeds nothing that generation reads, so it is not computed.
        """
        x = self.embed_tokens(input_ids)
        positions = text_positions(len(input_ids), self.config).to(x.device)
        cos, sin = self.rotary(positions, x.dtype)
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        for index, layer in enumerate(self.layers, start=1):
            x, kv = layer(x, cos, sin, self.backend.causal if index < len(self.layers) else None)
            kept.append(kv)
        return DensePrefix(kept)


class GenerationAttention(nn.Module):
    """Unmasked attention of generation tokens over [text K/V | their own]."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        hidden, dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.head_dim = dim
        self.add_q_proj = Linear(hidden, config.num_attention_heads * dim, bias=bias)
        self.add_k_proj = Linear(hidden, config.num_key_value_heads * dim, bias=bias)
        self.add_v_proj = Linear(hidden, config.num_key_value_heads * dim, bias=bias)
        self.to_add_out = Linear(config.num_attention_heads * dim, hidden, bias=bias)
        self.norm_added_q = RMSNorm(dim, config)
        self.norm_added_k = RMSNorm(dim, config)

    def project(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys (both normed and rotated) and values, each `[N, heads, head_dim]`."""
        q = self.norm_added_q(self.add_q_proj(x).unflatten(-1, (-1, self.head_dim)))
        k = self.norm_added_k(self.add_k_proj(x).unflatten(-1, (-1, self.head_dim)))
        v = self.add_v_proj(x).unflatten(-1, (-1, self.head_dim))
        return apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v


class GenerationLayer(nn.Module):
    """One decoder layer of generation tokens."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.self_attn = GenerationAttention(config)
        self.mlp_moe_gen = MLP(config)
        self.input_layernorm_moe_gen = RMSNorm(config.hidden_size, config)
        self.post_attention_layernorm_moe_gen = RMSNorm(config.hidden_size, config)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        """`[N, hidden]` to `[N, hidden]`."""
        q, k, v = self.self_attn.project(self.input_layernorm_moe_gen(x), cos, sin)
        x = x + self.self_attn.to_add_out(attend(q, k, v).flatten(1))
        return x + self.mlp_moe_gen(self.post_attention_layernorm_moe_gen(x))


@dataclass(frozen=True)
class Branch:
    """One guidance branch of one request at one step: what the generation tower needs to know of it.

    Attributes:
        latents: Of each modality, any floating type.
        timestep: Of the noisy frames, on the scheduler's scale (0 to 1000).
        layout: Positions and clean frames.
        prefix: The branch's frozen text K/V.
    """

    latents: Latents
    timestep: float
    layout: Layout
    prefix: KVPrefix


class GenerationTower(nn.Module):
    """Latents, timestep and frozen text K/V to velocity, for any number of branches in one forward."""

    def __init__(self, config: TransformerConfig, backend: AttentionBackend) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.config = config
        self.backend = backend
        self.layers = nn.ModuleList(GenerationLayer(config) for _ in range(config.num_hidden_layers))
        self.norm_moe_gen = RMSNorm(hidden, config)
        self.proj_in = Linear(config.patch_latent_dim, hidden)
        self.proj_out = Linear(hidden, config.patch_latent_dim)
        self.time_embedder = TimestepEmbedder(hidden)
        self.rotary = RotaryEmbedding(config.head_dim, config.rope_theta, config.rope_axes_dim)
        if config.sound_gen:
            self.audio_proj_in = Linear(config.sound_dim or 0, hidden)
            self.audio_proj_out = Linear(hidden, config.sound_dim or 0)
            self.audio_modality_embed = nn.Parameter(torch.empty(hidden))
        if config.action_gen:
            self.action_proj_in = DomainLinear(config.action_dim or 0, hidden, config.num_embodiment_domains)
            self.action_proj_out = DomainLinear(hidden, config.action_dim or 0, config.num_embodiment_domains)
            self.action_modality_embed = nn.Parameter(torch.empty(hidden))

    @torch.inference_mode()
    def forward(self, branches: list[Branch]) -> list[Latents]:
        """Velocity of each branch by modality, in the shapes of its latents, float32, zero on clean frames.

        The branches' tokens are packed along one axis: linear layers see them all at once, attention keeps each
        to itself and its own prefix.
        """
        lengths = [branch.layout.num_tokens for branch in branches]
        prefixes = [branch.prefix for branch in branches]
        x = torch.cat([self._embed(branch) for branch in branches])
        tables = [self.rotary(branch.layout.positions.to(x.device), x.dtype) for branch in branches]
        cos, sin = (torch.cat(parts) for parts in zip(*tables, strict=True))
        rows = len(x)
        x, cos, sin = (_pad_rows(table) for table in (x, cos, sin))
        for index, layer in enumerate(self.layers):

            def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_index: int = index) -> torch.Tensor:
                return _pad_rows(self.backend.with_prefix(layer_index, q[:rows], k[:rows], v[:rows], lengths, prefixes))

            x = layer(x, cos, sin, attend)
        x = self.norm_moe_gen(x)
        # Vision is nearly all of it, so it is projected for all branches at once; the rest branch by branch.
        pixels = self.proj_out(x)[:rows].split(lengths)
        hidden = x[:rows].split(lengths)
        return [
            self._velocities(branch.layout, *parts) for branch, *parts in zip(branches, hidden, pixels, strict=True)
        ]

    def _embed(self, branch: Branch) -> torch.Tensor:
        """Latents to hidden states; the timestep is added on noisy frames only."""
        dtype = self.proj_in.weight.dtype
        scaled = torch.tensor([branch.timestep], device=self.proj_in.weight.device) * self.config.timestep_scale
        embedding = self.time_embedder(scaled).to(dtype)
        parts = []
        for name, segment in branch.layout.segments.items():
            x = self._project_in(name, branch.latents[name].to(dtype), segment)
            frames = x.view(segment.grid[0], -1, x.shape[-1])
            frames[segment.noisy_frames] += embedding
            parts.append(frames.flatten(0, 1))
        return torch.cat(parts)

    def _project_in(self, name: Modality, latents: torch.Tensor, segment: Segment) -> torch.Tensor:
        if name == "vision":
            return self.proj_in(patchify(latents, self.config.latent_patch_size))
        if name == "sound":
            return self.audio_proj_in(latents.T) + self.audio_modality_embed
        return self.action_proj_in(latents, segment.domain_id) + self.action_modality_embed

    def _velocities(self, layout: Layout, hidden: torch.Tensor, pixels: torch.Tensor) -> Latents:
        """One branch's hidden states, and what `proj_out` made of all of them, to velocities."""
        velocities: Latents = {}
        start = 0
        for name, segment in layout.segments.items():
            part = slice(start, start + segment.num_tokens)
            start = part.stop
            clean = list(segment.clean_frames)
            if name == "vision":
                velocity = unpatchify(pixels[part], segment, self.config.latent_patch_size).float()
                velocity[:, :, clean] = 0
            elif name == "sound":
                velocity = self.audio_proj_out(hidden[part]).T.float()
            else:
                velocity = self.action_proj_out(hidden[part], segment.domain_id).float()
                velocity[clean] = 0
            velocities[name] = velocity
        return velocities


def _pad_rows(x: torch.Tensor) -> torch.Tensor:
    """`[N, ...]` with zero rows up to `MIN_ROWS`; the tensor itself where there are enough."""
    missing = MIN_ROWS - len(x)
    return nn.functional.pad(x, (0, 0) * (x.ndim - 1) + (0, missing)) if missing > 0 else x
