"""Names, flat order, initial values, cuts and counts of stages."""

import itertools
import subprocess
import sys

import msgspec
import numpy as np
import pytest
import torch

from iota.config.schema import ModelConfig, RunConfig, StagesConfig
from iota.errors import ConfigError
from iota.model.layout import Layout, check_model, init_std, initial_state, transformers_name
from iota.model.llama import LlamaStage
from iota.model.partition import count_parameters, cut_blocks, stage_cost

CASES = [
    dict(count=1),
    dict(count=1, tie=True),
    dict(count=3),
    dict(count=3, codec="bottleneck"),
    dict(count=6, codec="bottleneck", kv_heads=1),
    dict(count=3, codec="topk"),
    dict(count=3, codec="resbm"),
    dict(count=3, codec="resbm4+ids"),
    dict(count=3, codec="subspace"),
    dict(count=1, codec="subspace"),
]


def run_config(count=3, codec="identity", tie=False, kv_heads=2, blocks=6, width=32, vocabulary=80, sequence=16):
    return RunConfig(
        name="t",
        model=ModelConfig(
            width=width,
            blocks=blocks,
            heads=4,
            kv_heads=kv_heads,
            vocabulary=vocabulary,
            sequence=sequence,
            tie_embeddings=tie,
        ),
        stages=StagesConfig(count=count, codec=codec, channels=8),
    )


@pytest.mark.parametrize("case", CASES)
def test_layout_and_count_agree_with_the_module(case):
    config = run_config(**case)
    for stage, cut in enumerate(cut_blocks(config)):
        module = LlamaStage(config, stage, cut)
        layout = Layout.of(module)
        assert layout == Layout.for_stage(config, stage, cut)
        assert layout.size == count_parameters(config, stage, cut) == sum(p.numel() for p in module.parameters())
        sides = [len(shape) >= 2 for shape in layout.shapes]
        assert sides == sorted(sides, reverse=True)
        assert layout.decayed == sum(p.numel() for p in module.parameters() if p.ndim >= 2)


def test_views_share_memory_with_the_flat_buffer():
    config = run_config()
    layout = Layout.for_stage(config, 1, (2, 4))
    for flat in (np.zeros(layout.size, np.float32), torch.zeros(layout.size)):
        for number, view in enumerate(layout.views(flat).values()):
            view[...] = number
        firsts = [float(flat[start]) for start in layout.offsets]
        assert firsts == [float(number) for number in range(len(layout.names))]


def test_initial_state_is_independent_of_the_cut():
    def tensors(count, cuts):
        config = run_config(count=count)
        found = {}
        for stage, cut in enumerate(cuts):
            views = Layout.for_stage(config, stage, cut).views(initial_state(config, stage, cut, seed=4))
            assert not found.keys() & views.keys()
            found |= views
        return found

    whole, other = tensors(1, [(0, 6)]), tensors(3, [(0, 1), (1, 5), (5, 6)])
    assert whole.keys() == other.keys()
    assert all(np.array_equal(whole[name], other[name]) for name in whole)


def test_initial_state_has_the_standard_scales():
    config = run_config(count=1, width=64)
    state = initial_state(config, 0, (0, 6), seed=0)
    assert not np.array_equal(state, initial_state(config, 0, (0, 6), seed=1))
    assert state.dtype == np.float32 and np.isfinite(state).all()
    for name, values in Layout.for_stage(config, 0, (0, 6)).views(state).items():
        if values.ndim == 1:
            assert (values == 1).all(), name
        else:
            assert abs(values.std() / init_std(config, name) - 1) < 0.1, name
    assert init_std(config, "blocks.0.attention.o.weight") == pytest.approx(0.02 / 12**0.5)
    assert init_std(config, "blocks.0.attention.q.weight") == init_std(config, "embedding.weight") == 0.02


def test_drawing_needs_no_torch():
    code = "import sys, iota.model.layout, iota.model.partition, iota.model.data; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_transformers_names_are_distinct():
    config = run_config(codec="bottleneck")
    for stage, cut in enumerate(cut_blocks(config)):
        layout = Layout.for_stage(config, stage, cut)
        names = [transformers_name(name) for name in layout.names if not name.startswith("boundaries.")]
        assert len(set(names)) == len(names) and None not in names
        assert all(transformers_name(name) is None for name in layout.names if name.startswith("boundaries."))


@pytest.mark.parametrize("vocabulary", [64, 4096])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_cut_is_the_best_of_all(count, vocabulary):
    config = run_config(count=count, blocks=8, vocabulary=vocabulary, codec="bottleneck")
    cuts = cut_blocks(config)
    assert cuts[0][0] == 0 and cuts[-1][1] == 8
    assert all(a[1] == b[0] for a, b in itertools.pairwise(cuts))
    assert all(first < last for first, last in cuts)

    def largest(rows):
        return max(stage_cost(config, stage, cut) for stage, cut in enumerate(rows))

    options = []
    for inner in itertools.combinations(range(1, 8), count - 1):
        edges = (0, *inner, 8)
        options.append(largest(list(itertools.pairwise(edges))))
    assert largest(cuts) == min(options)


def test_a_big_head_takes_blocks_off_the_last_stage():
    small, big = run_config(blocks=9, vocabulary=16), run_config(blocks=9, vocabulary=2048)
    assert cut_blocks(small) == ((0, 3), (3, 6), (6, 9))
    first, last = cut_blocks(big)[-1]
    assert last - first < 3


@pytest.mark.parametrize(
    ("section", "change", "remedy"),
    [
        ("model", {"heads": 5}, "model.width"),
        ("model", {"kv_heads": 3}, "model.kv_heads"),
        ("model", {"tie_embeddings": True}, "stages.count = 1"),
        ("stages", {"count": 7}, "stages.count"),
        ("stages", {"codec": "zip"}, "identity.*bottleneck.*subspace"),
        ("stages", {"wire_dtype": "float16"}, "bfloat16"),
        ("stages", {"codec": "bottleneck", "channels": 64}, "stages.channels"),
    ],
)
def test_impossible_models_are_refused(section, change, remedy):
    config = run_config()
    config = msgspec.structs.replace(config, **{section: msgspec.structs.replace(getattr(config, section), **change)})
    with pytest.raises(ConfigError, match=remedy):
        check_model(config)
