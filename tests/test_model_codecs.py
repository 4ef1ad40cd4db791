"""Every codec: closed forms against the modules, the meta device, numerically right gradients, refusals; the paper's
bottleneck in full."""

import math

import msgspec
import numpy as np
import pytest
import torch

from iota.config.load import check
from iota.config.schema import ModelConfig, RunConfig, StagesConfig
from iota.core.payload import (
    BACKWARD,
    CODECS,
    DECODER,
    ENCODER,
    FORWARD,
    boundary_channels,
    boundary_tensor,
    codec_spec,
)
from iota.errors import ConfigError
from iota.model.boundary import codec_cost, codec_shapes
from iota.model.codecs import build_codec
from iota.model.layout import check_model, draw_tensor
from iota.model.llama import LlamaStage
from iota.model.partition import block_cost, count_parameters, cut_blocks, stage_cost
from iota.model.wires import pack


def run_config(codec="bottleneck", channels=4, wire="bfloat16", width=16, **model):
    sizes = dict(width=width, heads=2, kv_heads=1, blocks=2, vocabulary=32, sequence=8) | model
    return RunConfig(
        name="t",
        model=ModelConfig(**sizes),
        stages=StagesConfig(count=2, codec=codec, channels=channels, wire_dtype=wire),
    )


def half(config, side, seed=0, loud=1.0):
    """One half with its initial values, in float64; `loud` scales them, so that nothing that is small hides."""
    part = build_codec(config, 0, side)
    for name, parameter in part.named_parameters():
        values = draw_tensor(config, seed, f"boundaries.0.{name}", tuple(parameter.shape))
        parameter.data = torch.from_numpy(values * np.float32(loud)).double()
    return part.double()


# ------------------------------------------------------------------------------------------------------ closed forms


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("channels", [1, 5, 16])
def test_tensors_are_those_of_the_closed_form(codec, channels):
    config = run_config(codec, channels)
    for side in (ENCODER, DECODER):
        part = build_codec(config, 3, side)
        shapes = {f"boundaries.3.{name}": tuple(p.shape) for name, p in part.named_parameters()}
        assert list(shapes.items()) == list(codec_shapes(config, 3, side).items())
        assert part.channels == boundary_channels(config)
    names = [name for side in (ENCODER, DECODER) for name in codec_shapes(config, 0, side)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("codec", CODECS)
def test_cost_counts_every_matrix_product(codec):
    """Two operations for each weight of a linear map, as torch counts them; a looked-up row is no product."""
    from torch.utils.flop_counter import FlopCounterMode

    config = run_config(codec)
    ids = torch.zeros(1, 1, dtype=torch.int64)
    for side in (ENCODER, DECODER):
        part = half(config, side)
        with FlopCounterMode(display=False) as counter:
            if side == ENCODER:
                part.encode(torch.ones(1, 1, 16, dtype=torch.float64), ids)
            else:
                part.decode(torch.ones(1, 1, part.channels, dtype=torch.float64), ids)
        looked_up = sum(shape[1] for name, shape in codec_shapes(config, 0, side).items() if ".tokens." in name)
        assert codec_cost(config, side) == counter.get_total_flops() + looked_up


@pytest.mark.parametrize("codec", CODECS)
def test_a_block_costs_its_matrix_products(codec):
    from torch.utils.flop_counter import FlopCounterMode

    config = run_config(codec, sequence=2)
    module = LlamaStage(config, 1, (1, 2))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    with FlopCounterMode(display=False) as counter:
        module(torch.ones(1, 2, boundary_channels(config)), torch.zeros(1, 2, dtype=torch.int64))
    attention = 2 * 2 * config.model.sequence * config.model.width
    lookups = codec_cost(config, DECODER) - sum(
        2 * math.prod(shape) for name, shape in codec_shapes(config, 0, DECODER).items() if ".tokens." not in name
    )
    seen = counter.get_total_flops() / 2  # a token
    ours = stage_cost(config, 1, (1, 2)) - 2 * config.model.sequence * config.model.width - lookups
    assert ours in (seen, seen - attention)
    assert block_cost(config) > 0


@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_builds_on_the_meta_device(codec):
    config = run_config(codec, channels=32, width=2048, heads=16, kv_heads=16, blocks=16, ffn=5632, vocabulary=128_256)
    config = msgspec.structs.replace(config, stages=msgspec.structs.replace(config.stages, count=4))
    for stage, cut in enumerate(cut_blocks(config)):
        with torch.device("meta"):
            module = LlamaStage(config, stage, cut)
        total = sum(parameter.numel() for parameter in module.parameters())
        assert total == count_parameters(config, stage, cut)
        assert all(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
        if 0 < stage < 3:
            parameters = sum(
                math.prod(shape)
                for number, side in ((stage - 1, DECODER), (stage, ENCODER))
                for shape in codec_shapes(config, number, side).values()
            )
            assert parameters <= 0.04 * total


# --------------------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("codec", CODECS)
def test_gradients_of_both_halves_are_numerically_right(codec):
    """Of the learned parts, by their inputs and by every parameter. Between them lies the wire format, which is
    straight-through: what arrives is taken for what was sent."""
    config = run_config(codec, channels=3, width=6, heads=1)
    encoder, decoder = half(config, ENCODER, loud=3.0), half(config, DECODER, loud=3.0)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 32, (2, 3), generator=generator)
    hidden = torch.randn(2, 3, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    received = torch.randn(2, 3, encoder.channels, dtype=torch.float64, generator=generator, requires_grad=True)

    def encode(hidden, *parameters):
        return encoder.encode(hidden, ids)

    def decode(received, *parameters):
        block_input, skip = decoder.decode(received, ids)
        return block_input if skip is None else (block_input, skip)

    assert torch.autograd.gradcheck(encode, (hidden, *encoder.parameters()))
    assert torch.autograd.gradcheck(decode, (received, *decoder.parameters()))


# ---------------------------------------------------------------------------------------------------------- refusals


def changed(config, section, **change):
    return msgspec.structs.replace(config, **{section: msgspec.structs.replace(getattr(config, section), **change)})


BAD = [
    ("stages", {"codec": "zip"}, "subspace"),
    ("stages", {"codec": "resbm", "channels": 17}, "stages.channels"),
    ("stages", {"codec": "subspace", "channels": 17}, "stages.channels"),
    ("stages", {"codec": "topk", "channels": 17}, "stages.channels"),
    ("stages", {"codec": "resbm4", "channels": 0}, "stages.channels"),
]


@pytest.mark.parametrize(("section", "change", "named"), BAD)
def test_impossible_codecs_are_refused_before_anything_is_built(section, change, named):
    config = changed(run_config(), section, **change)
    with pytest.raises(ConfigError, match=named):
        check_model(config)
    with pytest.raises(ConfigError, match=named):
        check(config)


def test_topk_refuses_a_width_beyond_its_indices():
    config = run_config("topk", width=65_540)
    for refuse in (check_model, check):
        with pytest.raises(ConfigError, match="65536"):
            refuse(config)
    check_model(run_config("topk", width=65_536))
    check_model(run_config("resbm", width=65_540))


def test_subspace_has_no_tied_head():
    config = changed(run_config("subspace"), "stages", count=1)
    config = changed(config, "model", tie_embeddings=True)
    for refuse in (check_model, check):
        with pytest.raises(ConfigError, match="tie_embeddings"):
            refuse(config)
    check_model(changed(config, "stages", codec="resbm"))


def test_the_size_of_boundary_tensors_counts_what_travels():
    """Four-bit channels fit where the same channels in bfloat16 do not."""
    tight = changed(run_config("resbm", channels=16, vocabulary=256), "limits", inline_bytes=500)
    with pytest.raises(ConfigError, match=r"1,024 bytes .* 16 channels of bfloat16"):
        check(tight)
    assert check(changed(tight, "stages", codec="resbm4")).stages.codec == "resbm4"


def test_unknown_codec_is_refused_by_name():
    config = changed(run_config(), "stages", codec="zip")
    for ask in (codec_spec, boundary_channels):
        with pytest.raises(ConfigError, match=r"'zip'.*identity.*subspace"):
            ask(config)
    with pytest.raises(ConfigError, match="'zip'"):
        build_codec(config, 0, ENCODER)


# ------------------------------------------------------------------------------------------- identity and bottleneck


def test_bottleneck_bytes_are_the_papers():
    """2048-wide float32 to 32 channels of bfloat16: 128x, both ways (paper section 4)."""
    config = run_config(channels=32, width=2048)
    encoder = half(config, ENCODER).float()
    for direction in (FORWARD, BACKWARD):
        packed = pack(encoder.encode(torch.randn(2, 8, 2048), None), boundary_tensor(config, direction))
        assert len(packed.data) == 2 * 8 * 32 * 2 and 2 * 8 * 2048 * 4 / len(packed.data) == 128


@pytest.mark.parametrize("codec", ["identity", "int8", "topk"])
def test_these_have_no_learned_part(codec):
    part = build_codec(run_config(codec), 0, ENCODER)
    hidden = torch.randn(3, 8, 16)
    assert part.encode(hidden, None) is hidden and not list(part.parameters())
    assert build_codec(run_config(codec), 0, DECODER).decode(hidden, None) == (hidden, None)


def test_the_bottlenecks_residual_path_runs_through():
    """With both projections zero the first k channels still arrive, and their gradient comes back unchanged."""
    config = run_config()
    encoder, decoder = build_codec(config, 0, ENCODER), build_codec(config, 0, DECODER)
    encoder.down.weight.data = torch.zeros(4, 16)
    decoder.up.weight.data = torch.zeros(16, 4)
    hidden = torch.randn(1, 8, 16, requires_grad=True)
    block_input, skip = decoder.decode(encoder.encode(hidden, None), None)
    assert torch.equal(skip, hidden[..., :4]) and not block_input.any()
    skip.sum().backward()
    assert (hidden.grad[..., :4] == 1).all() and not hidden.grad[..., 4:].any()
