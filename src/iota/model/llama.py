"""The Llama 3 family, one stage of it at a time: RMSNorm, RoPE, grouped-query attention, SwiGLU.

Uncompressed, the stages of a model give the logits of `transformers`' LlamaForCausalLM for the same weights. Weights
are left uninitialised: they always come from a checkpoint. Builds on the meta device for planning.
Legend: B batch, T sequence, D width, H heads, G kv heads, E head width, F feed-forward width, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from iota.config.schema import ModelConfig, RunConfig
from iota.model.boundary import DECODER, ENCODER, reads_ids, stream_width
from iota.model.cache import Past
from iota.model.codec_base import Projection
from iota.model.codec_subspace import FixedEmbedding
from iota.model.codecs import build_codec
from iota.model.layout import check_model, ffn_width

SCALING_FACTOR = 8.0
SCALING_LOW = 1.0
SCALING_HIGH = 4.0
SCALING_CONTEXT = 8192
"""Llama 3's rule for longer context: slow frequencies are divided by the factor, fast ones kept, a ramp between."""


def rope_frequencies(model: ModelConfig) -> torch.Tensor:
    """Angle per position of each channel pair, float32 [E/2], with Llama 3's scaling when configured."""
    width = model.width // model.heads
    frequency = 1.0 / (model.rope_theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width))
    if not model.rope_scaling:
        return frequency
    wavelength = 2 * math.pi / frequency
    smooth = (SCALING_CONTEXT / wavelength - SCALING_LOW) / (SCALING_HIGH - SCALING_LOW)
    ramp = (1 - smooth) * frequency / SCALING_FACTOR + smooth * frequency
    slow, fast = wavelength > SCALING_CONTEXT / SCALING_LOW, wavelength < SCALING_CONTEXT / SCALING_HIGH
    return torch.where(slow, frequency / SCALING_FACTOR, torch.where(fast, frequency, ramp))


def rope_tables(model: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin for every position, float32 [T, 1, E]. The first half of sin is negated, so that the rotation is
    x * cos + roll(x, E/2) * sin."""
    angles = torch.outer(torch.arange(model.sequence, dtype=torch.float32), rope_frequencies(model))
    sin = angles.sin()
    return torch.cat((angles.cos(),) * 2, -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)


def write(stream: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    """The residual stream [B, T, D] with `update` [B, T, K] added to its first K channels."""
    missing = stream.shape[-1] - update.shape[-1]
    return stream + (F.pad(update, (0, missing)) if missing else update)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE on [B, T, heads, E]."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Embedding(nn.Module):
    """Token ids [B, T] -> [B, T, D]: a learned table, beside a fixed one where the learned one has fewer than D
    channels (codec `subspace`)."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        stream = stream_width(config)
        self.weight = nn.Parameter(torch.empty(config.model.vocabulary, stream))
        self.fixed = FixedEmbedding(config) if stream < config.model.width else None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        learned = F.embedding(ids, self.weight)
        if self.fixed is None:
            return learned
        stream: torch.Tensor = self.fixed(learned, ids)
        return stream


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions: [B, T, D] -> [B, T, `stream`]."""

    def __init__(self, model: ModelConfig, stream: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head = model.heads, model.kv_heads, model.width // model.heads
        self.q = Projection(model.width, model.width)
        self.k = Projection(model.width, self.kv_heads * self.head)
        self.v = Projection(model.width, self.kv_heads * self.head)
        self.o = Projection(model.width, stream)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, past: Past | None = None, block: int = 0
    ) -> torch.Tensor:
        batch, length, _ = x.shape
        q = rotate(self.q(x).view(batch, length, self.heads, self.head), cos, sin)
        k = rotate(self.k(x).view(batch, length, self.kv_heads, self.head), cos, sin)
        v = self.v(x).view(batch, length, self.kv_heads, self.head)
        keys, values, mask = k.transpose(1, 2), v.transpose(1, 2), None
        if past is not None:
            keys, values = past.extend(block, keys, values)
            mask = past.mask
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None and (past is None or length > 1),
            enable_gqa=self.heads != self.kv_heads,
        )
        mixed: torch.Tensor = self.o(out.transpose(1, 2).reshape(batch, length, -1))
        return mixed


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)): [B, T, D] -> [B, T, F] -> [B, T, `stream`]."""

    def __init__(self, model: ModelConfig, stream: int) -> None:
        super().__init__()
        self.gate = Projection(model.width, ffn_width(model))
        self.up = Projection(model.width, ffn_width(model))
        self.down = Projection(ffn_width(model), stream)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """One transformer layer. `skip` [B, T, K] is added to the first K channels of the attention output: the residual
    path that a bottleneck carries across a boundary. Attention and feed-forward write into the first `stream` channels
    (all of them, but with codec `subspace`)."""

    def __init__(self, model: ModelConfig, stream: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(model.width, model.norm_eps)
        self.attention = Attention(model, stream)
        self.ffn_norm = RMSNorm(model.width, model.norm_eps)
        self.ffn = SwiGLU(model, stream)

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        skip: torch.Tensor | None = None,
        past: Past | None = None,
        block: int = 0,
    ) -> torch.Tensor:
        x = write(x, self.attention(self.attention_norm(x), cos, sin, past, block))
        if skip is not None:
            x = write(x, skip)
        return write(x, self.ffn(self.ffn_norm(x)))


class LlamaStage(nn.Module):
    """Blocks [cut[0], cut[1]) of the model, with the embedding at stage 0, the final norm and head at the last stage,
    and its halves of the codecs. Parameter names are global (`iota.model.layout.tensor_shapes`).

    Raises ConfigError when the model cannot be built.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, config: RunConfig, stage: int, cut: tuple[int, int]) -> None:
        super().__init__()
        check_model(config)
        model, count = config.model, config.stages.count
        assert 0 <= stage < count and 0 <= cut[0] < cut[1] <= model.blocks, (stage, cut)
        self.first, self.last, self.tied = stage == 0, stage == count - 1, model.tie_embeddings
        self.reads_ids = reads_ids(config, stage)
        self.before, self.after = str(stage - 1), str(stage)
        if self.first:
            self.embedding = Embedding(config)
        self.boundaries = nn.ModuleDict()
        if not self.first:
            self.boundaries[self.before] = build_codec(config, stage - 1, DECODER)
        if not self.last:
            self.boundaries[self.after] = build_codec(config, stage, ENCODER)
        self.blocks = nn.ModuleDict({str(number): Block(model, stream_width(config)) for number in range(*cut)})
        if self.last:
            self.norm = RMSNorm(model.width, model.norm_eps)
            if not self.tied:
                self.head = Projection(model.width, model.vocabulary)
        cos, sin = rope_tables(model)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: torch.Tensor, ids: torch.Tensor | None = None, past: Past | None = None) -> torch.Tensor:
        """First stage: `x` is ids [B, T] int64; others: the boundary's values [B, T, K] float, and `ids` [B, T] when
        the stage reads them (`reads_ids`). Returns [B, T, K], or logits [B, T, V] at the last stage. With `past` the T
        positions are those that follow what it holds; codecs work position by position, so they need nothing of it."""
        skip: torch.Tensor | None = None
        if self.first:
            ids = x
            hidden = self.embedding(x)
        else:
            assert ids is not None or not self.reads_ids, "this stage's codec reads token ids"
            before: Any = self.boundaries[self.before]
            hidden, skip = before.decode(x, ids)
        places = slice(x.shape[1]) if past is None else past.positions
        cos, sin = self.cos[places], self.sin[places]
        for number, block in self.blocks.items():
            hidden = block(hidden, cos, sin, skip, past, int(number))
            skip = None
        if self.last:
            return F.linear(self.norm(hidden), self.embedding.weight if self.tied else self.head.weight)
        after: Any = self.boundaries[self.after]
        encoded: torch.Tensor = after.encode(hidden, ids)
        return encoded
