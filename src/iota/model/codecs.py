"""Codecs: the learned part of what crosses a boundary between two stages (design section 4, paper section 4).

A codec has two halves, each built with the stage that holds it: the encoder ends stage b and the decoder begins stage
b + 1 of boundary b. Between them `iota.model.wires` turns values into wire bytes and back, the gradient likewise.
Legend: B batch, T sequence, D width, K channels.
"""

from __future__ import annotations

import torch

from iota.config.schema import RunConfig
from iota.model.boundary import ENCODER, codec_spec
from iota.model.codec_base import Codec, Projection
from iota.model.codec_direct import Direct
from iota.model.codec_resbm import ResidualBottleneck
from iota.model.codec_subspace import Subspace


class Identity(Codec):
    """The whole tensor; no parameters. `identity` sends it in float32 (1x) or bfloat16 (2x), `int8` and `topk` in their
    wire formats."""

    def encode(self, hidden: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
        return hidden

    def decode(self, received: torch.Tensor, ids: torch.Tensor | None) -> tuple[torch.Tensor, None]:
        return received, None


class Bottleneck(Codec):
    """The paper's bottleneck: K channels that carry a residual path through, uninterrupted.

    Encoder: z = down(h) + h[..., :K]. Decoder: the block's input is up(z), and z is added to the first K channels of
    its attention output. 2048-wide float32 to 32 channels of bfloat16 is 128x.
    """

    def __init__(self, config: RunConfig, boundary: int, side: str) -> None:
        super().__init__(config, boundary, side)
        width = config.model.width
        if side == ENCODER:
            self.down = Projection(width, self.channels)
        else:
            self.up = Projection(self.channels, width)

    def encode(self, hidden: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
        projected: torch.Tensor = self.down(hidden)
        return projected + hidden[..., : self.channels]

    def decode(self, received: torch.Tensor, ids: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        # The residual stream keeps its own precision, whatever the projection computes in.
        return self.up(received).to(received.dtype), received


_CODECS: dict[str, type[Codec]] = {
    "identity": Identity,
    "int8": Identity,
    "topk": Identity,
    "bottleneck": Bottleneck,
    "resbm": ResidualBottleneck,
    "resbm+ids": ResidualBottleneck,
    "resbm4": ResidualBottleneck,
    "resbm4+ids": ResidualBottleneck,
    "direct4+ids": Direct,
    "subspace": Subspace,
}


def build_codec(config: RunConfig, boundary: int, side: str) -> Codec:
    """The half of the configured codec on one `side` (ENCODER | DECODER) of a boundary.

    Raises ConfigError for a codec that does not exist.
    """
    codec_spec(config)
    return _CODECS[config.stages.codec](config, boundary, side)
