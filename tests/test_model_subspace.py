"""Codec `subspace`: nothing is lost at a boundary, by construction, whatever was learned."""

import msgspec
import pytest
import torch

from iota.config.schema import ModelConfig, RunConfig, StagesConfig
from iota.model.boundary import stream_width
from iota.model.codec_subspace import FixedEmbedding
from iota.model.layout import Layout, draw_tensor, initial_state
from iota.model.llama import LlamaStage
from iota.model.partition import cut_blocks


def run_config(count=3, channels=6, codec="subspace", seed=0):
    return RunConfig(
        name="t",
        seed=seed,
        model=ModelConfig(width=32, heads=4, kv_heads=2, blocks=6, vocabulary=48, sequence=12),
        stages=StagesConfig(count=count, codec=codec, channels=channels, wire_dtype="float32"),
    )


def built(config, loud=1.0):
    """The stages in a row, their weights `loud` times the initial ones: far from where training begins."""
    modules = []
    for stage, cut in enumerate(cut_blocks(config)):
        module = LlamaStage(config, stage, cut)
        layout = Layout.of(module)
        assert layout == Layout.for_stage(config, stage, cut)
        for name, values in layout.views(initial_state(config, stage, cut, config.seed)).items():
            module.get_parameter(name).data = torch.from_numpy(values * loud if values.ndim > 1 else values)
        modules.append(module)
    return modules


def through(modules, ids):
    values, sent = ids, []
    for module in modules:
        values = module(values, ids)
        values.retain_grad()
        sent.append(values)
    return values, sent


IDS = torch.randint(0, 48, (2, 12), generator=torch.Generator().manual_seed(3))


def test_cut_and_whole_model_are_the_same_to_the_bit():
    """Three stages give the logits of one, and the gradients: every tensor of the whole model is one of a stage."""
    config = run_config()
    whole, cut = built(run_config(count=1), 4.0), built(config, 4.0)
    logits, _ = through(whole, IDS)
    others, sent = through(cut, IDS)
    assert torch.equal(logits, others) and [tensor.shape[-1] for tensor in sent] == [6, 6, 48]
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    (logits * weights).sum().backward()
    (others * weights).sum().backward()
    gradients = {name: p.grad for module in cut for name, p in module.named_parameters()}
    assert gradients.keys() == {name for name, _ in whole[0].named_parameters()}
    for name, parameter in whole[0].named_parameters():
        assert torch.allclose(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6), name
        assert float(parameter.grad.abs().max()) > 0, name


def test_what_travels_is_the_whole_residual_minus_the_fixed_embedding():
    config = run_config(count=1)
    module = built(config, 4.0)[0]
    seen = []
    module.blocks["3"].register_forward_hook(lambda _, __, out: seen.append(out))
    with torch.no_grad():
        module(IDS)
    fixed = FixedEmbedding(config)(torch.zeros(2, 12, 6), IDS)
    residual = seen[0] - fixed
    assert not residual[..., 6:].any() and residual[..., :6].abs().min() > 0


def test_with_all_channels_it_is_the_uncompressed_model():
    subspace, plain = built(run_config(channels=32)), built(run_config(codec="identity"))
    assert stream_width(run_config(channels=32)) == 32
    for ours, theirs in zip(subspace, plain, strict=True):
        assert Layout.of(ours) == Layout.of(theirs)
        ours.load_state_dict(theirs.state_dict())
    assert torch.equal(through(subspace, IDS)[0], through(plain, IDS)[0])


def test_everything_learned_writes_in_the_subspace():
    config = run_config()
    assert stream_width(config) == 6
    shapes = {name: tuple(p.shape) for module in built(config) for name, p in module.named_parameters()}
    assert not any(name.startswith("boundaries.") for name in shapes)
    assert shapes["embedding.weight"] == (48, 6) and shapes["head.weight"] == (48, 32)
    assert shapes["blocks.0.attention.o.weight"] == (6, 32) and shapes["blocks.5.ffn.down.weight"][0] == 6
    assert shapes["blocks.0.attention.q.weight"] == (32, 32)


def test_the_fixed_embedding_is_every_stages_and_no_parameter():
    config = run_config()
    tables = [buffer for module in built(config) for name, buffer in module.named_buffers() if name.endswith("table")]
    assert len(tables) == 3 and all(torch.equal(table, tables[0]) for table in tables)
    assert tables[0].shape == (48, 26) and not any("table" in name for m in built(config) for name in m.state_dict())
    other = FixedEmbedding(run_config(seed=1)).table
    assert not torch.equal(other, tables[0])
    assert torch.equal(torch.from_numpy(draw_tensor(config, 0, "fixed_embedding", (48, 26))), tables[0])


@pytest.mark.parametrize("channels", [1, 31])
def test_any_dimension_runs(channels):
    logits, _ = through(built(run_config(channels=channels)), IDS)
    assert bool(torch.isfinite(logits).all())


def test_a_bottleneck_in_bfloat16_rounds_what_travels_and_nothing_else():
    config = run_config()
    config = msgspec.structs.replace(config, stages=msgspec.structs.replace(config.stages, wire_dtype="bfloat16"))
    modules = built(config)
    with torch.no_grad():
        values = modules[0](IDS, IDS)
        fixed = modules[1].boundaries["0"].decode(values.bfloat16().float(), IDS)[0]
        exact = modules[1].boundaries["0"].decode(values, IDS)[0]
    assert torch.equal(fixed[..., 6:], exact[..., 6:]) and not torch.equal(fixed[..., :6], exact[..., :6])
