"""Codecs: what crosses a boundary between two stages, forward and back (design section 4, paper section 4).

A codec has two halves, each built with the stage that holds it: the encoder ends stage b and the decoder begins stage
b + 1 of boundary b. Between them `pack` and `unpack` turn values into wire bytes and back; the gradient takes the same
channels in the same dtype, so the exact bytes are equal both ways. Legend: B batch, T sequence, D width, K channels.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from iota.config.schema import RunConfig
from iota.core.values import DTYPE_BYTES, Tensor, is_finite
from iota.errors import ConfigError, IotaError
from iota.model.layout import boundary_channels

ENCODER = "encoder"
DECODER = "decoder"
_TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_STORED = {"float32": (torch.float32, "<f4"), "bfloat16": (torch.int16, "<i2")}
"""numpy has no bfloat16: its bits travel through int16 views."""


class Projection(nn.Module):
    """A linear map without bias. The weight is left uninitialised: a stage's values always come from a checkpoint."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


def pack(values: torch.Tensor, dtype: str) -> Tensor:
    """Wire bytes of float values in `dtype` (rounded to nearest even), without further copies.

    The bytes are the tensor's own memory and stay as they are while the `Tensor` lives. Raises IotaError("not_finite")
    when a value is NaN or infinite, also when only the rounding made it so.
    """
    wire = values.detach().to(device="cpu", dtype=_TORCH[dtype]).contiguous()
    data = wire.view(_STORED[dtype][0]).numpy().reshape(-1).data.cast("B")
    tensor = Tensor(dtype, tuple(wire.shape), data)
    if not is_finite(tensor):
        raise IotaError(
            "not_finite",
            f"a computed {dtype} tensor of shape {tuple(wire.shape)} has values that are not finite",
            "Lower the learning rate, or look at the stage's last input and gradient norm.",
        )
    return tensor


def unpack(tensor: Tensor, dtype: str, shape: tuple[int, ...], device: torch.device, name: str) -> torch.Tensor:
    """Values of a received tensor as an own, aligned float32 tensor on `device` (alignment: matrix kernels may round
    differently on unaligned memory, which would make digests differ between equal miners).

    Raises IotaError("bad_input") when dtype, shape or length is not the expected one, IotaError("not_finite") when a
    value is NaN or infinite. `name` says in the message which tensor it was.
    """
    length = math.prod(shape) * DTYPE_BYTES[dtype]
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or len(tensor.data) != length:
        raise IotaError(
            "bad_input",
            f"{name}: expected {dtype} {shape} in {length} bytes, "
            f"got {tensor.dtype} {tuple(tensor.shape)} in {len(tensor.data)} bytes",
            "Send what the run manifest's model, batch, sequence and codec say.",
        )
    if not is_finite(tensor):
        raise IotaError("not_finite", f"{name}: {dtype} {shape} has values that are not finite", "Drop this sample.")
    stored, code = _STORED[dtype]
    values = torch.empty(shape, dtype=stored)
    values.numpy()[...] = np.frombuffer(tensor.data, dtype=code).reshape(shape)
    return values.view(_TORCH[dtype]).to(device=device, dtype=torch.float32)


class Codec(nn.Module, ABC):
    """One half of a boundary's codec. Built as one side; its parameters belong to the stage that holds it.

    `channels` and `wire_dtype` describe what travels, [B, T, channels], in both directions.
    """

    def __init__(self, config: RunConfig, side: str) -> None:
        super().__init__()
        assert side in (ENCODER, DECODER), side
        self.channels = boundary_channels(config)
        self.wire_dtype = config.stages.wire_dtype

    @abstractmethod
    def encode(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, T, D] -> [B, T, K], differentiable. Encoder half only."""

    @abstractmethod
    def decode(self, received: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[B, T, K] -> the block's input [B, T, D], and channels to add to the first ones of its attention output (or
        None), differentiable. Decoder half only."""

    def payload_bytes(self, batch: int, sequence: int) -> int:
        """Exact bytes of one boundary tensor, the same in both directions."""
        return batch * sequence * self.channels * DTYPE_BYTES[self.wire_dtype]


class Identity(Codec):
    """The whole tensor in float32 (1x) or bfloat16 (2x); no parameters."""

    def encode(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def decode(self, received: torch.Tensor) -> tuple[torch.Tensor, None]:
        return received, None


class Bottleneck(Codec):
    """The paper's bottleneck: K channels that carry a residual path through, uninterrupted.

    Encoder: z = down(h) + h[..., :K]. Decoder: the block's input is up(z), and z is added to the first K channels of
    its attention output. 2048-wide float32 to 32 channels of bfloat16 is 128x.
    """

    def __init__(self, config: RunConfig, side: str) -> None:
        super().__init__(config, side)
        width = config.model.width
        if side == ENCODER:
            self.down = Projection(width, self.channels)
        else:
            self.up = Projection(self.channels, width)

    def encode(self, hidden: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = self.down(hidden)
        return projected + hidden[..., : self.channels]

    def decode(self, received: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # The residual stream keeps its own precision, whatever the projection computes in.
        return self.up(received).to(received.dtype), received


_CODECS: dict[str, type[Codec]] = {"identity": Identity, "bottleneck": Bottleneck}


def build_codec(config: RunConfig, side: str) -> Codec:
    """The half of the configured codec on one `side` of a boundary (ENCODER or DECODER).

    Raises ConfigError for a codec that does not exist.
    """
    kind = _CODECS.get(config.stages.codec)
    if kind is None:
        raise ConfigError(f"unknown codec {config.stages.codec!r}", f"Use one of: {', '.join(_CODECS)}.")
    return kind(config, side)
