"""Codecs: exact bytes, exact values, honest gradients, refusals."""

import math

import msgspec
import numpy as np
import pytest
import torch

from iota.config.schema import ModelConfig, RunConfig, StagesConfig
from iota.core.values import Tensor, check_head, is_finite
from iota.errors import ConfigError, IotaError
from iota.model.codecs import DECODER, ENCODER, build_codec, pack, unpack

CPU = torch.device("cpu")


def run_config(codec="bottleneck", channels=4, wire="bfloat16", width=16):
    model = ModelConfig(width=width, heads=2, kv_heads=1, blocks=2, vocabulary=32, sequence=8)
    return RunConfig(
        name="t", model=model, stages=StagesConfig(count=2, codec=codec, channels=channels, wire_dtype=wire)
    )


def filled(codec, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in codec.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / math.sqrt(parameter.shape[1])
    return codec


def test_bottleneck_bytes_are_the_papers():
    """2048-wide float32 to 32 channels of bfloat16: 128x (paper section 4)."""
    config = run_config(channels=32, width=2048)
    encoder = filled(build_codec(config, ENCODER))
    packed = pack(encoder.encode(torch.randn(2, 8, 2048)), encoder.wire_dtype)
    assert len(packed.data) == encoder.payload_bytes(2, 8) == 2 * 8 * 32 * 2
    assert 2 * 8 * 2048 * 4 / len(packed.data) == 128
    gradient = pack(torch.randn(2, 8, 32), encoder.wire_dtype)
    assert len(gradient.data) == build_codec(config, DECODER).payload_bytes(2, 8)


@pytest.mark.parametrize(("wire", "factor"), [("float32", 1), ("bfloat16", 2)])
def test_identity_bytes(wire, factor):
    codec = build_codec(run_config("identity", wire=wire), ENCODER)
    hidden = torch.randn(3, 8, 16)
    assert codec.encode(hidden) is hidden and not list(codec.parameters())
    assert len(pack(hidden, wire).data) * factor == hidden.numel() * 4 == codec.payload_bytes(3, 8) * factor


def test_both_halves_are_parameters_from_the_start():
    encoder, decoder = build_codec(run_config(), ENCODER), build_codec(run_config(), DECODER)
    assert {name: tuple(p.shape) for name, p in encoder.named_parameters()} == {"down.weight": (4, 16)}
    assert {name: tuple(p.shape) for name, p in decoder.named_parameters()} == {"up.weight": (16, 4)}


def test_the_residual_path_runs_through():
    """With both projections zero the first k channels still arrive, and their gradient comes back unchanged."""
    encoder, decoder = build_codec(run_config(), ENCODER), build_codec(run_config(), DECODER)
    encoder.down.weight.data = torch.zeros(4, 16)
    decoder.up.weight.data = torch.zeros(16, 4)
    hidden = torch.randn(1, 8, 16, requires_grad=True)
    block_input, skip = decoder.decode(encoder.encode(hidden))
    assert torch.equal(skip, hidden[..., :4]) and not block_input.any()
    skip.sum().backward()
    assert (hidden.grad[..., :4] == 1).all() and not hidden.grad[..., 4:].any()


class EncodeOnly(torch.nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, hidden):
        return self.part.encode(hidden)


class DecodeOnly(EncodeOnly):
    def forward(self, received):
        return self.part.decode(received)


def test_gradients_are_numerically_right():
    encoder, decoder = filled(build_codec(run_config(), ENCODER)), filled(build_codec(run_config(), DECODER), 1)
    encoder.double(), decoder.double()

    def through(hidden, down, up):
        z = torch.func.functional_call(EncodeOnly(encoder), {"part.down.weight": down}, hidden)
        return torch.func.functional_call(DecodeOnly(decoder), {"part.up.weight": up}, z)

    hidden = torch.randn(2, 3, 16, dtype=torch.float64, requires_grad=True)
    weights = [p.detach().clone().requires_grad_(True) for p in (encoder.down.weight, decoder.up.weight)]
    assert torch.autograd.gradcheck(through, (hidden, *weights))
    sum(part.sum() for part in through(hidden, *weights)).backward()
    single = hidden.detach().float().requires_grad_(True)
    encoder.float(), decoder.float()
    sum(part.sum() for part in decoder.decode(encoder.encode(single))).backward()
    assert torch.allclose(single.grad.double(), hidden.grad, atol=1e-5)


BF16_MAX = float(torch.finfo(torch.bfloat16).max)
EDGES = [
    torch.zeros(2, 3, 4),
    torch.tensor([[[1.5]]]),
    torch.full((1, 2, 2), BF16_MAX),
    torch.tensor([[[-0.0, 1e-40]]]),
]


@pytest.mark.parametrize("values", EDGES, ids=["zeros", "one", "largest", "tiny"])
@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_wire_round_trip(values, wire):
    packed = pack(values, wire)
    assert check_head(packed.head()) is None and is_finite(packed)
    back = unpack(packed, wire, tuple(values.shape), CPU, "x")
    kind = {"float32": torch.float32, "bfloat16": torch.bfloat16}[wire]
    assert back.dtype == torch.float32 and torch.equal(back, values.to(kind).float())
    assert bytes(pack(back, wire).data) == bytes(packed.data)


def test_unpack_takes_any_offset_and_makes_its_own_aligned_memory():
    values = torch.randn(2, 3, 4)
    raw = b"\0\0\0" + bytes(pack(values, "float32").data)
    tensor = Tensor("float32", (2, 3, 4), memoryview(raw)[3:])
    back = unpack(tensor, "float32", (2, 3, 4), CPU, "x")
    assert torch.equal(back, values) and back.data_ptr() % 64 == 0
    back.zero_()
    assert raw[3:] == bytes(pack(values, "float32").data)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_not_finite_is_refused_both_ways(bad, wire):
    values = torch.zeros(1, 2, 4)
    values[0, 1, 3] = bad
    with pytest.raises(IotaError) as error:
        pack(values, wire)
    assert error.value.code == "not_finite"
    data = values.numpy().tobytes() if wire == "float32" else values.bfloat16().view(torch.int16).numpy().tobytes()
    with pytest.raises(IotaError) as error:
        unpack(Tensor(wire, (1, 2, 4), data), wire, (1, 2, 4), CPU, "x")
    assert error.value.code == "not_finite"


def test_rounding_to_infinity_is_caught():
    with pytest.raises(IotaError, match="not finite"):
        pack(torch.full((1, 1, 1), float(np.finfo(np.float32).max)), "bfloat16")


@pytest.mark.parametrize(
    "tensor",
    [
        Tensor("float32", (1, 2, 4), b"\0" * 32),
        Tensor("bfloat16", (2, 1, 4), b"\0" * 16),
        Tensor("bfloat16", (1, 2, 4), b"\0" * 14),
    ],
)
def test_other_shapes_are_refused_with_both(tensor):
    with pytest.raises(IotaError) as error:
        unpack(tensor, "bfloat16", (1, 2, 4), CPU, "input")
    assert error.value.code == "bad_input"
    assert "expected bfloat16 (1, 2, 4) in 16 bytes" in error.value.cause
    assert f"got {tensor.dtype} {tensor.shape} in {len(tensor.data)} bytes" in error.value.cause


def test_unknown_codec_is_refused():
    config = run_config()
    config = msgspec.structs.replace(config, stages=msgspec.structs.replace(config.stages, codec="zip"))
    with pytest.raises(ConfigError, match="identity, bottleneck"):
        build_codec(config, ENCODER)
