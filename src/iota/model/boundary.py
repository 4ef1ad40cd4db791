"""The learned part of a boundary's codec, in closed form: its tensors, its cost, the channels that stages write in
(design section 4). What travels is `iota.core.payload`, whose names are found here too. No torch.
Legend: D width, K channels, M inner width of an MLP, V vocabulary, R rank of a factorised embedding.
"""

from __future__ import annotations

from iota.config.schema import RunConfig
from iota.core.payload import (
    BACKWARD,
    BITS,
    CODECS,
    DECODER,
    ENCODER,
    FLOATS,
    FORWARD,
    PAIR_BYTES,
    SCALE_BYTES,
    TOPK,
    TOPK_WIDTH,
    CodecSpec,
    Payload,
    boundary_channels,
    boundary_tensor,
    channels_fit,
    codec_spec,
    indices_fit,
    reads_ids,
    reads_tokens,
)

__all__ = [
    "BACKWARD",
    "BITS",
    "CODECS",
    "DECODER",
    "ENCODER",
    "FLOATS",
    "FORWARD",
    "PAIR_BYTES",
    "SCALE_BYTES",
    "TOPK",
    "TOPK_WIDTH",
    "CodecSpec",
    "Payload",
    "boundary_channels",
    "boundary_tensor",
    "channels_fit",
    "codec_cost",
    "codec_shapes",
    "codec_spec",
    "indices_fit",
    "mlp_width",
    "reads_ids",
    "reads_tokens",
    "stream_width",
]

LOOKED_UP = ".ids.tokens.weight"
"""Ending of the tensors that are looked up by token id, not multiplied."""


def mlp_width(config: RunConfig) -> int:
    """Inner width M of a residual bottleneck's two MLPs: four times the channels, at most the model's width."""
    return min(4 * config.stages.channels, config.model.width)


def codec_shapes(config: RunConfig, boundary: int, side: str) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor of one half of the codec at `boundary`, in the module's own order."""
    width, channels, codec = config.model.width, boundary_channels(config), config.stages.codec
    shapes: dict[str, tuple[int, ...]] = {}
    if codec == "bottleneck":
        shapes = {"down.weight": (channels, width)} if side == ENCODER else {"up.weight": (width, channels)}
    elif codec.startswith("resbm"):
        inner = mlp_width(config)
        if side == ENCODER:
            shapes["encoder_in.weight"], shapes["encoder_out.weight"] = (inner, width), (channels, inner)
        else:
            shapes["decoder_in.weight"], shapes["decoder_out.weight"] = (inner, channels), (width, inner)
    rank = codec_spec(config).rank
    if rank and side == DECODER:
        shapes["ids.tokens.weight"], shapes["ids.lift.weight"] = (config.model.vocabulary, rank), (width, rank)
    return {f"boundaries.{boundary}.{name}": shape for name, shape in shapes.items()}


def codec_cost(config: RunConfig, side: str) -> int:
    """Floating-point operations a token of a forward pass of one half: two for each weight of its linear maps, one for
    each number that is looked up."""
    shapes = codec_shapes(config, 0, side).items()
    return sum(shape[1] if name.endswith(LOOKED_UP) else 2 * shape[0] * shape[1] for name, shape in shapes)


def stream_width(config: RunConfig) -> int:
    """Channels in which everything learned writes into the residual stream: the model's width, or with `subspace` the
    dimension of the subspace, whose coordinates are the stream's first channels (arXiv 2506.01260)."""
    return config.stages.channels if config.stages.codec == "subspace" else config.model.width
