"""Nothing learned on the channel itself: the first K channels of the residual stream travel as they are, at four bits,
and the receiver adds its own embedding of the token ids.

* Encoder: z = h[..., :K]. Decoder: z in the first K channels + IdEmbedding(ids).
* What token stands where a receiver looks up itself, so the channels carry what earlier stages made of the context, and
  blocks learn to write there what others need; in the other channels they keep what only their own stage reads.
* One residual path through all boundaries, never multiplied by a learned matrix: with K = D and no rounding it is the
  uncompressed model plus the id embedding.
Legend: B batch, T sequence, D width, K channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from iota.config.schema import RunConfig
from iota.model.boundary import DECODER, codec_spec
from iota.model.codec_base import Codec, IdEmbedding


class Direct(Codec):
    """`direct4+ids`. The encoder has no parameters."""

    def __init__(self, config: RunConfig, boundary: int, side: str) -> None:
        super().__init__(config, boundary, side)
        if side == DECODER:
            self.ids = IdEmbedding(config.model.vocabulary, codec_spec(config).rank, config.model.width)

    def encode(self, hidden: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
        return hidden[..., : self.channels]

    def decode(self, received: torch.Tensor, ids: torch.Tensor | None) -> tuple[torch.Tensor, None]:
        assert ids is not None, "the codec reads token ids"
        known: torch.Tensor = self.ids(ids).to(received.dtype)
        return known + F.pad(received, (0, known.shape[-1] - self.channels)), None
