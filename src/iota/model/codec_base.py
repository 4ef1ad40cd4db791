"""What every codec's learned part is built from: one half of a boundary's codec, and its maps (design section 4).
Legend: B batch, T sequence, D width, K channels, V vocabulary, R rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import nn

from iota.config.schema import RunConfig
from iota.model.boundary import DECODER, ENCODER, boundary_channels


class Projection(nn.Module):
    """A linear map without bias. The weight is left uninitialised: a stage's values always come from a checkpoint."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class Lookup(nn.Module):
    """A table of rows by token id, [B, T] int64 -> [B, T, R]. Left uninitialised."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)


class IdEmbedding(nn.Module):
    """A receiver's own embedding of the token ids, factorised: V x R numbers looked up, R x D that lift them. What a
    receiver can look up itself the channels need not carry. [B, T] int64 -> [B, T, D]."""

    def __init__(self, vocabulary: int, rank: int, width: int) -> None:
        super().__init__()
        self.tokens, self.lift = Lookup(vocabulary, rank), Projection(rank, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.lift(self.tokens(ids))
        return out


class Codec(nn.Module, ABC):
    """One half of a boundary's codec. Built as one side; its parameters belong to the stage that holds it and are named
    and shaped as `boundary.codec_shapes` says. `channels` values a token travel, [B, T, K], in both directions."""

    def __init__(self, config: RunConfig, boundary: int, side: str) -> None:
        super().__init__()
        assert side in (ENCODER, DECODER), side
        self.boundary, self.side = boundary, side
        self.channels = boundary_channels(config)

    @abstractmethod
    def encode(self, hidden: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
        """[B, T, D] -> [B, T, K], differentiable. Encoder half only. `ids` [B, T] int64 when the codec reads them."""

    @abstractmethod
    def decode(self, received: torch.Tensor, ids: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[B, T, K] -> the block's input [B, T, D], and channels to add to the first ones of its attention output (or
        None), differentiable. Decoder half only."""
