"""The residual bottleneck: where it begins, what its id embedding adds, what each part sees."""

import pytest
import torch

from iota.config.schema import ModelConfig, RunConfig, StagesConfig
from iota.core.payload import BACKWARD, DECODER, ENCODER, FORWARD, boundary_tensor
from iota.model.boundary import codec_shapes
from iota.model.codecs import build_codec
from iota.model.layout import draw_tensor, init_std

RESBM = ["resbm", "resbm+ids", "resbm4", "resbm4+ids"]


def run_config(codec="resbm", channels=8, width=64):
    return RunConfig(
        name="t",
        model=ModelConfig(width=width, heads=2, kv_heads=1, blocks=8, vocabulary=96, sequence=8),
        stages=StagesConfig(count=2, codec=codec, channels=channels),
    )


def halves(config, seed=0):
    parts = []
    for side in (ENCODER, DECODER):
        part = build_codec(config, 0, side)
        for name, parameter in part.named_parameters():
            parameter.data = torch.from_numpy(draw_tensor(config, seed, f"boundaries.0.{name}", tuple(parameter.shape)))
        parts.append(part)
    return parts


def without_mlps(parts):
    parts[0].encoder_out.weight.data.zero_()
    parts[1].decoder_out.weight.data.zero_()
    return parts


@pytest.mark.parametrize("channels", [1, 8, 64])
def test_the_identity_path_is_the_identity_on_the_first_channels(channels):
    """Forward and backward, whatever was learned elsewhere; with all channels it is the identity."""
    encoder, decoder = without_mlps(halves(run_config(channels=channels)))
    hidden = torch.randn(2, 8, 64, requires_grad=True)
    out, skip = decoder.decode(encoder.encode(hidden, None), None)
    assert skip is None and torch.equal(out[..., :channels], hidden[..., :channels]) and not out[..., channels:].any()
    out.backward(torch.ones_like(out))
    assert bool((hidden.grad[..., :channels] == 1).all()) and not hidden.grad[..., channels:].any()


def test_the_mlps_begin_small_and_count():
    parts = halves(run_config())
    hidden = torch.randn(4, 8, 64) * 0.02
    plain = without_mlps(halves(run_config()))
    whole, bare = parts[0].encode(hidden, None), plain[0].encode(hidden, None)
    assert 0 < float((whole - bare).detach().norm()) < 0.7 * float(bare.detach().norm())
    out, _ = parts[1].decode(bare, None)
    projected, _ = plain[1].decode(bare, None)
    assert 0 < float((out - projected).detach().norm()) < 0.7 * float(projected.detach().norm())


@pytest.mark.parametrize("codec", ["resbm+ids", "resbm4+ids"])
def test_the_receivers_id_embedding(codec):
    """It is added by token id, begins as large as the model's own embedding, is factorised, and its numbers count."""
    config = run_config(codec)
    _, decoder = halves(config)
    ids = torch.arange(96).reshape(12, 8)
    received = torch.randn(12, 8, 8)
    out, _ = decoder.decode(received, ids)
    none, _ = decoder.decode(received, torch.zeros_like(ids))
    added = decoder.ids(ids)
    assert torch.allclose(out - none, added - decoder.ids(torch.zeros_like(ids)), atol=1e-5)
    assert 0.8 < float(added.std()) / init_std(config, "embedding.weight") < 1.25
    assert torch.linalg.matrix_rank(added.reshape(96, 64)) == 16
    shapes = codec_shapes(config, 0, DECODER)
    assert shapes["boundaries.0.ids.tokens.weight"] == (96, 16) and shapes["boundaries.0.ids.lift.weight"] == (64, 16)
    plain = codec_shapes(run_config("resbm"), 0, DECODER)
    assert shapes.keys() - plain.keys() == {"boundaries.0.ids.tokens.weight", "boundaries.0.ids.lift.weight"}


def test_four_times_the_channels_for_the_same_bytes():
    """16 bytes a token at width 512 (128x): 8 channels of bfloat16, or 28 of four bits and a scale."""
    wide = run_config("resbm", 8, 512), run_config("resbm4", 28, 512), run_config("resbm4+ids", 28, 512)
    for config in wide:
        for direction in (FORWARD, BACKWARD):
            assert boundary_tensor(config, direction).at(1, 1).nbytes == 16 == 512 * 4 // 128


@pytest.mark.parametrize("codec", RESBM)
def test_rounding_is_stochastic_backward_only(codec):
    config = run_config(codec)
    assert not boundary_tensor(config, FORWARD).stochastic
    assert boundary_tensor(config, BACKWARD).stochastic == ("4" in codec)


def test_under_autocast_the_stream_keeps_its_precision():
    encoder, decoder = halves(run_config("resbm+ids"))
    ids = torch.zeros(1, 8, dtype=torch.int64)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = decoder.decode(encoder.encode(torch.randn(1, 8, 64), ids).float(), ids)
    assert out.dtype == torch.float32
