"""Our Llama against `transformers`' own, whole and in stages, and its loss before training (golden test 3)."""

import math

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from iota.config.schema import ModelConfig, RunConfig, StagesConfig
from iota.model.layout import Layout, ffn_width, initial_state, transformers_name
from iota.model.llama import LlamaStage, rope_frequencies
from iota.model.partition import cut_blocks
from iota.model.trainer import StageTrainer

torch.set_num_threads(1)


def run_config(stages=1, codec="identity", wire="float32", **model):
    sizes = dict(width=64, blocks=4, heads=4, kv_heads=2, vocabulary=96, sequence=24) | model
    return RunConfig(
        name="t",
        model=ModelConfig(**sizes),
        stages=StagesConfig(count=stages, codec=codec, channels=8, wire_dtype=wire),
    )


def filled_stage(config, stage, cut, state):
    module = LlamaStage(config, stage, cut)
    for name, values in Layout.of(module).views(state).items():
        module.get_parameter(name).data = torch.tensor(values)
    return module


def loud_state(config, stage, cut):
    """Initial values, louder, with norms that are not one: logits of order one, so 1e-5 means something."""
    layout, state = Layout.for_stage(config, stage, cut), initial_state(config, stage, cut, seed=3)
    for name, values in layout.views(state).items():
        if "norm" in name:
            values += np.linspace(-0.3, 0.3, values.size, dtype=np.float32)
        else:
            values *= 4
    return state


def reference(config):
    """transformers' model with the same weights."""
    model = config.model
    rope = {"rope_theta": model.rope_theta, "rope_type": "default"}
    if model.rope_scaling:
        rope |= {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope |= {"original_max_position_embeddings": 8192}
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=model.vocabulary,
            hidden_size=model.width,
            intermediate_size=ffn_width(model),
            num_hidden_layers=model.blocks,
            num_attention_heads=model.heads,
            num_key_value_heads=model.kv_heads,
            max_position_embeddings=131072 if model.rope_scaling else model.sequence,
            rms_norm_eps=model.norm_eps,
            rope_theta=model.rope_theta,
            rope_parameters=rope,
            tie_word_embeddings=model.tie_embeddings,
        )
    )
    weights = {}
    for stage, cut in enumerate(cut_blocks(config)):
        views = Layout.for_stage(config, stage, cut).views(loud_state(config, stage, cut))
        weights |= {transformers_name(name): torch.tensor(values) for name, values in views.items()}
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert not unexpected and (not missing or (model.tie_embeddings and missing == ["lm_head.weight"]))
    theirs.tie_weights()
    return theirs


@pytest.mark.parametrize(
    "options",
    [
        {"kv_heads": 2},
        {"kv_heads": 4, "rope_theta": 10_000.0},
        {"kv_heads": 1, "rope_scaling": True, "sequence": 48, "width": 128, "heads": 2},
        {"stages": 3},
        {"stages": 3, "rope_scaling": True, "ffn": 96},
        {"tie_embeddings": True},
    ],
)
def test_logits_equal_transformers(options):
    config = run_config(**options)
    ids = torch.tensor(np.random.default_rng(5).integers(0, 96, (3, config.model.sequence)))
    with torch.no_grad():
        values = ids
        for stage, cut in enumerate(cut_blocks(config)):
            values = filled_stage(config, stage, cut, loud_state(config, stage, cut))(values)
        theirs = reference(config)(ids).logits
    assert theirs.std() > 0.3
    assert (values - theirs).abs().max() < 1e-5


def test_rope_scaling_changes_slow_channels_only():
    plain = rope_frequencies(ModelConfig(width=128, heads=1))
    scaled = rope_frequencies(ModelConfig(width=128, heads=1, rope_scaling=True))
    assert torch.equal(plain[:20], scaled[:20]) and torch.allclose(plain[-1] / 8, scaled[-1])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stages": 3, "blocks": 6, "codec": "bottleneck", "wire": "bfloat16"},
        {"width": 1024, "heads": 8, "kv_heads": 8, "blocks": 1, "ffn": 64},
        {"tie_embeddings": True, "width": 512, "heads": 8, "blocks": 1, "ffn": 64},
    ],
)
def test_untrained_loss_is_that_of_guessing(options):
    config = run_config(vocabulary=256, **options)
    tokens = np.random.default_rng(1).integers(0, 256, (4, config.model.sequence + 1))
    tokens[:, ::3] = 7  # text repeats itself
    ids, labels = tokens[:, :-1], tokens[:, 1:]
    values = None
    for stage, cut in enumerate(cut_blocks(config)):
        trainer = StageTrainer(config, stage, cut, "cpu", "float32")
        trainer.load(initial_state(config, stage, cut, seed=0), None, None, 0, 0, 1)
        if trainer.last:
            loss = trainer.evaluate_loss(values, ids if trainer.first else None, labels)
        else:
            values = trainer.evaluate(values, ids if trainer.first else None)
    assert abs(loss - math.log(256)) < 0.03 * math.log(256)


def test_builds_on_the_meta_device():
    config = run_config(stages=1, width=4096, heads=32, kv_heads=8, blocks=32, vocabulary=128_256, ffn=14_336)
    with torch.device("meta"):
        module = LlamaStage(config, 0, (0, 32))
    assert sum(tensor.numel() for tensor in module.parameters()) == 8_030_261_248
