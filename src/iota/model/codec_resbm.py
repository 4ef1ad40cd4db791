"""The residual bottleneck (arXiv 2604.11947): an MLP on either side of the narrow channel, around an explicit low-rank
identity path; and, for `+ids`, the receiver's own embedding of the token ids.

* Encoder: z = h[..., :K] + MLP(norm(h)). Decoder: z in the first K channels + MLP(z) [+ IdEmbedding(ids)].
* The identity path is the identity on the first K channels and is not learned. Learned matrices in its place (K
  orthonormal columns and their transpose at first) were far worse: a step of Adam on them moves the whole stream.
* The MLPs begin small, as every projection that writes into the residual stream does.
Legend: B batch, T sequence, D width, K channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from iota.config.schema import RunConfig
from iota.model.boundary import ENCODER, codec_spec, mlp_width
from iota.model.codec_base import Codec, IdEmbedding, Projection


class ResidualBottleneck(Codec):
    """`resbm`, `resbm+ids`, and with four-bit wire formats `resbm4`, `resbm4+ids`."""

    def __init__(self, config: RunConfig, boundary: int, side: str) -> None:
        super().__init__(config, boundary, side)
        width, inner, self.eps = config.model.width, mlp_width(config), config.model.norm_eps
        if side == ENCODER:
            self.encoder_in, self.encoder_out = Projection(width, inner), Projection(inner, self.channels)
        else:
            self.decoder_in, self.decoder_out = Projection(self.channels, inner), Projection(inner, width)
            rank = codec_spec(config).rank
            self.ids = IdEmbedding(config.model.vocabulary, rank, width) if rank else None

    def encode(self, hidden: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
        normed = F.rms_norm(hidden, hidden.shape[-1:], eps=self.eps)
        z: torch.Tensor = hidden[..., : self.channels] + self.encoder_out(F.silu(self.encoder_in(normed)))
        return z

    def decode(self, received: torch.Tensor, ids: torch.Tensor | None) -> tuple[torch.Tensor, None]:
        inner: torch.Tensor = self.decoder_out(F.silu(self.decoder_in(received)))
        hidden = F.pad(received, (0, inner.shape[-1] - self.channels)) + inner
        if self.ids is not None:
            assert ids is not None, "the codec reads token ids"
            hidden = hidden + self.ids(ids)
        # The residual stream keeps its own precision, whatever the projections compute in.
        return hidden.to(received.dtype), None
