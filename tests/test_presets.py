"""Presets: their sizes against closed formulas and against modules on the meta device, and how run files use them."""

import pytest
import torch

from iota.config.load import check, parse_run, save_run, with_values
from iota.config.presets import presets
from iota.errors import ConfigError
from iota.model.llama import LlamaStage
from iota.model.partition import count_parameters, cut_blocks

SIZES = {
    "1m": 1_099_392,
    "10m": 9_440_640,
    "50m": 50_606_592,
    "150m": 151_020_288,
    "400m": 404_808_704,
    "1.5b": 1_498_482_688,  # the paper's case: untied embeddings, a vocabulary of 128,256
    "8b": 8_030_261_248,  # Llama 3 8B
    "15b": 15_076_418_560,
    "70b": 70_553_706_496,  # Llama 3 70B
    "100b": 100_439_664_640,
}
"""Parameters without codecs."""


def preset(name, *settings):
    return check(with_values(parse_run(f'name = "a"\npreset = "{name}"\n'), settings))


def by_hand(model):
    """Embedding and head; per block: q and o, k and v, three of the feed-forward, two norms; the last norm."""
    kv = model.kv_heads * model.width // model.heads
    block = 2 * model.width**2 + 2 * kv * model.width + 3 * model.width * model.ffn + 2 * model.width
    return 2 * model.vocabulary * model.width + model.blocks * block + model.width


def total(config):
    return sum(count_parameters(config, stage, cut) for stage, cut in enumerate(cut_blocks(config)))


def test_every_preset_is_here():
    assert list(presets()) == list(SIZES)


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_those_of_the_closed_formula(name):
    plain = with_values(preset(name), ["stages.codec=identity"])
    assert total(plain) == by_hand(plain.model) == SIZES[name]
    config = preset(name)
    codecs = 2 * (config.stages.count - 1) * config.stages.channels * config.model.width  # bottlenecks: down and up
    assert (config.stages.codec, total(config)) == ("bottleneck", SIZES[name] + codecs)
    unit = {"m": 10**6, "b": 10**9}[name[-1]]
    assert SIZES[name] == pytest.approx(float(name[:-1]) * unit, rel=0.1), "the name says the size"
    assert not config.model.tie_embeddings


@pytest.mark.parametrize("name", SIZES)
def test_stages_build_on_the_meta_device_with_as_many_parameters(name):
    config = preset(name)
    cuts = cut_blocks(config)
    # Stages in the middle differ in their number of blocks only, so one of each is enough.
    distinct = {(0, cuts[0][1]): 0, (len(cuts) - 1, 0): len(cuts) - 1}
    distinct |= {(-1, stop - start): stage for stage, (start, stop) in enumerate(cuts) if 0 < stage < len(cuts) - 1}
    with torch.device("meta"):
        for stage in distinct.values():
            module = LlamaStage(config, stage, cuts[stage])
            assert all(tensor.is_meta for tensor in module.parameters())
            assert sum(tensor.numel() for tensor in module.parameters()) == count_parameters(config, stage, cuts[stage])


def test_the_papers_cases():
    small = preset("1.5b")
    assert (small.model.blocks, small.model.width, small.model.heads, small.model.kv_heads) == (16, 2048, 32, 8)
    assert (small.model.ffn, small.model.vocabulary, small.model.rope_scaling) == (8192, 128_256, True)
    assert (small.stages.count, small.stages.channels, small.stages.wire_dtype) == (4, 32, "bfloat16")
    middle = preset("15b")
    assert (middle.model.blocks, middle.model.width, middle.stages.count) == (50, 5120, 5)
    large = preset("70b")
    assert (large.model.blocks, large.model.width, large.model.heads, large.model.kv_heads) == (80, 8192, 64, 8)
    assert (large.model.ffn, large.stages.count) == (28_672, 9), "nine stages: eight bottlenecks"
    ratios = {name: 4 * c.model.width / (2 * c.stages.channels) for name, c in ((n, preset(n)) for n in SIZES)}
    assert all(ratios[name] == 128 for name in ("400m", "1.5b", "8b", "15b", "70b", "100b"))


def test_a_run_file_stands_over_its_preset():
    config = parse_run('name = "a"\npreset = "10m"\n[model]\nblocks = 8\n[stages]\ncodec = "identity"\n')
    assert (config.model.blocks, config.model.width, config.model.vocabulary) == (8, 384, 4096)
    assert (config.stages.codec, config.stages.count) == ("identity", 4)
    assert parse_run(save_run(config)) == config, "what is saved holds the values"
    assert parse_run('name = "a"\npreset = "10m"\n').model == presets()["10m"][0]


def test_set_puts_a_preset_in_place_of_the_files_values():
    base = parse_run('name = "a"\nseed = 3\n[model]\nwidth = 64\n[train]\nbatch = 9\n')
    config = with_values(base, ["preset=1m", "model.blocks=7"])
    assert (config.seed, config.train.batch, config.model.width, config.model.blocks) == (3, 9, 128, 7)
    assert with_values(base, ["model.blocks=7", "preset=1m"]).model.blocks == 6, "in the order given"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('preset = "2b"', 'preset = "2b" does not exist; write one of: 1m, 10m'),
        ("preset = 1", "preset = 1 is a whole number; write a text"),
        ('presett = "1m"', "Did you mean 'preset'"),
        ('preset = "1m"\n[model]\nwidht = 3', "Did you mean 'width'"),
        ('preset = "1.5b"\n[stages]\ncount = 17', "stages.count = 17 is more than model.blocks = 16"),
        ('preset = "1.5b"\n[stages]\nchannels = 4096', "stages.channels = 4096 is more than model.width = 2048"),
        ('preset = "8b"\n[model]\nheads = 30', "model.heads = 30 does not divide model.width = 4096"),
        ('preset = "70b"\n[model]\ntie_embeddings = true', "model.tie_embeddings = true needs one stage"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_built(text, wanted):
    with pytest.raises(ConfigError) as caught:
        check(parse_run('name = "a"\n' + text + "\n"))
    assert wanted in str(caught.value)


def test_set_refuses_an_unknown_preset():
    with pytest.raises(ConfigError, match=r'--set: preset = "2b" does not exist; write one of: 1m'):
        with_values(parse_run('name = "a"\n'), ["preset=2b"])
    with pytest.raises(ConfigError, match=r"--set: preset = \[1\] is a list; write a text"):
        with_values(parse_run('name = "a"\n'), ["preset=[1]"])


def test_a_large_model_without_compression_does_not_fit_into_a_message():
    with pytest.raises(ConfigError, match=r"134,217,728 bytes.*limits\.inline_bytes"):
        preset("8b", "stages.codec=identity")
