"""What crosses a boundary between two stages, in closed form: which codecs there are, what each exchanges, and the
exact bytes of every payload (design section 4).

A codec has a learned part (`iota.model.codecs`), which exchanges `boundary_channels` float values a token, and a wire
format for each direction (`iota.model.wires`), in which these values travel. Everything that is sent counts: scales and
indices are part of the payload. Legend: B batch, T sequence, D width, K channels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from iota.config.schema import RunConfig
from iota.core.values import DTYPE_BYTES
from iota.errors import ConfigError

FORWARD, BACKWARD = "forward", "backward"
"""Directions: activations to the next stage, gradients to the one before."""
ENCODER, DECODER = "encoder", "decoder"
"""Sides: the encoder ends stage b, the decoder begins stage b + 1 of boundary b."""

FLOATS = ("float32", "bfloat16")
BITS = {"int8": 8, "int4": 4, "int2": 2}
"""Formats of signed integers with one scale a token, and their bits a value."""
SCALE_BYTES = 2
"""A token's scale is a bfloat16."""
PAIR_BYTES = 4
"""One value kept by `topk`: a bfloat16 and a uint16 index."""
TOPK = "topk"
TOPK_WIDTH = 2**16
"""Widest tensor whose indices fit into uint16."""


@dataclass(frozen=True)
class CodecSpec:
    """`narrow`: `stages.channels` says how many channels (else the model's width). `ids`: both sides also read the
    sample's token ids, which a stage fetches itself. `rank`: of the receiver's factorised id embedding (0: none).
    `forward`, `backward`: the wire format of either direction ("": `stages.wire_dtype`). `stochastic`: integers of the
    gradient are rounded stochastically, without bias."""

    narrow: bool
    ids: bool = False
    rank: int = 0
    forward: str = ""
    backward: str = ""
    stochastic: bool = False


CODECS = {
    "identity": CodecSpec(narrow=False),
    "int8": CodecSpec(narrow=False, forward="int8", backward="int8"),
    "topk": CodecSpec(narrow=False, forward=TOPK, backward=TOPK),
    "bottleneck": CodecSpec(narrow=True),
    "resbm": CodecSpec(narrow=True),
    "resbm+ids": CodecSpec(narrow=True, ids=True, rank=16),
    "resbm4": CodecSpec(narrow=True, forward="int4", backward="int4", stochastic=True),
    "resbm4+ids": CodecSpec(narrow=True, ids=True, rank=16, forward="int4", backward="int4", stochastic=True),
    "direct4+ids": CodecSpec(narrow=True, ids=True, rank=64, forward="int4", backward="int4", stochastic=True),
    "subspace": CodecSpec(narrow=True, ids=True),
}


@dataclass(frozen=True)
class Payload:
    """The boundary tensors of one direction: `channels` values a token in `format`; `kept` of them travel (`topk`);
    `stochastic`: integers are rounded stochastically."""

    format: str
    channels: int
    kept: int
    batch: int
    sequence: int
    stochastic: bool = False

    @property
    def dtype(self) -> str:
        """The dtype on the wire: packed formats are bytes."""
        return self.format if self.format in FLOATS else "uint8"

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape on the wire, [B, T, elements of `dtype` a token]."""
        if self.format in FLOATS:
            width = self.channels
        elif self.format == TOPK:
            width = self.kept * PAIR_BYTES
        else:
            width = SCALE_BYTES + -(-self.channels * BITS[self.format] // 8)
        return self.batch, self.sequence, width

    @property
    def nbytes(self) -> int:
        """Exact bytes of one boundary tensor."""
        batch, sequence, width = self.shape
        return batch * sequence * width * DTYPE_BYTES[self.dtype]

    def at(self, batch: int, sequence: int) -> Payload:
        """The same for another batch and sequence."""
        return replace(self, batch=batch, sequence=sequence)


def codec_spec(config: RunConfig) -> CodecSpec:
    """The configured codec. Raises ConfigError for a name that does not exist."""
    spec = CODECS.get(config.stages.codec)
    if spec is None:
        raise ConfigError(f"unknown codec {config.stages.codec!r}", f"Use one of: {', '.join(CODECS)}.")
    return spec


def boundary_channels(config: RunConfig) -> int:
    """Float values a token that a codec's learned part gives and takes, [B, T, K], in both directions."""
    return config.stages.channels if codec_spec(config).narrow else config.model.width


def boundary_tensor(config: RunConfig, direction: str) -> Payload:
    """What one boundary tensor is on the wire, by direction (FORWARD | BACKWARD)."""
    assert direction in (FORWARD, BACKWARD), direction
    spec = codec_spec(config)
    chosen = spec.forward if direction == FORWARD else spec.backward
    return Payload(
        format=chosen or config.stages.wire_dtype,
        channels=boundary_channels(config),
        kept=config.stages.channels if chosen == TOPK else boundary_channels(config),
        batch=config.train.batch,
        sequence=config.model.sequence,
        stochastic=spec.stochastic and direction == BACKWARD,
    )


def channels_fit(config: RunConfig) -> bool:
    """Whether `stages.channels` is possible: of a narrow codec at most the width, of `topk` kept values of it."""
    spec = codec_spec(config)
    uses = spec.narrow or TOPK in (spec.forward, spec.backward)
    return not uses or 1 <= config.stages.channels <= config.model.width


def indices_fit(config: RunConfig) -> bool:
    """Whether `topk`, if used, can write its indices."""
    spec = codec_spec(config)
    return TOPK not in (spec.forward, spec.backward) or config.model.width <= TOPK_WIDTH


def reads_ids(config: RunConfig, stage: int) -> bool:
    """Whether a stage reads token ids: the first always, the others when the codec wants them."""
    return stage == 0 or codec_spec(config).ids


def reads_tokens(config: RunConfig, stage: int) -> bool:
    """Whether a stage reads the corpus at all: ids, or at the last stage labels."""
    return stage == config.stages.count - 1 or reads_ids(config, stage)
