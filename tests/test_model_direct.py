"""Codec `direct4+ids`: the stream's first channels as they are, and the receiver's own embedding of the ids."""

import torch

from iota.config.schema import ModelConfig, RunConfig, StagesConfig
from iota.core.payload import BACKWARD, DECODER, ENCODER, FORWARD, boundary_tensor
from iota.model.boundary import codec_shapes
from iota.model.codecs import build_codec
from iota.model.layout import draw_tensor
from iota.model.wires import noise_key, pack, round_trip, unpack

IDS = torch.arange(96).reshape(12, 8)


def run_config(channels=28, width=512, vocabulary=96):
    return RunConfig(
        name="t",
        model=ModelConfig(width=width, heads=4, kv_heads=4, blocks=4, vocabulary=vocabulary, sequence=8),
        stages=StagesConfig(count=2, codec="direct4+ids", channels=channels),
    )


def halves(config):
    encoder, decoder = build_codec(config, 0, ENCODER), build_codec(config, 0, DECODER)
    for name, parameter in decoder.named_parameters():
        parameter.data = torch.from_numpy(draw_tensor(config, 0, f"boundaries.0.{name}", tuple(parameter.shape)))
    return encoder, decoder


def test_sixteen_bytes_a_token_each_way():
    """28 channels of four bits and a scale: 128x less than 512 of float32."""
    for direction in (FORWARD, BACKWARD):
        assert boundary_tensor(run_config(), direction).at(1, 1).nbytes == 16 == 512 * 4 // 128
    assert boundary_tensor(run_config(), BACKWARD).stochastic and not boundary_tensor(run_config(), FORWARD).stochastic


def test_the_channels_arrive_as_they_are_and_so_does_their_gradient():
    encoder, decoder = halves(run_config())
    hidden = torch.randn(12, 8, 512, requires_grad=True)
    sent = encoder.encode(hidden, IDS)
    out, skip = decoder.decode(sent, IDS)
    without, _ = decoder.decode(torch.zeros_like(sent), IDS)
    assert skip is None and torch.equal(sent, hidden[..., :28]) and torch.equal(without, decoder.ids(IDS))
    assert torch.allclose((out - without)[..., :28], sent, atol=1e-6) and torch.equal(out[..., 28:], without[..., 28:])
    out.backward(torch.ones_like(out))
    assert bool((hidden.grad[..., :28] == 1).all()) and not hidden.grad[..., 28:].any()


def test_four_bits_bound_the_error_and_stochastic_gradients_are_unbiased():
    config = run_config()
    forward, backward = boundary_tensor(config, FORWARD), boundary_tensor(config, BACKWARD)
    values = torch.randn(2, 8, 28, generator=torch.Generator().manual_seed(0))
    step = values.abs().amax(-1, keepdim=True) / 7 * (1 + 2**-7)
    assert bool(((round_trip(values, forward) - values).abs() <= step / 2 + 1e-6).all())
    many = backward.at(2, 8)
    draws = [
        unpack(pack(values, many, noise_key(0, sample, 0, BACKWARD)), many, values.device, "gradient")
        for sample in range(600)
    ]
    assert bool(((torch.stack(draws).mean(0) - values).abs() <= 5 * 0.5 * step / 600**0.5).all())


def test_the_id_embedding_begins_as_large_as_the_models_own_and_is_counted():
    config = run_config()
    encoder, decoder = halves(config)
    assert not list(encoder.parameters()) and not codec_shapes(config, 0, ENCODER)
    assert 0.8 < decoder.ids(IDS).std().item() / 0.02 < 1.25
    assert sum(p.numel() for p in decoder.parameters()) == 64 * (96 + 512)


def test_its_parameters_are_few_at_the_papers_size():
    """1.5B: blocks of 2048 channels, four to a stage, vocabulary 128,256: at most 4% of a stage, 128x."""
    config = run_config(channels=124, width=2048, vocabulary=128_256)
    assert boundary_tensor(config, FORWARD).at(1, 1).nbytes == 64 == 2048 * 4 // 128
    shapes = codec_shapes(config, 0, DECODER).values()
    assert sum(a * b for a, b in shapes) <= 0.04 * 4 * 60_000_000
