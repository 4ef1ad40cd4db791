"""What a codec costs beside the stage it serves: time and parameters, for the paper's 1.5B preset.

Time: CPU seconds of one thread on this machine (which other work disturbs little) of one block and of both halves of
the codec at the preset's width, forward and backward in float32, with packing and unpacking both ways; the
middle stage has as many blocks as the preset's cut gives it. A middle stage holds a decoder and an encoder, so it bears
the whole of one codec: the largest share of any stage. Parameters: counted, of the same stage.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import msgspec
import torch
from torch import nn

from iota.config.schema import RunConfig
from iota.lab.fig5_report import Row
from iota.lab.fig5_speed import preset_config
from iota.model.boundary import BACKWARD, CODECS, DECODER, ENCODER, FORWARD, boundary_tensor, codec_shapes
from iota.model.llama import LlamaStage
from iota.model.partition import count_parameters, cut_blocks
from iota.model.wires import noise_key, pack, unpack

TOKENS = 256
VOCABULARY = 8192
"""Of the modules that are timed: a table's length does not change the time of looking up."""
STAGE = 1
RATIOS = {"identity": 2.0, "int8": 3.9}
RATIO = 128.0
TURNS = 3


def overhead_rows(tell: Callable[[str], None]) -> list[Row]:
    """One row for every codec, at its usual ratio: shares of the stage's time and parameters."""
    rows = []
    for codec in CODECS:
        tell(f"measuring {codec}")
        rows.append(overhead(preset_config(codec, RATIOS.get(codec, RATIO))))
    return rows


def overhead(config: RunConfig) -> Row:
    """One codec. Seconds are CPU time of one pass (forward and backward) of `TOKENS` tokens, the best of some."""
    cut = cut_blocks(config)[STAGE]
    blocks = cut[1] - cut[0]
    block, codec = _times(config)
    own = sum(math.prod(shape) for side in (ENCODER, DECODER) for shape in codec_shapes(config, STAGE, side).values())
    stage = count_parameters(config, STAGE, cut)
    return {
        "codec": config.stages.codec,
        "channels": config.stages.channels,
        "width": config.model.width,
        "blocks": blocks,
        "seconds_block": round(block, 5),
        "seconds_codec": round(codec, 5),
        "time_share_percent": round(100 * codec / (codec + blocks * block), 3),
        "parameters_codec": own,
        "parameters_stage": stage,
        "parameter_share_percent": round(100 * own / stage, 3),
    }


def _times(config: RunConfig) -> tuple[float, float]:
    model = msgspec.structs.replace(config.model, vocabulary=VOCABULARY, sequence=TOKENS)
    train = msgspec.structs.replace(config.train, batch=1)
    config = msgspec.structs.replace(config, model=model, train=train)
    stage = LlamaStage(config, STAGE, (STAGE, STAGE + 1))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.normal_(0.0, 0.02, generator=generator)
    hidden = torch.randn((1, TOKENS, model.width), generator=generator)
    ids = torch.randint(0, VOCABULARY, (1, TOKENS), generator=generator)
    block, codec = _block(stage, hidden), _codec(config, stage, hidden, ids)
    block(), codec()
    return min(_seconds(block) for _ in range(TURNS)), min(_seconds(codec) for _ in range(TURNS))


def _seconds(work: Callable[[], None]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def _block(stage: LlamaStage, hidden: torch.Tensor) -> Callable[[], None]:
    block: nn.Module = next(iter(stage.blocks.values()))

    def work() -> None:
        x = hidden.clone().requires_grad_(True)
        out = block(x, stage.cos[:TOKENS], stage.sin[:TOKENS])
        torch.autograd.backward((out,), (hidden,))

    return work


def _codec(config: RunConfig, stage: LlamaStage, hidden: torch.Tensor, ids: torch.Tensor) -> Callable[[], None]:
    """One crossing: encode, pack, unpack, decode, and the gradient back the same way."""
    decoder, encoder = stage.boundaries[str(STAGE - 1)], stage.boundaries[str(STAGE)]
    there, back = boundary_tensor(config, FORWARD), boundary_tensor(config, BACKWARD)
    key, cpu = noise_key(0, 0, STAGE, BACKWARD), torch.device("cpu")

    def work() -> None:
        x = hidden.clone().requires_grad_(True)
        encoded = encoder.encode(x, ids)  # type: ignore[operator]
        received = unpack(pack(encoded, there), there, cpu, "forward").requires_grad_(True)
        decoded, skip = decoder.decode(received, ids)  # type: ignore[operator]
        gradients = (hidden, torch.ones_like(skip)) if skip is not None else (hidden,)
        torch.autograd.backward((decoded, skip) if skip is not None else (decoded,), gradients)
        assert received.grad is not None
        gradient = unpack(pack(received.grad, back, key), back, cpu, "backward")
        torch.autograd.backward((encoded,), (gradient,))

    return work
