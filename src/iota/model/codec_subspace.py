"""A residual stream of two parts (arXiv 2506.01260): the first K channels, the only ones that anything learned writes
in, and a fixed token embedding in the other D - K, which every stage knows.

By construction: output projections of attention and feed-forward have K rows, the trained embedding K columns
(`boundary.stream_width`). What travels is the residual minus the fixed embedding, in coordinates of the subspace, which
are the first K channels themselves: nothing is lost, forward or backward. The paper's subspace has a random basis and
its fixed embedding is full-rank in all D channels; a Gaussian embedding is as random in every basis, so the coordinate
axes serve, and with K = D the model is the uncompressed one. The fixed embedding is drawn from (run seed, its name); it
is a buffer: no parameter, in no checkpoint, upload or digest. Legend: B batch, T sequence, D width, K channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from iota.config.schema import RunConfig
from iota.model.boundary import DECODER
from iota.model.codec_base import Codec
from iota.model.layout import FIXED_NAME, draw_tensor


class FixedEmbedding(nn.Module):
    """Token ids [B, T] -> the fixed channels [B, T, D - K]. On the meta device it has a shape and no values."""

    table: torch.Tensor

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        shape = (config.model.vocabulary, config.model.width - config.stages.channels)
        table = torch.empty(shape)
        if not table.is_meta:
            table.copy_(torch.from_numpy(draw_tensor(config, config.seed, FIXED_NAME, shape)))
        self.register_buffer("table", table, persistent=False)

    def forward(self, learned: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The whole stream [B, T, D] from its learned channels [B, T, K] and the token ids."""
        return torch.cat((learned, F.embedding(ids, self.table).to(learned.dtype)), -1)


class Subspace(Codec):
    """The learned channels of the stream as they are; no parameters of its own."""

    def __init__(self, config: RunConfig, boundary: int, side: str) -> None:
        super().__init__(config, boundary, side)
        if side == DECODER:
            self.fixed = FixedEmbedding(config)

    def encode(self, hidden: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
        return hidden[..., : self.channels]

    def decode(self, received: torch.Tensor, ids: torch.Tensor | None) -> tuple[torch.Tensor, None]:
        assert ids is not None, "the codec reads token ids"
        hidden: torch.Tensor = self.fixed(received, ids)
        return hidden, None
